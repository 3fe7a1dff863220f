"""/v1/responses, read by the official client's own types."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.lib.streaming.responses import ResponseTextDeltaEvent
from openai.types.responses import Response
from support.daemon import running
from support.live import Live


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


def fields(**more: Any) -> dict[str, Any]:
    return {"model": "smollm2", "input": "Tell me.", "max_output_tokens": 12, **more}


def test_a_text_is_answered_with_an_object_that_the_clients_types_accept(live: Live, client: openai.OpenAI) -> None:
    response = client.responses.create(**fields(instructions="Be brief.", metadata={"a": "b"}, temperature=0))
    Response.model_validate(response.model_dump(), strict=True)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tell me."}]
    chat = live.chat(messages=messages, max_tokens=12, temperature=0)
    assert response.output_text == chat["choices"][0]["message"]["content"]
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (response.store, response.metadata, response.instructions) == (False, {"a": "b"}, "Be brief.")
    usage, expected = response.usage, chat["usage"]
    assert (usage.input_tokens, usage.output_tokens) == (expected["prompt_tokens"], expected["completion_tokens"])
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens


def test_a_stream_tells_the_same_in_numbered_events(client: openai.OpenAI) -> None:
    whole = client.responses.create(**fields(temperature=0))
    with client.responses.stream(**fields(temperature=0)) as stream:
        events = list(stream)
    final = events[-1].response
    kinds = [event.type for event in events]
    deltas = kinds.count("response.output_text.delta")
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert deltas >= 1
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(e.delta for e in events if isinstance(e, ResponseTextDeltaEvent)) == final.output_text
    assert (final.output_text, final.usage.output_tokens) == (whole.output_text, whole.usage.output_tokens)
    assert len({event.item_id for event in events if hasattr(event, "item_id")}) == 1


def test_an_answer_that_stops_by_itself_is_completed(client: openai.OpenAI) -> None:
    text = client.responses.create(**fields(temperature=0)).output_text
    stop = {"stop": [text[3:6]]}
    whole = client.responses.create(**fields(temperature=0, extra_body=stop))
    with client.responses.stream(**fields(temperature=0, extra_body=stop)) as stream:
        final = stream.get_final_response()
    for response in (whole, final):
        assert (response.status, response.incomplete_details) == ("completed", None)
        assert response.output_text == text[: text.index(text[3:6])]


@pytest.mark.parametrize(
    ("route", "body", "delta"),
    [
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 50}, "response.output_text.delta"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50}, "content_block_delta"),
    ],
)
def test_text_is_sent_as_it_grows(route: str, body: dict[str, Any], delta: str) -> None:
    with running(step_seconds=0.01) as daemon:
        response = httpx.post(daemon.url + route, json={"model": "smollm2", "stream": True, **body}, timeout=60)
    assert response.text.count(f"event: {delta}\n") > 10


def test_events_are_named_and_nothing_follows_the_last(live: Live) -> None:
    with httpx.stream("POST", f"{live.url}/v1/responses", json=fields(stream=True), timeout=60) as response:
        text = response.read().decode()
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = text.split("\n\n")
    assert events.pop() == ""
    for event in events:
        name, data = event.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"
    assert "response.incomplete" in events[-1]


def test_items_may_be_messages_with_parts(live: Live, client: openai.OpenAI) -> None:
    halves = [{"type": "input_text", "text": text} for text in ("Hel", "lo")]
    answered = [{"type": "output_text", "text": "Yes?", "annotations": []}]
    items = [
        {"role": "developer", "content": "Rhyme."},
        {
            "type": "message",
            "role": "user",
            "content": halves,
        },
        {
            "type": "message",
            "role": "assistant",
            "content": answered,
        },
        {"role": "user", "content": "More."},
    ]
    response = client.responses.create(**fields(input=items, temperature=0))
    messages = [{"role": "developer", "content": "Rhyme."}, {"role": "user", "content": "Hello"}]
    messages += [{"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "More."}]
    chat = live.chat(messages=messages, max_tokens=12, temperature=0)
    assert response.output_text == chat["choices"][0]["message"]["content"]
    assert response.usage.input_tokens == chat["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"max_completion_tokens": 5}, "max_completion_tokens"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"text": {"format": {"type": "yaml"}}}, "text"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text"),
        ({"text": {"format": {"type": "json_schema", "name": "a b", "schema": {}}}}, "text"),
        ({"text": {"format": {"type": "json_object", "grammar": "a"}}}, "text"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "x"}}}}, "text.format"),
        ({"text": {"verbosity": "low"}}, "text"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"n": 2}, "n"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": [{"type": "function_call_output", "call_id": "a", "output": "b"}]}, "input"),
        ({"input": [{"role": "user"}]}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"input": "a " * 9000}, "input"),
    ],
)
def test_what_is_not_built_or_out_of_range_is_refused_by_its_name(
    more: dict[str, Any], param: str, live: Live, client: openai.OpenAI
) -> None:
    for stream in (False, True):
        response = httpx.post(f"{live.url}/v1/responses", json=fields(stream=stream, **more), timeout=60)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == param
    assert client.responses.create(**fields()).output_text


def test_errors_are_the_clients_own_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        client.responses.create(**fields(model="other"))
    assert raised.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError):
        client.responses.create(**fields(store=True))
