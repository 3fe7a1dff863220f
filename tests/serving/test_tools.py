"""Tools on the real default model, asked through the official client. Its template knows no tools."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pydantic
import pytest
from support.live import Live, live_server
from support.schemas import COLOUR, record

from octavo.scheduler.messages import EngineConfig

USER = {"role": "user", "content": "What is the weather in Paris?"}
CITY = record(city={"enum": ["Paris", "Rome"]}, days={"type": "integer", "minimum": 1, "maximum": 9})
PAINT = record(colour=COLOUR)


def tool(name: str, parameters: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": name, "description": f"Does {name}.", "parameters": parameters, **more},
    }


TOOLS = [tool("get_weather", CITY), tool("paint", PAINT), tool("nothing", None)]
SCHEMAS = {"get_weather": CITY, "paint": PAINT, "nothing": record()}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_server(EngineConfig(model="smollm2", max_model_len=1024)) as server:
        yield server


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=120) as made:
        yield made


def check_calls(message: Any) -> list[str]:
    for call in message.tool_calls:
        assert call.type == "function"
        assert call.id
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    return [call.function.name for call in message.tool_calls]


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    request = {"model": "smollm2", "messages": [USER], "tools": TOOLS, "max_tokens": 100, "seed": 3, **fields}
    return client.chat.completions.create(**request)


def test_a_named_function_is_called_with_arguments_that_validate(client: openai.OpenAI) -> None:
    for name in SCHEMAS:
        choice = {"type": "function", "function": {"name": name}}
        (answer,) = ask(client, tool_choice=choice).choices
        assert answer.finish_reason == "tool_calls"
        assert check_calls(answer.message) == [name]
        assert answer.message.content is None


def test_required_calls_at_least_one_function(client: openai.OpenAI) -> None:
    (answer,) = ask(client, tool_choice="required", parallel_tool_calls=False).choices
    assert answer.finish_reason == "tool_calls"
    assert len(check_calls(answer.message)) == 1


def test_b19_a_stream_of_calls_adds_up_to_the_answer(client: openai.OpenAI) -> None:
    request = {
        "model": "smollm2",
        "messages": [USER],
        "tools": TOOLS,
        "tool_choice": "required",
        "temperature": 0,
        "max_tokens": 100,
        "parallel_tool_calls": False,
    }
    (whole,) = client.chat.completions.create(**request).choices
    with client.chat.completions.stream(**request) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == whole.finish_reason == "tool_calls"
    assert [call.function.name for call in final.message.tool_calls or ()] == check_calls(whole.message)
    for one, other in zip(final.message.tool_calls or (), whole.message.tool_calls, strict=True):
        assert one.function.arguments == other.function.arguments
    deltas = [
        call
        for chunk in client.chat.completions.create(**request, stream=True)
        for choice in chunk.choices
        for call in choice.delta.tool_calls or ()
    ]
    assert deltas[0].id
    assert (deltas[0].function.name, deltas[0].function.arguments) == (whole.message.tool_calls[0].function.name, "")
    assert all(delta.id is None and delta.function.name is None and delta.index == 0 for delta in deltas[1:])
    assert len(deltas) > 2


def test_strict_functions_are_called_only_with_what_validates(client: openai.OpenAI) -> None:
    strict = [tool("get_weather", CITY, strict=True)]
    answer = ask(client, tools=strict, n=4, temperature=1.5, max_tokens=60)
    for choice in answer.choices:
        if choice.message.tool_calls and choice.finish_reason == "tool_calls":
            check_calls(choice.message)


def test_an_answer_follows_the_format_or_calls(client: openai.OpenAI) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": PAINT}}
    answer = ask(client, response_format=wanted, n=4, parallel_tool_calls=False)
    for choice in answer.choices:
        if choice.finish_reason == "stop":
            jsonschema.validate(json.loads(choice.message.content), PAINT)
        elif choice.finish_reason == "tool_calls":
            check_calls(choice.message)


def test_calls_and_results_go_back_into_the_conversation(live: Live, client: openai.OpenAI) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    history = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny, 31 degrees"},
    ]
    answer = ask(client, messages=history, max_tokens=5, tool_choice="none")
    assert answer.choices[0].message.content
    ids = live.post("/tokenize", messages=history, tools=TOOLS).json()["tokens"]
    text = live.tokenizer.decode(ids, skip_special_tokens=False)
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>' in text
    assert "sunny, 31 degrees" in text
    assert '"name": "paint"' in text
    assert '"name": "paint"' not in live.tokenizer.decode(live.post("/tokenize", messages=history).json()["tokens"])


class Colour(pydantic.BaseModel):
    """A colour of paint."""

    name: str = pydantic.Field(max_length=10)
    rating: int = pydantic.Field(ge=0, le=9)


def test_the_official_client_parses_an_answer_into_a_model_of_pydantic(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="smollm2", messages=[{"role": "user", "content": "Rate a colour."}], response_format=Colour, max_tokens=80
    )
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, Colour)
    called = client.chat.completions.parse(
        model="smollm2",
        messages=[USER],
        tools=[openai.pydantic_function_tool(Colour)],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=80,
    )
    (call,) = called.choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Colour)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "unknown"}}}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
        ({"tools": [tool("a b", None)]}, "tools"),
        ({"tools": [tool("f", {"type": "array", "uniqueItems": True})], "tool_choice": "required"}, "tools"),
        ({"tools": [tool("f", {"properties": {"a": {"type": "nonsense"}}})], "tool_choice": "required"}, "tools"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"id": "x", "type": "function", "function": {"name": "f", "arguments": "[1"}}],
                    }
                ]
            },
            "messages",
        ),
    ],
)
def test_a17_what_cannot_be_meant_is_refused(live: Live, fields: dict[str, Any], param: str) -> None:
    body = {"messages": [USER], "tools": TOOLS, "max_tokens": 4, **fields}
    answer = live.post("/v1/chat/completions", **body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param, answer.text
