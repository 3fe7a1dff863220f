"""Faults on purpose: named points at which an engine can be broken from outside, to see what the server makes of it.

A fault is written `NAME[:OPTION=VALUE]...`, for example `step-raises:token=77` or `engine-killed:step=100:life=0`.
An engine without faults runs none of this code.
"""

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from octavo.model.step import Pending, RowResult, Runner, Step, StepResult
from octavo.scheduler.channel import Channel
from octavo.scheduler.messages import FromEngine, StepReport

NAMES = {
    "step-raises": "a step fails when it is queued",
    "wait-raises": "a step fails when it is awaited",
    "row-fails": "the logits of a row are not finite",
    "step-hangs": "a step takes `seconds` more, 3600 by default",
    "engine-killed": "the engine's process is killed",
    "engine-exits": "the engine's process ends by itself",
    "report-corrupted": "one bit of a report is flipped",
    "report-truncated": "a report lacks its last byte",
    "report-doubled": "a report is sent twice",
    "report-swapped": "a report is sent after the next one",
}


class InjectedError(Exception):
    """What an injected fault raises."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. It happens in every step to which all of its options apply."""

    name: str
    token: int | None = None
    """Only in steps that compute a request with this token in its prompt."""
    step: int | None = None
    """Only in the step of this number; the first one of an engine is 1."""
    every: int = 1
    """Only in steps whose number is a multiple of this."""
    life: int | None = None
    """Only in this engine; the server's first one is 0, the one started in its place 1."""
    seconds: int = 3600

    def due(self, number: int) -> bool:
        """Whether it happens in the step of this number, or in the report of that step."""
        return self.step in (None, number) and number % self.every == 0


def parse_fault(text: str) -> Fault:
    """Read a fault as it is written. Raises ValueError."""
    name, *options = text.split(":")
    if name not in NAMES:
        raise ValueError(f"there is no fault {name}; there are {', '.join(NAMES)}")
    known = [field.name for field in fields(Fault) if field.name != "name"]
    values: dict[str, int] = {}
    for option in options:
        key, _, value = option.partition("=")
        if key not in known or not value.isdecimal() or (key == "every" and int(value) == 0):
            raise ValueError(f"write {name}:OPTION=NUMBER with one of {', '.join(known)}")
        values[key] = int(value)
    return Fault(name, **values)


def faults_in(texts: Sequence[str], life: int) -> tuple[str, ...]:
    """Those faults that concern the engine of this life. Raises ValueError."""
    return tuple(text for text in texts if parse_fault(text).life in (None, life))


class FaultyRunner:
    """A runner, with faults."""

    def __init__(self, runner: Runner, faults: Sequence[Fault]) -> None:
        self._runner = runner
        self._faults = faults
        self._steps = 0
        self._tokens: dict[int, frozenset[int]] = {}
        """By slot: the prompt of its request."""

    def submit(self, step: Step) -> Pending:
        """Pass a step on, unless it is to fail."""
        self._steps += 1
        self._tokens |= {one.slot: frozenset(one.tokens[: one.prompt_length]) for one in step.admitted}
        due = [fault for fault in self._faults if fault.due(self._steps) and any(self._struck(fault, step))]
        for fault in due:
            _strike(fault)
        return _FaultyPending(self._runner.submit(step), tuple((fault, self._struck(fault, step)) for fault in due))

    def reset(self) -> None:
        """Pass it on."""
        self._runner.reset()

    def _struck(self, fault: Fault, step: Step) -> tuple[bool, ...]:
        """Which rows of a step a fault concerns."""
        return tuple(fault.token is None or fault.token in self._tokens[row.slot] for row in step.rows)


@dataclass(frozen=True, slots=True)
class _FaultyPending:
    pending: Pending
    faults: tuple[tuple[Fault, tuple[bool, ...]], ...]

    def wait(self) -> StepResult:
        """Fail, or return what was computed, with failures among it."""
        result = self.pending.wait()
        rows = result.rows
        for fault, struck in self.faults:
            if fault.name == "wait-raises":
                raise InjectedError(fault.name)
            if fault.name == "row-fails":
                rows = tuple(RowResult(failed=True) if hit else row for row, hit in zip(rows, struck, strict=True))
        return replace(result, rows=rows)


def _strike(fault: Fault) -> None:
    match fault.name:
        case "step-raises":
            raise InjectedError(fault.name)
        case "step-hangs":
            time.sleep(fault.seconds)
        case "engine-killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "engine-exits":
            os._exit(1)


class FaultyChannel(Channel):
    """An engine's end of the line whose reports suffer on their way."""

    def __init__(self, channel: Channel, faults: Sequence[Fault]) -> None:
        self.__dict__ = channel.__dict__
        self._faults = faults
        self._reports = 0
        self._held = b""

    def send(self, message: FromEngine) -> None:
        """Send one message."""
        self._reports += isinstance(message, StepReport)
        super().send(message)

    def write(self, frame: bytes) -> None:
        """Send a frame as the faults have it."""
        frame, self._held = frame + self._held, b""
        for fault in (fault for fault in self._faults if self._reports and fault.due(self._reports)):
            match fault.name:
                case "report-corrupted":
                    frame = frame[:-1] + bytes([frame[-1] ^ 1])
                case "report-truncated":
                    frame = frame[:-1]
                case "report-doubled":
                    frame += frame
                case "report-swapped":
                    frame, self._held = b"", frame
        super().write(frame)
