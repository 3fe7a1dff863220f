"""Answers of /v1/chat/completions in which the model may call tools."""

from typing import Any

from octavo.server.answer import ChatWriter, Head, Shown
from octavo.server.choice import Choice, Delta
from octavo.server.prepare import Prepared
from octavo.server.tool_parsers import CallDelta, Piece, ToolFormat, ToolParser


class ToolWriter(ChatWriter):
    """Divides what a choice says into content and calls. Id, type and name of a call come once, arguments in parts."""

    def __init__(self, head: Head, prepared: Prepared, shown: Shown, written: ToolFormat) -> None:
        super().__init__(head, prepared, shown)
        self._parsers = [ToolParser(written) for _ in prepared.seeds]

    def _parts(self, choice: Choice, delta: Delta) -> list[dict[str, Any]]:
        parts = [_part(piece) for piece in self._read(choice, delta)]
        return parts or ([{"content": ""}] if self._shows_tokens(delta) else [])

    def _message(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        pieces = self._read(choice, delta)
        content = "".join(piece for piece in pieces if isinstance(piece, str))
        found = [piece for piece in pieces if isinstance(piece, CallDelta)]
        calls = []
        for begun in (piece for piece in found if piece.id is not None):
            arguments = "".join(piece.arguments for piece in found if piece.index == begun.index)
            function = {"name": begun.name, "arguments": arguments}
            calls.append({"id": begun.id, "type": "function", "function": function})
        message = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
        return message | ({"tool_calls": calls} if calls else {})

    def _reason(self, choice: Choice, delta: Delta) -> str | None:
        called = self._parsers[choice.index].calls > 0
        return "tool_calls" if called and delta.finish_reason == "stop" else delta.finish_reason

    def _read(self, choice: Choice, delta: Delta) -> list[Piece]:
        parser = self._parsers[choice.index]
        pieces = parser.feed(delta.text)
        return pieces if delta.finish_reason is None else pieces + parser.finish()


def _part(piece: Piece) -> dict[str, Any]:
    """What a delta of the stream holds: content, a call that begins, or more of its arguments."""
    if isinstance(piece, str):
        return {"content": piece}
    begun = {} if piece.id is None else {"id": piece.id, "type": "function"}
    name = {} if piece.name is None else {"name": piece.name}
    return {"tool_calls": [{"index": piece.index, **begun, "function": {**name, "arguments": piece.arguments}}]}
