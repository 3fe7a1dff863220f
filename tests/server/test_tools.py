"""Calls that a model makes of its own accord: from a told text to what clients see, and how tools are told."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from support.live import Live, live_server, story_command

from octavo.model.weights.locate import locate
from octavo.server.template import ChatTemplate
from octavo.server.tokenizer_files import load_tokenizer
from octavo.server.tool_parsers import HERMES, LLAMA3_JSON, MISTRAL
from octavo.server.tools import Tool, choose_format, describe

QUESTION = {"role": "user", "content": "Weather?"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALLS = [("weather", {"city": "Zürich", "note": 'say "hi" </tool_call>'}), ("weather", {})]
TEXT = "Let me look.\n" + "\n".join(
    "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>" for name, arguments in CALLS
)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server whose model answers the question with two calls."""
    tokenizer = load_tokenizer(locate("smollm2"))
    template = ChatTemplate(tokenizer.chat_template or "", tokenizer.bos_token, tokenizer.eos_token)
    told = describe([QUESTION], [Tool.model_validate(TOOL).for_template()])
    prompt = tokenizer.encode(template.render(told), add_special_tokens=False)
    story = prompt + tokenizer.encode(TEXT, add_special_tokens=False)
    with live_server(command=story_command(tmp_path_factory.mktemp("calls"), {prompt[0]: story})) as server:
        yield server


def request(**more: Any) -> dict[str, Any]:
    return {"model": "smollm2", "messages": [QUESTION], "tools": [TOOL], "max_tokens": 300, **more}


def test_calls_in_a_text_are_told_from_its_content(live: Live) -> None:
    (choice,) = live.chat(**request())["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] == "Let me look."
    assert [call["type"] for call in message["tool_calls"]] == ["function", "function"]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    functions = [call["function"] for call in message["tool_calls"]]
    assert [(function["name"], json.loads(function["arguments"])) for function in functions] == CALLS


def test_b19_b20_the_official_client_adds_a_stream_up_to_the_same_calls(live: Live) -> None:
    whole = live.chat(**request())["choices"][0]["message"]
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        with client.chat.completions.stream(**request()) as stream:
            final = stream.get_final_completion().choices[0]
        assert final.finish_reason == "tool_calls"
        assert final.message.content == whole["content"]
        found = [(call.function.name, call.function.arguments) for call in final.message.tool_calls or ()]
        assert found == [(call["function"]["name"], call["function"]["arguments"]) for call in whole["tool_calls"]]
        deltas = [
            call
            for chunk in client.chat.completions.create(**request(), stream=True)
            for call in chunk.choices[0].delta.tool_calls or ()
        ]
    for index in (0, 1):
        own = [delta for delta in deltas if delta.index == index]
        assert own[0].id
        assert own[0].type == "function"
        assert own[0].function
        assert (own[0].function.name, own[0].function.arguments) == ("weather", "")
        assert all(delta.id is None and delta.type is None and delta.function.name is None for delta in own[1:])
        assert len(own) > 1


def test_log_probabilities_come_with_all_tokens_whatever_they_are_part_of(live: Live) -> None:
    fields = request(logprobs=True, top_logprobs=0, return_token_ids=True)
    whole = live.chat(**fields)["choices"][0]
    streamed = [chunk["choices"][0] for chunk in live.stream("/v1/chat/completions", **fields) if chunk["choices"]]
    entries = [entry for choice in streamed if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert entries == whole["logprobs"]["content"]
    assert [token for choice in streamed for token in choice.get("token_ids") or ()] == whole["token_ids"]


def test_a_call_that_is_cut_off_ends_for_length(live: Live) -> None:
    (choice,) = live.chat(**request(max_tokens=30))["choices"]
    assert choice["finish_reason"] == "length"
    (call,) = choice["message"]["tool_calls"]
    assert json.dumps(CALLS[0][1]).startswith(call["function"]["arguments"])


def test_tools_are_told_after_what_the_system_says() -> None:
    tool = Tool.model_validate(TOOL).for_template()
    system = {"role": "system", "content": "Be brief."}
    told = describe([system, QUESTION], [tool])
    assert told[0]["content"].startswith("Be brief.\n\n")
    assert json.dumps(tool) in told[0]["content"]
    assert told[1:] == [QUESTION]
    assert describe([system, QUESTION], []) == [system, QUESTION]


def test_a_template_that_knows_tools_writes_them_itself() -> None:
    template = ChatTemplate(
        "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}{{ messages[0].content }}"
    )
    assert template.knows_tools
    assert template.render([QUESTION], tools=[TOOL]) == "[weather]Weather?"
    assert not ChatTemplate("{{ messages }} tools").knows_tools


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ tools }}<tool_call>", HERMES),
        ("{{ tools }}[TOOL_CALLS]", MISTRAL),
        ("{{ tools }}<|python_tag|>", LLAMA3_JSON),
        ("{{ tools }}", HERMES),
        ("{{ messages }}[TOOL_CALLS]", HERMES),
    ],
)
def test_the_format_is_read_off_the_template(source: str, expected: object) -> None:
    tokenizer = load_tokenizer(locate("smollm2"))
    assert choose_format("auto", ChatTemplate(source), tokenizer) is expected
    assert choose_format("mistral", ChatTemplate(source), tokenizer) is MISTRAL


def test_nulls_within_parameters_are_told_as_they_stand() -> None:
    parameters = {"type": "object", "properties": {"unit": {"enum": ["C", None], "default": None}}}
    function = {"name": "weather", "parameters": parameters, "description": None, "strict": True}
    told = Tool.model_validate({"type": "function", "function": function}).for_template()
    assert told == {"type": "function", "function": {"name": "weather", "parameters": parameters}}
