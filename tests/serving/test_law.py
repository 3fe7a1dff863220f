"""A sample of the law of tests/support/law.py on the real default model: no story is told, everything is computed."""

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.law import check_chats, check_completions, prompts
from support.live import Live, live_server

from octavo.scheduler.messages import EngineConfig

fields = st.fixed_dictionaries(
    {
        "n": st.integers(1, 3),
        "max_tokens": st.integers(0, 12),
        "seed": st.integers(0, 2**62),
        "temperature": st.sampled_from([0, 1, 1.8]),
        "return_token_ids": st.just(True),
    }
)
sample = settings(
    max_examples=10,
    phases=[Phase.generate],
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_server(EngineConfig(model="smollm2", max_model_len=512)) as server:
        yield server


@sample
@given(prompts, fields, st.sampled_from([None, 0, 2]), st.booleans(), st.data())
def test_b15_c07_completions_of_the_real_model(
    live: Live, prompt: str, asked: dict, logprobs: int | None, echo: bool, data: st.DataObject
) -> None:
    check_completions(live, {"prompt": prompt, "logprobs": logprobs, "echo": echo, **asked}, data)


@sample
@given(prompts, fields, st.sampled_from([None, 0, 2]), st.data())
def test_b15_c07_chats_of_the_real_model(
    live: Live, prompt: str, asked: dict, alternatives: int | None, data: st.DataObject
) -> None:
    check_chats(live, prompt, asked, alternatives, data)
