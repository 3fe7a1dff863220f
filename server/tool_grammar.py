"""The grammar of an answer with calls: what `tool_choice`, `strict` and `response_format` together allow."""

import json
import re
from collections.abc import Sequence
from typing import Any

from octavo.server.errors import invalid
from octavo.server.grammar_worker import ONE_LINE
from octavo.server.protocol import ChatRequest
from octavo.server.structured import Constraint, json_text, literal
from octavo.server.tokenizer import Tokenizer
from octavo.server.tool_parsers import HERMES, LLAMA3_JSON, ToolFormat
from octavo.server.tools import NamedTool, Tool, usable_tools


def with_calls(
    request: ChatRequest, content: Constraint | None, written: ToolFormat, tokenizer: Tokenizer
) -> Constraint | None:
    """Return what the answer must follow, given what its content must follow. Raises APIError (400).

    Where calls are insisted on there is no content. Where they are up to the model, an answer is either what
    `response_format` asks for or calls; else it is free, but once a function is `strict` what begins as a call is one.
    """
    tools, choice = usable_tools(request.tools, request.tool_choice), request.tool_choice
    if not tools:
        return content
    if content is not None and content.param == "structured_outputs":
        raise invalid(content.param, f"'{content.param}' cannot be combined with 'tools'.")
    forced = choice == "required" or isinstance(choice, NamedTool)
    if isinstance(choice, NamedTool):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
    parallel = request.parallel_tool_calls is not False and not isinstance(choice, NamedTool)
    calls = _Calls(tools, written, tokenizer, parallel=parallel)
    if forced:
        lines = calls.alone("start: calls")
    elif content is not None:
        lines = [*calls.alone("start: content | calls"), f"content: {_json_rule(json.loads(content.text))}"]
    elif any(tool.function.strict for tool in tools):
        lines = calls.within_text()
    else:
        return None
    return Constraint("lark", "\n".join(lines), "tools")


class _Calls:
    """Rules of a Lark grammar for the calls of some tools in one format."""

    def __init__(self, tools: Sequence[Tool], written: ToolFormat, tokenizer: Tokenizer, *, parallel: bool) -> None:
        self._tools = tools
        self._written = written
        self._parallel = parallel
        token = tokenizer.special_id(written.opener)
        self._special = None if token is None else f"<[{token}]>"
        closing = tokenizer.special_id(written.closer)
        self._closer = literal(written.closer) if closing is None else f"<[{closing}]>"

    def alone(self, start: str) -> list[str]:
        """Calls and nothing else, as the rule `calls`."""
        return [start, *self._rules(), f"opening: {self._special or literal(self._written.opener)}"]

    def within_text(self) -> list[str]:
        """Calls in the midst of text that holds no other opener."""
        if self._written is LLAMA3_JSON:  # no opener: a text is a call by its first character
            return ["start: TEXT? | calls", r"TEXT: /[^{\s](?s:.*)/", *self._rules()]
        repeated = "*" if self._parallel else "?"
        start = f"start: call{repeated} TEXT?" if self._written is HERMES else "start: calls? TEXT?"
        if self._special is not None:
            return [start, "TEXT: /(?s:.+)/", f"opening: TEXT? {self._special}", *self._rules()]
        opener = re.escape(self._written.opener).replace("/", r"\/")
        text = f"TEXT: /(?s:.+)/ & ~/(?s:.*){opener}(?s:.*)/"
        return [start, text, f"opening[lazy]: /(?s:.*){opener}/", *self._rules()]

    def _rules(self) -> list[str]:
        objects = " | ".join(f"call_{index}" for index in range(len(self._tools)))
        if self._written is HERMES:
            lines = [f'call: opening "\\n" object "\\n" {self._closer}']
            lines.append("calls: call" + (' ("\\n" call)*' if self._parallel else ""))
        elif self._written is LLAMA3_JSON:
            lines = ["calls: object" + (' ("; " object)*' if self._parallel else "")]
        else:
            more = ' (", " object)*' if self._parallel else ""
            lines = [f'calls: opening "[" object{more} {self._closer}']
        lines.append(f"object: {objects}")
        for index, tool in enumerate(self._tools):
            head = literal(f'{{"name": "{tool.function.name}", "{self._written.arguments}": ')
            lines.append(f'call_{index}: {head} arguments_{index} "}}"')
            lines.append(f"arguments_{index}: {_json_rule(_arguments(tool))}")
        return lines


def _arguments(tool: Tool) -> dict[str, Any]:
    """The schema of a function's arguments: always an object."""
    parameters = tool.function.parameters
    if parameters is None:
        parameters = {"properties": {}, "additionalProperties": False}
    return {"type": "object"} | parameters


def _json_rule(schema: dict[str, Any]) -> str:
    return f"%json {json_text(schema | {'x-guidance': ONE_LINE})}"
