"""Renders chat templates: `python -m octavo.server.template_worker`, a process that the server can kill.

Reads lines of JSON: first an `Opening`, then one `Conversation` a line, each answered by a `Rendered`. A template that
cannot be compiled ends the process at once, after one line that says why. What takes too long or too much memory takes
this process with it, and nothing else.
"""

import sys
from typing import Any

import jinja2.debug  # noqa: F401 - Jinja does it at the first error, when no file can be opened any more
import msgspec

from octavo.server.confinement import answer_lines, confine
from octavo.server.template import ChatTemplate, TemplateError, TemplateRequestError

ADDRESS_SPACE_BYTES = 256 << 20
MAX_OUTPUT_BYTES = 8 << 20
"""Of an answer, as JSON."""


Opening = tuple[str, str | None, str | None]
"""A template, and the BOS and EOS tokens of its model."""


class Conversation(msgspec.Struct, frozen=True):
    """The arguments of `ChatTemplate.render`."""

    messages: list[dict[str, Any]]
    options: dict[str, Any]


class Rendered(msgspec.Struct, frozen=True, omit_defaults=True):
    """The prompt, or one line about why there is none."""

    text: str = ""
    error: str = ""


def render(template: ChatTemplate, line: bytes) -> bytes:
    """Answer one conversation."""
    conversation = msgspec.json.decode(line, type=Conversation)
    try:
        answer = Rendered(text=template.render(conversation.messages, **conversation.options))
    except TemplateRequestError as error:
        answer = Rendered(error=str(error))
    encoded = msgspec.json.encode(answer)
    if len(encoded) > MAX_OUTPUT_BYTES:
        return msgspec.json.encode(Rendered(error="it makes a prompt of more than 8 MiB"))
    return encoded


def main() -> int:
    """Answer conversations until the server closes the pipe."""
    template = ChatTemplate(*msgspec.json.decode(sys.stdin.buffer.readline(), type=Opening))
    confine(ADDRESS_SPACE_BYTES)
    try:
        template.compile()
    except TemplateError as error:
        sys.stdout.write(str(error))
        return TemplateError.exit_code
    answer_lines(lambda line: render(template, line))
    return 0


if __name__ == "__main__":
    sys.exit(main())
