"""Typed, bounded look-ups in a mapping that somebody else wrote: config.json, GGUF metadata."""

import math
from collections.abc import Mapping

from octavo.model.weights.errors import CheckpointError


class Fields:
    """A mapping of which nothing is believed. A value of None (null) counts as absent, as in Hugging Face configs.

    Every method raises CheckpointError where a value has the wrong type, lies out of bounds, or is absent without a
    default; the line names the source, the field and what would be right.
    """

    def __init__(self, values: Mapping[str, object], source: str) -> None:
        self.values = values
        self.source = source

    def error(self, name: str, problem: str) -> CheckpointError:
        """An error about one field, to be raised by the caller."""
        return CheckpointError(f"{self.source}: {name} {problem}")

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        """A whole number from low to high."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(name, f"is {_shown(value)}; expected a whole number from {low:,} to {high:,}")
        return value

    def number(self, name: str, low: float, high: float, default: float | None = None) -> float:
        """A finite number from low to high."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise self.error(name, f"is {_shown(value)}; expected a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, name: str, *, default: bool) -> bool:
        """True or false."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"is {_shown(value)}; expected true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A string."""
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self.error(name, f"is {_shown(value)}; expected a string")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings; absent means none."""
        value = self._value(name, ())
        if not isinstance(value, list | tuple) or not all(isinstance(entry, str) for entry in value):
            raise self.error(name, f"is {_shown(value)}; expected a list of strings")
        return tuple(value)

    def token_ids(self, name: str, vocabulary: int) -> tuple[int, ...]:
        """One token id or a list of them; absent means none."""
        value = self._value(name, ())
        ids = value if isinstance(value, list | tuple) else (value,)
        for entry in ids:
            if isinstance(entry, bool) or not isinstance(entry, int) or not 0 <= entry < vocabulary:
                raise self.error(name, f"holds {_shown(entry)}; expected token ids below {vocabulary:,}")
        return tuple(ids)

    def section(self, name: str) -> "Fields | None":
        """A nested mapping; None where it is absent or empty."""
        value = self._value(name, {})
        if not isinstance(value, Mapping):
            raise self.error(name, f"is {_shown(value)}; expected an object")
        return Fields(value, f"{self.source}: {name}") if value else None

    def _value(self, name: str, default: object) -> object:
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise self.error(name, "is missing")
        if isinstance(value, float) and not math.isfinite(value):
            raise self.error(name, f"is {value}; expected a finite number")
        return value


def _shown(value: object) -> str:
    """A value on one line of bounded length."""
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."
