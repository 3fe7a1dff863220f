"""What a load consists of: prompts, lengths and arrivals, drawn from one seed or read from a trace."""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.server.values import OptionError

_TEXT = """\
time year people way day man thing woman life child world school state family student group country problem hand
part place case week company system program question work number night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head house service friend father
power hour game line end member law car city community name president team minute idea body back parent face
level office door health person art war history party result change morning reason research girl guy moment air
teacher force good new first last long great little own other old big high different small large next early
young important few public bad same able be have do say get make go know take see come think look want give use
find tell ask seem feel try leave call very just also then now here only more most even still never often always
"""
WORDS = _TEXT.split()
"""Common words: with the space before it, each is one token in most vocabularies."""


@dataclass(frozen=True, slots=True)
class Span:
    """Whole numbers from low to high, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> "Span":
        """Read `128` or `64-256`. Raises ValueError."""
        low, _, high = text.partition("-")
        if not (low.isdecimal() and (high or low).isdecimal() and len(text) < 24):
            raise ValueError("give a whole number or a range, such as 128 or 64-256")
        span = cls(int(low), int(high or low))
        if span.low > span.high:
            raise ValueError("the range ends before it begins")
        return span

    def draw(self, rng: random.Random) -> int:
        """One number, each as likely as the others."""
        return rng.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


@dataclass(frozen=True, slots=True)
class Call:
    """One request: when it is due and what it asks for."""

    due: float
    """Seconds after the start; 0 in a closed loop, where a call is due as soon as its predecessor has ended."""
    prompt: str | Sequence[int] | Sequence[Mapping[str, Any]]
    """Text, token ids, or the messages of a conversation."""
    output_tokens: int

    def fields(self, *, chat: bool) -> dict[str, Any]:
        """The fields of the body that differ from call to call."""
        if not chat:
            return {"prompt": self.prompt, "max_tokens": self.output_tokens}
        text = isinstance(self.prompt, str)
        messages = [{"role": "user", "content": self.prompt}] if text else self.prompt
        return {"messages": messages, "max_tokens": self.output_tokens}


@dataclass(frozen=True, slots=True)
class Shape:
    """What random calls look like. The same seed gives the same calls."""

    prompt_tokens: Span = Span(128, 128)
    output_tokens: Span = Span(128, 128)
    shared_prefix: int = 0
    """Tokens that all prompts begin with, part of their length."""
    token_ids: Span | None = None
    """Send ids from this range in place of words."""
    rate: float | None = None
    """Calls a second on average, as a Poisson process; None: all are due at once."""
    seed: int = 0

    def calls(self, count: int, first: int = 0) -> list[Call]:
        """Draw so many calls; others for another `first`."""
        if self.shared_prefix > self.prompt_tokens.low:
            raise OptionError(
                f"--shared-prefix {self.shared_prefix} exceeds the shortest prompt, of {self.prompt_tokens.low} tokens"
            )
        prefix = self._draw(random.Random(f"{self.seed} prefix"), self.shared_prefix)
        arrivals = self._arrivals()
        numbers = range(first, first + count)
        return [self._call(prefix, next(arrivals), random.Random(f"{self.seed} {index}")) for index in numbers]

    def prompt(self, prefix: list[Any], length: int, rng: random.Random) -> str | list[int]:
        """A prompt of so many tokens or words that begins with the prefix."""
        tokens = prefix + self._draw(rng, length - len(prefix))
        return tokens if self.token_ids else " ".join(tokens)

    def _call(self, prefix: list[Any], due: float, rng: random.Random) -> Call:
        length = self.prompt_tokens.draw(rng)
        return Call(due, self.prompt(prefix, length, rng), self.output_tokens.draw(rng))

    def _draw(self, rng: random.Random, count: int) -> list[Any]:
        span = self.token_ids
        return rng.choices(range(span.low, span.high + 1) if span else WORDS, k=count)

    def _arrivals(self) -> Iterator[float]:
        rng, due = random.Random(f"{self.seed} arrivals"), 0.0
        while True:
            yield due
            due += rng.expovariate(self.rate) if self.rate else 0.0


def read_trace(path: Path, shape: Shape, *, chat: bool) -> list[Call]:
    """Read a trace: one JSON object a line, with `timestamp` in seconds, and `prompt`, `messages` or `prompt_tokens`.

    `output_tokens` says how many to generate; where it is absent the shape does. Lines are sorted by time, and the
    first is due at once. Raises OptionError, naming the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise OptionError(f"--trace {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise OptionError(f"--trace {path}: it is not UTF-8") from error
    calls = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                calls.append(_trace_call(json.loads(line), shape, random.Random(f"{shape.seed} {number}"), chat=chat))
            except (ValueError, TypeError) as error:
                raise OptionError(f"--trace {path}, line {number}: {error}") from None
    if not calls:
        raise OptionError(f"--trace {path}: it has no lines")
    first = min(call.due for call in calls)
    return sorted(
        (Call(call.due - first, call.prompt, call.output_tokens) for call in calls), key=lambda call: call.due
    )


def _trace_call(line: Any, shape: Shape, rng: random.Random, *, chat: bool) -> Call:
    if not isinstance(line, dict):
        raise TypeError("it is no JSON object")
    due = line.get("timestamp")
    if isinstance(due, bool) or not isinstance(due, int | float):
        raise TypeError("'timestamp' must be seconds")
    output = _whole(line, "output_tokens") if "output_tokens" in line else shape.output_tokens.draw(rng)
    if "messages" in line:
        if not chat:
            raise ValueError("'messages' needs --chat")
        return Call(due, line["messages"], output)
    if "prompt" in line:
        return Call(due, line["prompt"], output)
    length = _whole(line, "prompt_tokens")
    return Call(due, shape.prompt([], length, rng), output)


def _whole(line: Mapping[str, Any], name: str) -> int:
    value = line.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"'{name}' must be a whole number above 0")
    return value
