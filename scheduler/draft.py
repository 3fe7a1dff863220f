"""Steps on their way: one in the making, and those that are scheduled and not yet committed."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

from octavo.model.step import Admission, Growth, Row, Step
from octavo.scheduler.request import Limits, Request


@dataclass(slots=True)
class Draft:
    """A step in the making."""

    budget: int
    """Tokens left."""
    rows: list[tuple[Row, Request]] = field(default_factory=list)
    admitted: list[Admission] = field(default_factory=list)
    grown: list[Growth] = field(default_factory=list)
    published: list[int] = field(default_factory=list)
    short: bool = False
    """Whether blocks ran out."""
    left_out: Request | None = None
    """The victim that cannot be preempted yet, because a step in flight works for it."""

    @classmethod
    def of(cls, limits: Limits, running: Iterable[Request]) -> Self:
        """Begin a step: of fewer tokens where requests that generate would wait for a long prompt."""
        if limits.mixed_tokens and any(one.computed >= len(one.prompt) and not one.paused for one in running):
            return cls(limits.mixed_tokens)
        return cls(limits.max_tokens)


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that is scheduled and not yet committed."""

    step: Step
    requests: tuple[Request, ...]
    """Whom each row belongs to. A slot number would not do: it may have a new owner when the step lands."""
    published: tuple[int, ...]
    """Blocks that got their names on the promise that this step fills them."""
