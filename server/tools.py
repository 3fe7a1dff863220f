"""Tools: functions that a model may call, from a request's fields to a prompt.

A template that knows tools writes them itself. For any other they are described in the system message, in the words
that Hermes models were trained on (`describe`), and calls and results in the history become text of that format.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from octavo.server.errors import invalid
from octavo.server.template import ChatTemplate
from octavo.server.tokenizer import Tokenizer
from octavo.server.tool_parsers import FORMATS, HERMES, LLAMA3_JSON, MISTRAL, ToolFormat

MAX_TOOLS = 128
MAX_CALLS = 128
"""In one message of the history."""

Messages = list[dict[str, Any]]


class _Fields(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class FunctionDefinition(_Fields):
    """A function that can be called."""

    name: str = Field(min_length=1, max_length=64, pattern="^[a-zA-Z0-9_-]+$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Fields):
    """OpenAI wraps functions so."""

    type: Literal["function"]
    function: FunctionDefinition

    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates expect it: absent fields left out."""
        function = self.function.model_dump(exclude={"strict"})
        given = {key: value for key, value in function.items() if value is not None}
        return {"type": "function", "function": given}


class FunctionName(_Fields):
    """Names one function."""

    name: str = Field(max_length=64)


class NamedTool(_Fields):
    """A `tool_choice` that names the function to call."""

    type: Literal["function"]
    function: FunctionName


class CalledFunction(_Fields):
    """A function that was called, with arguments as JSON text."""

    name: str = Field(min_length=1, max_length=256)
    arguments: str


class CalledTool(_Fields):
    """A call in the history."""

    id: str = Field(max_length=256)
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self, where: str) -> dict[str, Any]:
        """The call as chat templates expect it, its arguments as an object. Raises APIError (400)."""
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise invalid("messages", f"Invalid '{where}.function.arguments': it is not the text of a JSON object.")
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


ToolChoice = Literal["none", "auto", "required"] | NamedTool


def usable_tools(tools: Sequence[Tool] | None, choice: ToolChoice | None) -> Sequence[Tool]:
    """Return the tools that the model is told about; none where it may call none. Raises APIError (400)."""
    if not tools and choice not in (None, "none", "auto"):
        raise invalid("tool_choice", "'tool_choice' needs 'tools'.")
    names = [tool.function.name for tool in tools or ()]
    if len(set(names)) < len(names):
        raise invalid("tools", "Invalid 'tools': two functions have the same name.")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise invalid("tool_choice", "Invalid 'tool_choice': it names a function that is not among 'tools'.")
    return () if choice == "none" else tools or ()


def choose_format(name: str, template: ChatTemplate | None, tokenizer: Tokenizer) -> ToolFormat:
    """Return the format of that name; for `auto` the one whose opener the template or the vocabulary knows."""
    if name != "auto":
        return FORMATS[name]
    if template is None or not template.knows_tools:
        return HERMES
    for found in (HERMES, MISTRAL, LLAMA3_JSON):
        if found.opener in template.source:
            return found
    return next((found for found in (MISTRAL, LLAMA3_JSON) if tokenizer.special_id(found.opener) is not None), HERMES)


def describe(messages: Messages, tools: Sequence[Mapping[str, Any]]) -> Messages:
    """Return a conversation for a template that knows no tools: they and their calls are told in words."""
    plain = [_in_words(message) for message in messages]
    if not tools:
        return plain
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = (
        "You may call one or more functions to help with the user's request. These are their signatures:\n"
        f"<tools>\n{listed}\n</tools>\n"
        "For each call, answer with a JSON object of the function's name and its arguments, between these tags:\n"
        '<tool_call>\n{"name": <function name>, "arguments": <object of arguments>}\n</tool_call>'
    )
    if plain and plain[0]["role"] in ("system", "developer"):
        return [plain[0] | {"content": f"{plain[0]['content']}\n\n{text}"}, *plain[1:]]
    return [{"role": "system", "content": text}, *plain]


def _in_words(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls", ())
    texts = [json.dumps(call["function"], ensure_ascii=False) for call in calls]
    parts = [message["content"], *(f"<tool_call>\n{text}\n</tool_call>" for text in texts)]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return rest | {"content": "\n".join(part for part in parts if part)}
