"""Tokens to text, one at a time, with stop strings: the only place where generated tokens become characters.

Streaming or not, an answer's text is the sum of the same deltas, and each token is processed alone, so neither the text
nor the end of it depends on how tokens were grouped.
"""

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.server.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text that can be shown now, and the tokens that it completes."""

    text: str = ""
    offsets: tuple[int, ...] = ()
    """Where the text of each completed token begins, counted in characters from the beginning of the whole text.

    A token without text of its own stands at the character that follows it. Tokens come in order and once; those that
    lie wholly behind a stop string's cut never come.
    """
    stopped: str | None = None
    """The stop string that ended the text."""


class TextStream:
    """The text of one choice. Work for a token grows with its own text and the stop strings, with nothing else."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        continuing: bool = False,
    ) -> None:
        """`include_stop` keeps the stop string in the text. `continuing` says that text goes before the first token.

        Where words begin with a space (SentencePiece), the first space of a text that continues none is dropped, as the
        tokenizer's own decoding does. Raises ValueError for an empty stop string.
        """
        self._tokenizer = tokenizer
        self._include_stop = include_stop
        self._skip_special = skip_special_tokens
        self._strip_count = 0 if continuing else tokenizer.pieces.strip_count
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
        self._finder = _StopFinder(stop)
        self._held = ""
        """Decoded, but not yet released."""
        self._released = 0
        """Characters released so far."""
        self._spans: deque[tuple[int, int]] = deque()
        """Where the text of each token not yet completed begins and ends."""
        self._unfinished = False
        """Whether bytes of a character to come are kept; they become exactly one character, or one U+FFFD."""
        self._match: _Match | None = None
        """The stop string that has ended the text."""

    def feed(self, tokens: Sequence[int]) -> TextDelta:
        """Read tokens; return what they allow to be shown. After a stop string, tokens are ignored."""
        for token in tokens:
            if self._match is not None:
                break
            self._read(token)
        return self._release()

    def finish(self) -> TextDelta:
        """Release what was held: an unfinished character becomes U+FFFD. No tokens can follow."""
        if self._match is None:
            self._append(self._bytes.decode(b"", final=True))
            self._match = self._finder.best
        return self._release(final=True)

    @property
    def _length(self) -> int:
        """Characters so far, released or held."""
        return self._released + len(self._held)

    def _read(self, token: int) -> None:
        hidden = self._skip_special and self._tokenizer.is_special(token)
        data = b"" if hidden else self._tokenizer.token_bytes(token)
        continues = not data or 0x80 <= data[0] < 0xC0
        begin = self._length + (self._unfinished and not continues)  # behind the U+FFFD of a character broken off
        self._append(self._bytes.decode(data))
        self._unfinished = bool(self._bytes.getstate()[0])
        self._spans.append((begin, self._length + self._unfinished))

    def _append(self, text: str) -> None:
        while text and self._strip_count:
            if not text.startswith(self._tokenizer.pieces.strip):
                self._strip_count = 0
                break
            self._strip_count -= 1
            text = text[1:]
        self._held += text
        if self._finder.read(text):
            self._match = self._finder.best

    def _release(self, *, final: bool = False) -> TextDelta:
        match = self._match
        limit = self._length if final else self._finder.safe
        if match is not None:
            limit = match.end if self._include_stop else match.start
        text = self._held[: limit - self._released]
        if not text and not final and match is None:
            return TextDelta()
        self._held = self._held[limit - self._released :]
        self._released = limit
        offsets = []
        while self._spans and (self._spans[0][1] <= limit or (match is not None and self._spans[0][0] < limit)):
            offsets.append(self._spans.popleft()[0])
        return TextDelta(text, tuple(offsets), None if match is None else match.stop)


@dataclass(frozen=True, slots=True)
class _Match:
    """A stop string at text[start:end]."""

    start: int
    end: int
    stop: str


class _StopFinder:
    """Finds the stop string that begins earliest; of those that begin together, the one completed first."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._automata = [_StopString(stop) for stop in dict.fromkeys(stops)]
        self._length = 0
        self.safe = 0
        """No stop string begins before this position."""
        self.best: _Match | None = None
        """The best match so far; an earlier one may still be unfinished."""

    def read(self, text: str) -> bool:
        """Take more text. Return True once `best` is certain; the rest of the text is not looked at then."""
        if not self._automata:
            self.safe += len(text)
            return False
        for char in text:
            self._length += 1
            for automaton in self._automata:
                if automaton.advance(char):
                    match = _Match(self._length - automaton.matched, self._length, automaton.text)
                    if self.best is None or match.start < self.best.start:
                        self.best = match
            self.safe = self._length - max(automaton.matched for automaton in self._automata)
            if self.best is not None and self.safe >= self.best.start:
                return True
        return False


class _StopString:
    """A Knuth-Morris-Pratt automaton: the longest prefix of a stop string that ends the text, at constant mean cost."""

    def __init__(self, text: str) -> None:
        if not text:
            raise ValueError("a stop string must not be empty")
        self.text = text
        self.matched = 0
        """Length of that prefix."""
        self._shorter = [0, 0]
        """For each length of prefix, the next shorter prefix that ends it."""
        for char in text[1:]:
            length = self._shorter[-1]
            while length and text[length] != char:
                length = self._shorter[length]
            self._shorter.append(length + (text[length] == char))

    def advance(self, char: str) -> bool:
        """Take one more character; return whether it completes the stop string."""
        if self.matched == len(self.text):
            self.matched = self._shorter[self.matched]
        while self.matched and self.text[self.matched] != char:
            self.matched = self._shorter[self.matched]
        self.matched += self.text[self.matched] == char
        return self.matched == len(self.text)
