"""The grammars of answers with calls, in every format, with marks that are tokens of their own or plain text."""

import json
from typing import Any, Literal

import pydantic
import pytest

from octavo.scheduler.grammar import Grammars, compile_grammar
from octavo.scheduler.messages import Vocabulary
from octavo.server.grammar_worker import Trial, judge
from octavo.server.protocol import ChatRequest
from octavo.server.structured import constraint_of
from octavo.server.tool_grammar import with_calls
from octavo.server.tool_parsers import FORMATS, HERMES, LLAMA3_JSON, ToolFormat

EOS, OPENER = 256, 257
VOCABULARY = Vocabulary(
    tokens=(*(bytes([byte]) for byte in range(256)), b"<eos>", b"<opener>"), special=(EOS, OPENER), eos_ids=(EOS,)
)


class Inner(pydantic.BaseModel):
    """Part of what is called with."""

    x: int
    kind: Literal["a", "b"]


class Outer(pydantic.BaseModel):
    """What is called with: a schema with references."""

    items: list[Inner]


GOOD, BAD = {"items": [{"x": 1, "kind": "a"}]}, {"items": [{"x": "one", "kind": "a"}]}


class Tokens:
    """A tokenizer that has a token for the opener, or none."""

    def __init__(self, opener: str | None) -> None:
        self.opener = opener

    def special_id(self, text: str) -> int | None:
        return OPENER if text == self.opener else None


def call(written: ToolFormat, special: bool, arguments: Any) -> list[int]:
    """A call in tokens: one for each byte, and one for an opener that is special."""
    text = json.dumps({"name": "f", written.arguments: arguments})
    if written is LLAMA3_JSON:
        return list(text.encode())
    inner = f"\n{text}\n" if written is HERMES else f"[{text}"
    opener = [OPENER] if special else list(written.opener.encode())
    return [*opener, *(inner + written.closer).encode()]


def accepts(lark: str, tokens: list[int]) -> bool:
    """Whether a grammar accepts these tokens and may end behind them."""
    verdict = judge(Trial("lark", lark), Grammars(VOCABULARY).tokenizer)
    assert verdict.error == ""
    matcher = compile_grammar(Grammars(VOCABULARY).tokenizer, verdict.grammar)
    return matcher.consume_tokens(tokens) and matcher.is_accepting()


def grammar(written: ToolFormat, special: bool, **fields: Any) -> str | None:
    strict = fields.pop("strict", None)
    functions = [{"name": "f", "parameters": Outer.model_json_schema(), "strict": strict}, {"name": "g"}]
    request = ChatRequest.model_validate(
        {
            "model": "m",
            "messages": [{"role": "user", "content": "x"}],
            "tools": [{"type": "function", "function": function} for function in functions],
            **fields,
        }
    )
    tokens: Any = Tokens(written.opener if special else None)
    constraint = with_calls(request, constraint_of(request.response_format, None), written, tokens)
    return None if constraint is None else constraint.text


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("written", FORMATS.values(), ids=FORMATS)
def test_what_a_request_says_decides_what_is_accepted(written: ToolFormat, special: bool) -> None:
    good, bad, text = call(written, special, GOOD), call(written, special, BAD), list(b"Some text.")
    two = {"hermes": [*good, 10, *good], "llama3_json": [*good, *b"; ", *good]}.get(written.name)
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["red"]}}}
    cases: list[tuple[dict[str, Any], dict[str, bool]]] = [
        ({"tool_choice": "required"}, {"good": True, "bad": False, "text": False, "red": False, "two": True}),
        ({"tool_choice": "required", "parallel_tool_calls": False}, {"good": True, "two": False}),
        ({"response_format": wanted}, {"good": True, "bad": False, "text": False, "red": True}),
        ({"strict": True}, {"good": True, "bad": False, "text": True}),
    ]
    texts = {"good": good, "bad": bad, "text": text, "red": list(b'"red"'), "two": two}
    for fields, expected in cases:
        lark = grammar(written, special, **fields)
        assert lark is not None
        for name, accepted in expected.items():
            tokens = texts[name]
            if tokens is not None:
                assert accepts(lark, tokens) is accepted, (fields, name)
    assert grammar(written, special, tool_choice="none") is None
    assert grammar(written, special) is None, "a model that may answer as it likes is not bound"


def test_text_and_strict_calls_may_alternate() -> None:
    lark = grammar(HERMES, special=False, strict=True)
    assert lark is not None
    good, bad = call(HERMES, special=False, arguments=GOOD), call(HERMES, special=False, arguments=BAD)
    assert accepts(lark, [*b"I see <tools>. ", *good, *b" And: ", *good, *b"\nDone."])
    assert not accepts(lark, [*b"I see. ", *bad])
