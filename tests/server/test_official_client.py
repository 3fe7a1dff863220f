"""Errors as OpenAI's own client raises them, for each of its exception classes."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from support.live import Live, live_server, story_command

from octavo.scheduler.messages import EngineConfig
from octavo.server.access import AccessRules

USER = [{"role": "user", "content": "Say something."}]


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server with a key, room for two requests and small bodies."""
    command = story_command(tmp_path_factory.mktemp("strict"), {})
    config = EngineConfig(model="smollm2", max_num_seqs=2)
    rules = AccessRules(("key",))
    with live_server(config, command=command, max_queued_requests=0, max_body_bytes=10_000, rules=rules) as server:
        yield server


@pytest.fixture
def client(strict: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{strict.url}/v1", api_key="key", max_retries=0) as client:
        yield client


@pytest.mark.parametrize(
    ("fields", "kind", "code", "param"),
    [
        ({"temperature": 5}, openai.BadRequestError, "invalid_value", "temperature"),
        ({"max_tokens": -1}, openai.BadRequestError, "invalid_value", "max_tokens"),
        ({"messages": []}, openai.BadRequestError, "invalid_value", "messages"),
        ({"functions": [{"name": "f"}]}, openai.BadRequestError, "unsupported_parameter", "functions"),
        (
            {"messages": [{"role": "user", "content": "a " * 4000}]},
            openai.BadRequestError,
            "context_length_exceeded",
            "messages",
        ),
        ({"model": "other"}, openai.NotFoundError, "model_not_found", "model"),
        ({"n": 3}, openai.RateLimitError, "queue_full", None),
        ({"messages": [{"role": "user", "content": "a" * 20_000}]}, openai.APIStatusError, None, None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_is_an_exception_with_code_and_parameter(
    client: openai.OpenAI,
    fields: dict,
    kind: type[openai.APIStatusError],
    code: str | None,
    param: str | None,
    stream: bool,
) -> None:
    with pytest.raises(kind) as raised:
        client.chat.completions.create(**{"model": "smollm2", "messages": USER, "stream": stream, **fields})
    assert (raised.value.code, raised.value.param) == (code, param)
    assert raised.value.request_id
    assert client.chat.completions.create(model="smollm2", messages=USER, max_tokens=1).choices


def test_a_wrong_key_is_an_authentication_error(strict: Live) -> None:
    with (
        openai.OpenAI(base_url=f"{strict.url}/v1", api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError) as raised,
    ):
        client.chat.completions.create(model="smollm2", messages=USER)
    assert raised.value.code == "invalid_api_key"


def test_a_server_that_drains_is_an_internal_server_error_that_is_tried_again(tmp_path: Path) -> None:
    with live_server(command=story_command(tmp_path, {})) as live:
        live.service.draining = True
        with (
            openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client,
            pytest.raises(openai.InternalServerError) as raised,
        ):
            client.chat.completions.create(model="smollm2", messages=USER)
        assert (raised.value.status_code, raised.value.code) == (503, "draining")
        assert raised.value.response.headers["retry-after"] == "5"


def test_extensions_pass_through_the_clients_own_types(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smollm2",
        messages=USER,
        max_tokens=4,
        logprobs=True,
        top_logprobs=1,
        extra_body={"return_token_ids": True, "prompt_logprobs": 1, "min_p": 0.1, "bad_words": ["the"]},
    )
    (choice,) = answer.choices
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [type(entry.logprob) for entry in choice.logprobs.content] == [float] * 4
    assert len(choice.model_extra["token_ids"]) == 4  # type: ignore[index]
    assert answer.usage is not None
    assert len(answer.model_extra["prompt_token_ids"]) == answer.usage.prompt_tokens  # type: ignore[index]
    assert len(answer.model_extra["prompt_logprobs"]) == answer.usage.prompt_tokens  # type: ignore[index]
