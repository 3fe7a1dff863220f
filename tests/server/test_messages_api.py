"""/v1/messages, read by Anthropic's official client."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message
from support.live import Live


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0) as opened:
        yield opened


GREEDY = {"temperature": 0}
"""Sent beside what the client knows: its newest version has dropped the field."""


def fields(**more: Any) -> dict[str, Any]:
    return {"model": "smollm2", "max_tokens": 12, "messages": [{"role": "user", "content": "Tell me."}], **more}


def test_a_message_is_answered_with_an_object_that_the_clients_types_accept(
    live: Live, client: anthropic.Anthropic
) -> None:
    message = client.messages.create(**fields(system="Be brief.", extra_body=GREEDY))
    Message.model_validate(message.model_dump(), strict=True)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tell me."}]
    chat = live.chat(messages=messages, max_tokens=12, temperature=0)
    assert [block.text for block in message.content] == [chat["choices"][0]["message"]["content"]]
    assert (message.stop_reason, message.stop_sequence, message.role) == ("max_tokens", None, "assistant")
    counted = client.messages.count_tokens(model="smollm2", system="Be brief.", messages=fields()["messages"])
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == chat["usage"]["prompt_tokens"] == counted.input_tokens
    assert usage.output_tokens == 12


def test_a_stream_tells_the_same(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**fields(extra_body=GREEDY))
    with client.messages.stream(**fields(extra_body=GREEDY)) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(pieces) == final.content[0].text == whole.content[0].text
    assert (final.stop_reason, final.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_events_come_in_their_order_and_are_named(live: Live) -> None:
    with httpx.stream("POST", f"{live.url}/v1/messages", json=fields(stream=True), timeout=60) as response:
        text = response.read().decode()
    names = []
    for event in text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        names.append(json.loads(data.removeprefix("data: "))["type"])
        assert name == f"event: {names[-1]}"
    deltas = names.count("content_block_delta")
    head, tail = ["message_start", "content_block_start"], ["content_block_stop", "message_delta", "message_stop"]
    assert names == [*head, *["content_block_delta"] * deltas, *tail]


def test_a_stop_sequence_ends_the_message_and_is_named(client: anthropic.Anthropic) -> None:
    text = client.messages.create(**fields(extra_body=GREEDY)).content[0].text
    stop = text[3:6]
    message = client.messages.create(**fields(extra_body=GREEDY, stop_sequences=["never seen", stop]))
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert message.content[0].text == text[: text.index(stop)]
    with client.messages.stream(**fields(extra_body=GREEDY, stop_sequences=[stop])) as stream:
        final = stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence, final.content[0].text) == (
        "stop_sequence",
        stop,
        text[: text.index(stop)],
    )


def test_turns_of_one_role_are_joined_and_an_assistants_last_turn_is_continued(
    live: Live, client: anthropic.Anthropic
) -> None:
    blocks = [{"type": "text", "text": "Tell", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": " me"}]
    turns = [{"role": "user", "content": blocks}, {"role": "user", "content": "."}]
    counted = client.messages.count_tokens(model="smollm2", messages=turns).input_tokens
    assert counted == client.messages.count_tokens(model="smollm2", messages=fields()["messages"]).input_tokens
    begun = [*fields()["messages"], {"role": "assistant", "content": "Once upon"}]
    message = client.messages.create(**fields(messages=begun, extra_body=GREEDY))
    chat = live.chat(
        messages=begun, continue_final_message=True, add_generation_prompt=False, max_tokens=12, temperature=0
    )
    assert message.content[0].text == chat["choices"][0]["message"]["content"]
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens == chat["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"tools": [{"name": "f", "input_schema": {"type": "object"}}]}, "tools"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"mcp_servers": [{"type": "url", "url": "x", "name": "y"}]}, "mcp_servers"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages"),
        ({"messages": [{"role": "system", "content": "a"}]}, "messages"),
        ({"messages": []}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"n": 2}, "'n'"),
        ({"messages": [{"role": "user", "content": "a " * 9000}]}, "maximum context length"),
    ],
)
def test_what_is_not_built_or_out_of_range_is_refused_by_its_name(
    more: dict[str, Any], named: str, live: Live, client: anthropic.Anthropic
) -> None:
    for stream in (False, True):
        response = httpx.post(f"{live.url}/v1/messages", json=fields(stream=stream) | more, timeout=60)
        assert response.status_code == 400, response.text
        body = response.json()
        assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
        assert named in body["error"]["message"]
    assert client.messages.create(**fields()).content


def test_tokens_are_not_counted_of_what_would_be_refused(client: anthropic.Anthropic) -> None:
    tool: Any = {"name": "f", "input_schema": {"type": "object"}}
    with pytest.raises(anthropic.BadRequestError, match="tools"):
        client.messages.count_tokens(model="smollm2", messages=fields()["messages"], tools=[tool])
