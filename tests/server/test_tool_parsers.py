"""Calls in a model's text: the same whatever the text's chunking, and content where they are none."""

import json
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from octavo.server.tool_parsers import FORMATS, HERMES, LLAMA3_JSON, MISTRAL, CallDelta, ToolFormat, ToolParser

Found = tuple[str, list[tuple[str, str]]]


def parse(tools: ToolFormat, chunks: Sequence[str]) -> Found:
    """The content, and each call's name and arguments, put together as clients do."""
    parser = ToolParser(tools)
    pieces = [piece for chunk in chunks for piece in parser.feed(chunk)] + parser.finish()
    content, calls = "", []
    for piece in pieces:
        if isinstance(piece, str):
            assert piece
            content += piece
        elif piece.id is not None:
            assert piece.index == len(calls)
            assert piece.name
            calls.append([piece.name, piece.arguments])
        else:
            assert (piece.index, piece.name) == (len(calls) - 1, None)
            assert piece.arguments
            calls[-1][1] += piece.arguments
    assert parser.calls == len(calls)
    return content, [(name, arguments) for name, arguments in calls]


def written(tools: ToolFormat, calls: Sequence[tuple[str, object]]) -> str:
    """Calls as a model of this format writes them."""
    objects = [json.dumps({"name": name, tools.arguments: arguments}, ensure_ascii=False) for name, arguments in calls]
    if tools is HERMES:
        return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in objects)
    if tools is MISTRAL:
        return f"[TOOL_CALLS][{', '.join(objects)}]"
    return "; ".join(objects)


