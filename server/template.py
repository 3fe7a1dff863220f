"""Chat templates: a conversation to the text that the model was trained to continue.

A template is a program that comes with the model. It runs in Jinja's sandbox, with the functions and options that
Hugging Face transformers gives it, because templates are written against those. `server/rendering.py` runs it in
processes that can be killed.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_MARK = "<end of the text to be continued> "
"""Ends in a space, so that its loss shows whether the template trims messages."""


class TemplateError(Exception):
    """A chat template that cannot be used at all: one line."""

    exit_code = 65
    """EX_DATAERR of sysexits.h: starting again will not help."""


class TemplateRequestError(ValueError):
    """A conversation that the template does not accept: one line, the template's own words where it has some."""


class ChatTemplate:
    """A compiled template of one model."""

    def __init__(self, source: str, bos_token: str | None = None, eos_token: str | None = None) -> None:
        """Parse `source`; compiling it can take as long and as much memory as running it. Raises TemplateError."""
        self._environment = _environment()
        self._template: jinja2.Template | None = None
        try:
            tree = self._environment.parse(source)
        except (jinja2.TemplateError, RecursionError, ValueError) as error:
            raise _not_compiled(error) from None
        self.bos_token, self.eos_token = bos_token, eos_token
        special = {"bos_token": bos_token, "eos_token": eos_token}
        self._special = {name: token for name, token in special.items() if token is not None}
        self.source = source
        self._knows_developer = "developer" in source
        self.knows_tools = any(name.name == "tools" for name in tree.find_all(nodes.Name))
        """Whether it writes tools, calls and their results itself."""

    def compile(self) -> jinja2.Template:
        """Compile it, once. Raises TemplateError."""
        if self._template is None:
            try:
                self._template = self._environment.from_string(self.source)
            except Exception as error:  # constants are computed here, and can fail like any program
                raise _not_compiled(error) from None
        return self._template

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: str | float | bool | None,
    ) -> str:
        """Return the prompt, special tokens included: encode it with add_special_tokens=False.

        `add_generation_prompt` opens the answer's turn; `continue_final_message` instead leaves the last message open.
        `variables` are further names that the template can read. Raises TemplateRequestError.
        """
        conversation = [self._plain(message) for message in messages]
        opens_answer = add_generation_prompt and not continue_final_message
        final = _mark_final(conversation) if continue_final_message else ""
        names = self._special | variables | {"messages": conversation, "tools": tools, "documents": None}
        template = self.compile()
        try:
            text = template.render(names | {"add_generation_prompt": opens_answer})
        except Exception as error:  # a template can fail in as many ways as any program
            raise TemplateRequestError(_one_line(error)) from None
        return _cut_at_mark(text, final) if continue_final_message else text

    def _plain(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A copy; a developer is a system where the template has never heard of one."""
        copy = dict(message)
        if copy.get("role") == "developer" and not self._knows_developer:
            copy["role"] = "system"
        return copy


def _mark_final(conversation: list[dict[str, Any]]) -> str:
    """Put the mark after the last message's text; return that text."""
    final = conversation[-1].get("content") if conversation else None
    if not isinstance(final, str):
        raise TemplateRequestError("the last message has no text that could be continued")
    conversation[-1]["content"] = final + _MARK
    return final


def _cut_at_mark(text: str, final: str) -> str:
    """Drop what the template writes after the last message. A template that trims messages trims the open one too."""
    position = text.rfind(_MARK.strip())
    if position < 0 or final.strip() not in text[:position]:
        raise TemplateRequestError(
            "the chat template does not show the last message as it is, so it cannot continue it"
        )
    return text[:position] if text.startswith(_MARK, position) else text[:position].rstrip()


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationTag(Extension):
    """`{% generation %}` marks what a model is trained on; for a prompt its body is all that counts."""

    tags = {"generation"}  # noqa: RUF012 - the name and kind that Jinja looks for

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return what stands between the tag and its end."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models have seen it in training: Jinja's own filter escapes HTML and sorts keys."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().astimezone().strftime(pattern)


def _not_compiled(error: Exception) -> TemplateError:
    line = f" in line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
    return TemplateError(f"the chat template cannot be compiled{line}: {_one_line(error)}")


def _one_line(error: BaseException) -> str:
    """The error's message, short and without line breaks; its kind if it has none."""
    message = " ".join(str(error).split()).encode("utf-8", "replace").decode()
    return message[:500] or type(error).__name__
