"""LangChain's ChatOpenAI: answers, streams, log-probabilities and usage."""

from typing import Any

import pytest
from support.live import Live

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("default")]

QUESTION = "What is the capital of France?"


@pytest.fixture
def model(live: Live) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(base_url=f"{live.url}/v1", api_key="none", model="smollm2", temperature=0, max_tokens=20)


def test_an_answer_and_its_stream_are_the_same(model: Any) -> None:
    answer = model.invoke(QUESTION)
    assert "Paris" in answer.content
    assert answer.usage_metadata["output_tokens"] > 0
    assert answer.response_metadata["finish_reason"] in ("stop", "length")
    assert "".join(chunk.content for chunk in model.stream(QUESTION)) == answer.content


def test_a_conversation_with_a_system_message_and_options(model: Any) -> None:
    bound = model.bind(stop=["Paris"], logprobs=True, top_logprobs=2)
    answer = bound.invoke([("system", "You answer briefly."), ("human", QUESTION)])
    assert "Paris" not in answer.content
    assert len(answer.response_metadata["logprobs"]["content"][0]["top_logprobs"]) == 2


def test_several_conversations_at_once(model: Any) -> None:
    alone = model.invoke(QUESTION).content
    assert [answer.content for answer in model.batch([QUESTION] * 4)] == [alone] * 4
