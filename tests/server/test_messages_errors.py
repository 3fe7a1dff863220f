"""Errors of /v1/messages: in Anthropic's shape wherever they arise, and as Anthropic's client raises them."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from support.live import Live, live_server, story_command
from support.raw import exchange, get
from support.story_engine import SLOW

from octavo.model.weights.locate import locate
from octavo.scheduler.messages import EngineConfig
from octavo.server.access import AccessRules
from octavo.server.template import ChatTemplate
from octavo.server.tokenizer_files import load_tokenizer

QUESTION = {"role": "user", "content": "Tell me."}
ROUTES = ("/v1/messages", "/v1/messages/count_tokens")


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server with a key, room for one request and small bodies. Its model says a few words, then the device fails."""
    tokenizer = load_tokenizer(locate("smollm2"))
    template = ChatTemplate(tokenizer.chat_template or "", tokenizer.bos_token, tokenizer.eos_token)
    prompt = tokenizer.encode(template.render([QUESTION]), add_special_tokens=False)
    story = [*prompt, *tokenizer.encode("One, two, three, four", add_special_tokens=False), None]
    command = story_command(tmp_path_factory.mktemp("failing"), {prompt[0]: story})
    config = EngineConfig(model="smollm2", max_num_seqs=1)
    with live_server(
        config, command=command, max_queued_requests=0, max_body_bytes=10_000, rules=AccessRules(("key",))
    ) as server:
        yield server


@pytest.fixture
def client(live: Live) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=live.url, api_key="key", max_retries=0) as opened:
        yield opened


def fields(**more: Any) -> dict[str, Any]:
    return {"model": "smollm2", "max_tokens": 3, "messages": [QUESTION], **more}


def check_shape(response: httpx.Response, status: int, kind: str) -> None:
    body = response.json()
    assert response.status_code == status, response.text
    assert body.keys() == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert body["error"].keys() == {"type", "message"}
    assert body["error"]["type"] == kind
    assert body["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]


@pytest.mark.parametrize(
    ("more", "raised", "kind"),
    [
        ({"max_tokens": 0}, anthropic.BadRequestError, "invalid_request_error"),
        ({"messages": [{"role": "user", "content": "a " * 3000}]}, anthropic.BadRequestError, "invalid_request_error"),
        ({"model": "other"}, anthropic.NotFoundError, "not_found_error"),
        (
            {"messages": [{"role": "user", "content": "a" * 20_000}]},
            anthropic.RequestTooLargeError,
            "request_too_large",
        ),
        ({"max_tokens": 20}, anthropic.InternalServerError, "api_error"),
    ],
)
def test_a_refusal_is_an_exception_of_the_clients(
    client: anthropic.Anthropic, more: dict[str, Any], raised: type[anthropic.APIStatusError], kind: str
) -> None:
    with pytest.raises(raised) as found:
        client.messages.create(**fields(**more))
    assert found.value.type == kind
    assert found.value.request_id
    assert client.messages.create(**fields()).content


def test_a_full_queue_is_a_rate_limit(client: anthropic.Anthropic, live: Live) -> None:
    slow = {"model": "smollm2", "prompt": [SLOW], "max_tokens": 1000, "stream": True}
    headers = {"x-api-key": "key"}
    with httpx.stream("POST", f"{live.url}/v1/completions", json=slow, headers=headers) as response:
        lines = response.iter_lines()  # to be kept: with it the response is closed
        next(lines)
        with pytest.raises(anthropic.RateLimitError) as found:
            client.messages.create(**fields())
    assert found.value.type == "rate_limit_error"
    assert found.value.response.headers["retry-after"]


def test_every_way_to_be_refused_has_the_shape(live: Live) -> None:
    known = {"x-api-key": "key"}
    for route in ROUTES:
        url = live.url + route
        check_shape(httpx.post(url, json={}), 401, "authentication_error")
        check_shape(httpx.get(url, headers=known), 405, "invalid_request_error")
        check_shape(httpx.post(url, headers=known, content=b"{}"), 415, "invalid_request_error")
        check_shape(httpx.post(url, headers=known, json=[]), 400, "invalid_request_error")
        check_shape(httpx.post(url, headers=known, json=fields(max_tokens=1, model="x")), 404, "not_found_error")
        (_, body) = exchange(live.url, get(route)).decode().split("\r\n\r\n")
        assert json.loads(body)["error"]["type"] == "invalid_request_error", "without a Host"
    check_shape(httpx.get(live.url + "/v1/messages/nowhere", headers=known), 404, "not_found_error")
    others = httpx.get(live.url + "/v1/messagesx", headers=known)
    assert (others.status_code, others.json()["error"]["param"]) == (404, None)
    assert "request-id" not in others.headers


def test_what_fails_on_the_way_is_told_in_the_stream(client: anthropic.Anthropic) -> None:
    said: list[str] = []
    with client.messages.stream(**fields(max_tokens=20)) as stream, pytest.raises(anthropic.APIStatusError) as found:
        said.extend(stream.text_stream)
    assert "".join(said) == "One, two, three, four", "all that came before"
    assert found.value.body == {
        "type": "error",
        "error": {"type": "api_error", "message": "The server met an internal error; see its log."},
    }


def test_a_server_that_drains_is_overloaded(client: anthropic.Anthropic, live: Live) -> None:
    live.service.draining = True
    try:
        with pytest.raises(anthropic.OverloadedError) as found:
            client.messages.create(**fields())
        check_shape(
            httpx.post(f"{live.url}/v1/messages", headers={"x-api-key": "key"}, json=fields()), 529, "overloaded_error"
        )
    finally:
        live.service.draining = False
    assert found.value.type == "overloaded_error"
    assert int(found.value.response.headers["retry-after"]) >= 1
