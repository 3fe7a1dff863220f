"""Calls of functions in what a model writes: found as the text arrives, in the formats that models were trained on.

Nothing here evaluates text: names and keys are read by the JSON module, arguments are passed on as they stand. Every
chunking of a text gives the same content and the same calls.
"""

import json
import re
import secrets
import string
from dataclasses import dataclass
from typing import Literal

_BLANK = " \t\r\n"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes calls: objects with a name and arguments, between marks of its own."""

    name: str
    opener: str
    closer: str = ""
    separators: str = ""
    """Single characters that may stand before, between and behind the objects."""
    arguments: str = "arguments"
    bare: bool = False
    """Whether a text that begins with an object is a call without the opener."""
    headed: bool = False
    """Whether a call may also be a name, perhaps an id, and the object of its arguments: `f[CALL_ID]i[ARGS]{}`."""
    short_ids: bool = False
    """Whether ids are nine letters and digits, which the templates of some models insist on."""

    def new_id(self) -> str:
        """Make the id of a call."""
        if not self.short_ids:
            return "call_" + secrets.token_hex(12)
        return "".join(secrets.choice(_IDS) for _ in range(9))


HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>")
LLAMA3_JSON = ToolFormat("llama3_json", "<|python_tag|>", separators=";,", arguments="parameters", bare=True)
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", "]", separators="[,", headed=True, short_ids=True)
FORMATS = {found.name: found for found in (HERMES, LLAMA3_JSON, MISTRAL)}


_IDS = string.ascii_letters + string.digits
_NAMES = _IDS + "_.-"
_HEADER = re.compile(r"\s*([A-Za-z0-9_.-]+)(?:\[CALL_ID\]([A-Za-z0-9]+))?(?:\[ARGS\])?\s*\{")


def _may_begin_header(text: str) -> bool:
    """Whether more text can make a header of this."""
    body = text.lstrip(_BLANK)
    rest = body.lstrip(_NAMES)
    if rest == body:
        return not body
    for mark, value in (("[CALL_ID]", _IDS), ("[ARGS]", "")):
        if mark.startswith(rest):
            return True
        if rest.startswith(mark):
            rest = rest.removeprefix(mark).lstrip(value)
    return not rest.strip(_BLANK)


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A call that begins (with its id and name), or more of its arguments."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


Piece = str | CallDelta
"""Content, or a part of a call."""


class _CallReader:
    """Reads one object character by character: a name, and arguments that are an object themselves."""

    def __init__(self) -> None:
        self.raw: list[str] = []
        """Its characters, as far as it could still be no call at all."""
        self.name: str | None = None
        self.begun = False
        """Whether arguments have."""
        self.fresh: list[str] = []
        """Characters of the arguments that nobody has taken yet."""
        self.done = False
        self._closers: list[str] = []
        """What must close the objects, arrays and the string that are open."""
        self._escaped = False
        self._expects: Literal["object", "key", "colon", "value", "comma"] = "object"
        self._key = ""
        self._item: list[str] = []
        """Characters of the key or value that is being read."""

    @property
    def complete(self) -> bool:
        """Whether the arguments have been read to their end."""
        return self.begun and self._expects == "comma"

    def feed(self, char: str) -> bool:
        """Take a character; False where this can be no call."""
        if not self._nest(char):
            return False
        match self._expects:
            case "object":
                self._expects = "key"
                return char == "{"
            case "key":
                return self._read_key(char)
            case "colon":
                if char == ":":
                    self._expects = "value"
                return char == ":" or char in _BLANK
            case "value":
                return self._read_value(char)
            case _:
                return self._read_end(char)

    def _nest(self, char: str) -> bool:
        if self._closers and self._closers[-1] == '"':
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._closers.pop()
        elif char in '{["':
            self._closers.append({"{": "}", "[": "]", '"': '"'}[char])
        elif char in "}]":
            return bool(self._closers) and self._closers.pop() == char
        return True

    def _read_key(self, char: str) -> bool:
        if not self._item and char != '"':
            self.done = char == "}"
            return self.done or char in _BLANK
        self._item.append(char)
        if len(self._closers) == 1:
            self._key, self._expects = "".join(self._item[1:-1]), "colon"
            self._item.clear()
        return True

    def _read_value(self, char: str) -> bool:
        if not self._item and char in _BLANK:
            return True
        if self._key in ("arguments", "parameters") and (self._item or not self.begun):
            return self._read_arguments(char)
        first = self._item[0] if self._item else char
        if first not in '{["' and char in ",}":
            return self._end_value() and self._read_end(char)
        self._item.append(char)
        return first not in '{["' or len(self._closers) > 1 or self._end_value()

    def _read_arguments(self, char: str) -> bool:
        self.begun, self._item = True, ["{"]  # the characters themselves are passed on
        self.fresh.append(char)
        if len(self._closers) == 1:
            self._item.clear()
            self._expects = "comma"
        return self._closers[1:2] == ["}"] or self._expects == "comma"

    def _end_value(self) -> bool:
        value = "".join(self._item)
        self._item.clear()
        self._expects = "comma"
        if self._key == "name":
            self.name = _name(value)
        return self._key != "name" or self.name is not None

    def _read_end(self, char: str) -> bool:
        if char == ",":
            self._expects = "key"
        self.done = char == "}"
        return char in ",}" or char in _BLANK


def _name(value: str) -> str | None:
    try:
        name = json.loads(value)
    except ValueError:
        return None
    return name if isinstance(name, str) and name else None


class ToolParser:
    """Divides the text of one choice into content and calls. What may still become a call is held back.

    White space around calls is part of the format. What turns out to be no call is content, as it stands.
    """

    def __init__(self, tools: ToolFormat) -> None:
        self.calls = 0
        """Calls begun."""
        self._format = tools
        self._pieces: list[Piece] = []
        self._held = ""
        self._section = ""
        """Everything since an opener, or since the last call, while no call of it has been told."""
        self._reader: _CallReader | None = None
        self._headed = False
        """Whether the call that is being read has begun with a header, and so is its arguments alone."""
        self._id: str | None = None
        """Its id, if the model has given one."""
        self._told = False
        """Whether the call that is being read has been told: its name and that it has arguments are known."""
        self._between = False
        """Whether an opener has come and its end has not."""
        self._blank = True
        """Whether nothing but white space has come."""

    def feed(self, text: str) -> list[Piece]:
        """Take more text; return what it completes."""
        for char in text:
            if self._reader is not None:
                self._read_call(self._reader, char)
            elif self._between:
                self._read_between(char)
            else:
                self._read_content(char)
        if self._reader is not None:
            self._tell(self._reader)
        return self._release()

    def finish(self) -> list[Piece]:
        """Return what was held back. No text can follow."""
        if self._reader is None:
            rest = self._section + self._held
            if not (self.calls and self._format.closer.startswith(rest.strip(_BLANK + self._format.separators))):
                self._say(rest)
        elif not self._told:
            self._say(self._section + "".join(self._reader.raw))
        return self._release()

    def _release(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def _say(self, text: str) -> None:
        if not text:
            return
        self._blank = self._blank and not text.strip(_BLANK)
        if self._pieces and isinstance(self._pieces[-1], str):
            text = self._pieces.pop() + text  # type: ignore[operator]
        self._pieces.append(text)

    def _read_content(self, char: str) -> None:
        self._held += char
        while self._held:
            body = self._held.lstrip(_BLANK)
            if body == self._format.opener:
                self._section, self._held, self._between = self._held, "", True
                return
            if self._format.bare and self._blank and body == "{":
                self._begin_call(self._held[:-1])
                return
            if self._format.opener.startswith(body):
                return
            self._say(self._held[0])
            self._held = self._held[1:]

    def _read_between(self, char: str) -> None:
        self._held += char
        if self._format.headed and self._held.lstrip(_BLANK)[:1] not in ("", "[", ",", "{", "]"):
            self._read_header()
            return
        body = self._held.strip(_BLANK + self._format.separators)
        if body == "{":
            self._begin_call(self._section + self._held[:-1])
        elif body and body == self._format.closer:
            self._leave(self._section + self._held if self._section else "")
        elif not self._format.closer.startswith(body):
            self._give_up()

    def _read_header(self) -> None:
        if header := _HEADER.fullmatch(self._held):
            self._begin_call("", header)
        elif not _may_begin_header(self._held):
            self._give_up()

    def _give_up(self) -> None:
        """What was held is no call."""
        held, self._held = self._held, ""
        self._leave(self._section)
        for later in held:
            self._read_content(later)

    def _leave(self, content: str) -> None:
        """Go back to content, with what was no call after all."""
        self._section, self._held, self._between = "", "", False
        self._blank = False
        self._say(content)

    def _begin_call(self, section: str, header: re.Match[str] | None = None) -> None:
        """Begin with the first character of an object: of the call, or behind a header of its arguments."""
        self._section, self._held, self._between = section, "", True
        self._reader, self._told = _CallReader(), False
        self._headed, self._id = header is not None, None
        begun = "{"
        if header is not None:
            self._id = header[2]
            begun = f'{{"name": "{header[1]}", "arguments": {{'
        for char in begun:
            self._read_call(self._reader, char)

    def _read_call(self, reader: _CallReader, char: str) -> None:
        if not self._told:
            reader.raw.append(char)
        goes_on = reader.feed(char)
        if self._headed and reader.complete:
            goes_on = reader.feed("}")
        if not goes_on or (reader.done and reader.name is None):
            self._reader = None
            if self._told:
                self._tell(reader)
                self._leave("")
                self._read_content(char)
            else:
                self._leave(self._section + "".join(reader.raw))
            return
        if not self._told and reader.name is not None and (reader.begun or reader.done):
            self._pieces.append(CallDelta(self.calls, self._id or self._format.new_id(), reader.name))
            self.calls += 1
            self._told, self._section = True, ""
        if reader.done:
            if not reader.begun:
                reader.fresh.append("{}")
            self._tell(reader)
            self._reader = None
            if self._headed:
                self._leave("")

    def _tell(self, reader: _CallReader) -> None:
        """Pass on what is new of the arguments of a call that has been told."""
        if self._told and reader.fresh:
            self._pieces.append(CallDelta(self.calls - 1, arguments="".join(reader.fresh)))
            reader.fresh.clear()