def headed(calls: Sequence[tuple[str, object]], call_id: str = "") -> str:
    """Calls as newer models of Mistral write them."""
    return "".join(f"[TOOL_CALLS]{name}{call_id}[ARGS]{json.dumps(arguments)}" for name, arguments in calls)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=8)
    | st.sampled_from(['"', "\\", "}{", "</tool_call>"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
CALLS = st.lists(
    st.tuples(st.text("abc_", min_size=1), st.dictionaries(st.text(max_size=5), VALUES)), min_size=1, max_size=3
)


@settings(deadline=None)
@given(st.sampled_from(list(FORMATS.values())), CALLS)
def test_calls_are_found_with_their_arguments(tools: ToolFormat, calls: list[tuple[str, dict[str, object]]]) -> None:
    for text in (written(tools, calls), headed(calls), headed(calls, "[CALL_ID]a1b2c3d4e")):
        content, found = parse(tools if text == written(tools, calls) else MISTRAL, [text])
        assert content == ""
        assert [(name, json.loads(arguments)) for name, arguments in found] == calls


def cut(text: str, places: Sequence[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[start:end] for start, end in pairwise(ends)]


MARKS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "[TOOL_CALLS]f[ARGS]{", "[CALL_ID]", "[ARGS]"]
OBJECTS = ['{"name": "f", ', '"arguments": {"a": 1}}', '"parameters": {}}', '"name"']
PARTS = st.lists(st.sampled_from([*MARKS, *OBJECTS, "tool", *'{}[]"\\,;: \n<x1']), max_size=25)
TOOLS = st.sampled_from(list(FORMATS.values()))


@settings(deadline=None, max_examples=400)
@given(TOOLS, PARTS, st.lists(st.integers(0, 500)))
@example(HERMES, ["<tool_call>", "{", "}", "x"], [3])
def test_b20_every_chunking_gives_the_same_calls(tools: ToolFormat, parts: list[str], places: list[int]) -> None:
    text = "".join(parts)
    whole = parse(tools, [text])
    assert parse(tools, cut(text, places)) == whole
    assert parse(tools, list(text)) == whole


@settings(deadline=None)
@given(TOOLS, PARTS)
def test_a_text_without_calls_is_content_as_it_stands(tools: ToolFormat, parts: list[str]) -> None:
    text = "".join(parts)
    content, calls = parse(tools, [text])
    if not calls:
        assert content == text
    if not text.replace("}", "{").count("{"):
        assert not calls


@pytest.mark.parametrize(
    ("tools", "text", "content", "calls"),
    [
        (HERMES, "Let me see.\n" + written(HERMES, [("f", {})]), "Let me see.", [("f", "{}")]),
        (HERMES, written(HERMES, [("f", {})]) + "\nDone.", "\nDone.", [("f", "{}")]),
        (HERMES, '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        (HERMES, '<tool_call>{"arguments": {"a": [1]}, "name": "f"}</tool_call>', "", [("f", '{"a": [1]}')]),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "un', "", [("f", '{"a": "un')]),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_', "", [("f", '{"a": 1}')]),
        (HERMES, '<tool_call>{"name": 7, "arguments": {}}</tool_call>', None, []),
        (HERMES, '<tool_call>{"name": "f", "arguments": "x"}</tool_call>', None, []),
        (HERMES, "<tool_call>f(1)</tool_call>", None, []),
        (HERMES, "<tool_call>__import__('os').system('true')</tool_call>", None, []),
        (HERMES, '{"name": "f", "arguments": {}}', None, []),
        (HERMES, "a < b and <tool", None, []),
        (LLAMA3_JSON, '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
        (
            LLAMA3_JSON,
            '{"name": "f", "parameters": {}}, {"name": "g", "parameters": {}}',
            "",
            [("f", "{}"), ("g", "{}")],
        ),
        (LLAMA3_JSON, 'The answer is {"name": "f", "parameters": {}}', None, []),
        (LLAMA3_JSON, '{"answer": 42}', None, []),
        (MISTRAL, 'Hm. [TOOL_CALLS] [{"name": "f", "arguments": {}}]', "Hm.", [("f", "{}")]),
        (MISTRAL, '[{"name": "f", "arguments": {}}]', None, []),
        (MISTRAL, 'Hm. [TOOL_CALLS]f[ARGS]{"a": 1}', "Hm.", [("f", '{"a": 1}')]),
        (
            MISTRAL,
            '[TOOL_CALLS]f[ARGS]{"a": {}}[TOOL_CALLS]g_1[CALL_ID]x7[ARGS] {}',
            "",
            [("f", '{"a": {}}'), ("g_1", "{}")],
        ),
        (MISTRAL, '[TOOL_CALLS] f{"a": [1, 2]}\nDone.', "\nDone.", [("f", '{"a": [1, 2]}')]),
        (MISTRAL, '[TOOL_CALLS]f[ARGS]{"a": "un', "", [("f", '{"a": "un')]),
        (MISTRAL, "[TOOL_CALLS]f[ARGS]", None, []),
        (MISTRAL, "[TOOL_CALLS]f[ARGS]7", None, []),
        (MISTRAL, "[TOOL_CALLS]f(1) and more", None, []),
        (MISTRAL, "[TOOL_CALLS]f[CALL_ID][ARGS]{}", None, []),
        (MISTRAL, "f[ARGS]{}", None, []),
        (HERMES, "<tool_call>f[ARGS]{}</tool_call>", None, []),
    ],
)
def test_texts_of_models(tools: ToolFormat, text: str, content: str | None, calls: list[tuple[str, str]]) -> None:
    assert parse(tools, [text]) == (text if content is None else content, calls)


def test_b20_a_text_cut_at_any_two_places_gives_the_same_calls() -> None:
    text = f"Hm. {headed([('f', {'a': [1, '}']}), ('g', {})], '[CALL_ID]a1b2c3d4e')} and [TOOL_CALLS]g[ARGS"
    whole = parse(MISTRAL, [text])
    assert [name for name, _ in whole[1]] == ["f", "g"]
    for first in range(len(text)):
        for second in range(first, len(text), 7):
            assert parse(MISTRAL, [text[:first], text[first:second], text[second:]]) == whole


def test_the_id_that_a_model_gives_is_kept() -> None:
    begun = ToolParser(MISTRAL).feed("[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{}")[0]
    assert begun == CallDelta(0, "a1b2c3d4e", "f")


def test_arguments_are_passed_on_as_they_arrive() -> None:
    parser = ToolParser(HERMES)
    assert parser.feed('<tool_call>\n{"name": "write", "arguments": ') == []
    begin, first = parser.feed('{"text": "Once')
    assert isinstance(begin, CallDelta)
    assert (begin.index, begin.name, begin.arguments) == (0, "write", "")
    assert first == CallDelta(0, arguments='{"text": "Once')
    assert parser.feed(" upon a time") == [CallDelta(0, arguments=" upon a time")]


def test_ids_are_new_and_as_long_as_the_format_wants() -> None:
    assert len({HERMES.new_id() for _ in range(100)}) == 100
    assert HERMES.new_id().startswith("call_")
    assert len(MISTRAL.new_id()) == 9
    assert MISTRAL.new_id().isalnum()
