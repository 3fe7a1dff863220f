"""The checker of histories must notice what it is there for: each class here breaks one invariant of a real run."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from support.history import INVARIANTS, MOST_PASSED_OVER, Checker
from support.soak import BLOCKS, Soak, SoakRunner, alone

from octavo.kvcache.pool import BlockPool, InvariantError
from octavo.model.step import Step, StepResult
from octavo.scheduler.draft import Draft
from octavo.scheduler.messages import StepReport, TokenEvent
from octavo.scheduler.policy import Scheduler
from octavo.scheduler.request import Request
from octavo.server.client import Generation

REQUESTS, PERIOD, TURNS = 3_000, 20, 20_000


class Perturbed(Soak):
    """A run in which one part is replaced by a broken one."""

    pool: type[BlockPool] = BlockPool
    scheduler_class: type[Scheduler] = Scheduler
    runner: type[SoakRunner] = SoakRunner

    def make_scheduler(self) -> Scheduler:
        sound = super().make_scheduler()
        hasher = sound._reuse._hasher
        return self.scheduler_class(self.pool(BLOCKS), hasher, sound._limits, [0], clock=lambda: self.now)

    def make_runner(self) -> SoakRunner:
        return self.runner(self, self.scheduler)


class LosesBlock(BlockPool):
    def release(self, blocks: Sequence[int]) -> None:
        super().release(blocks)
        if len(self._free) == self.total // 2:
            self._free.pop()


class CountsSharesTwice(BlockPool):
    def share(self, blocks: Sequence[int]) -> None:
        super().share(blocks)
        for block in blocks[:1]:
            self._references[block] += 1


class MiscountsFree(BlockPool):
    @property
    def free(self) -> int:
        return super().free + 1


class ForgetsToRelease(Scheduler):
    def _vacate(self, request: Request) -> None:
        if request.id % 100 == 0:
            request.blocks.pop()
        super()._vacate(request)


class PassesOver(Scheduler):
    def _continue_running(self, draft: Draft) -> None:
        unlucky = {number: self._running.pop(number) for number in list(self._running) if number == 100}
        super()._continue_running(draft)
        self._running = OrderedDict(sorted({**self._running, **unlucky}.items()))


class IgnoresPauses(Scheduler):
    def pause(self, request_id: int, paused: bool) -> None:
        pass


class DependsOnNeighbours(SoakRunner):
    def compute(self, step: Step) -> StepResult:
        rows = super().compute(step).rows
        crowded = len(rows) > 4
        return StepResult(
            tuple(replace(row, token=row.token ^ 1) if crowded and row.token is not None else row for row in rows)
        )


class SwapsRows(SoakRunner):
    def compute(self, step: Step) -> StepResult:
        rows = super().compute(step).rows
        return StepResult(rows if any(row.token is None for row in rows) else rows[::-1])


class BreaksI1(Perturbed):
    pool = LosesBlock


class BreaksI2(Perturbed):
    scheduler_class = ForgetsToRelease


class BreaksI3(Perturbed):
    pool = CountsSharesTwice


class BreaksI4(Soak):
    """The last event of a request comes again."""

    def deliver(self, event: TokenEvent) -> None:
        super().deliver(event)
        if event.finish is not None and event.request % 20 == 0:
            super().deliver(event)


class BreaksI5(Soak):
    """A reader misses what comes while it is slow."""

    def read(self, generation: Generation) -> None:
        if len(generation._events) > 1:
            del generation._events[0]
        super().read(generation)


class BreaksI6(Perturbed):
    pool = MiscountsFree


class BreaksI7(Perturbed):
    runner = DependsOnNeighbours


class BreaksI8(Perturbed):
    scheduler_class = PassesOver


class BreaksI9(Soak):
    """The metrics miss a token."""

    def deliver(self, event: TokenEvent) -> None:
        super().deliver(event)
        self.metrics.generated_tokens -= event.request == 20 and event.finish is not None


class BreaksI10(Soak):
    """Requests are said to have waited for a minute."""

    def send(self, report: StepReport) -> None:
        events = [
            msgspec.structs.replace(event, queue_seconds=60.0) if event.first else event for event in report.events
        ]
        super().send(msgspec.structs.replace(report, events=tuple(events)))


class BreaksI11(Perturbed):
    runner = SwapsRows


class BreaksI12(Soak):
    """A file stays open at every restart."""

    def start(self) -> None:
        super().start()
        self.left_open = [*getattr(self, "left_open", ()), Path("/dev/null").open()]  # noqa: SIM115

    def close(self) -> None:
        for file in self.left_open:
            file.close()


class BreaksI13(Perturbed):
    scheduler_class = IgnoresPauses


KINDS = (
    *(BreaksI1, BreaksI2, BreaksI3, BreaksI4, BreaksI5, BreaksI6),
    *(BreaksI7, BreaksI8, BreaksI9, BreaksI10, BreaksI11, BreaksI12, BreaksI13),
)


def test_every_invariant_is_broken_once() -> None:
    assert [kind.__name__.removeprefix("Breaks") for kind in KINDS] == list(INVARIANTS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_invariant_is_noticed(kind: type[Soak]) -> None:
    invariant = kind.__name__.removeprefix("Breaks")
    # Whoever is passed over is computed once more by each new engine: without faults there is only one.
    soak = kind(300 if invariant == "I9" else REQUESTS, REQUESTS + 1 if invariant == "I8" else PERIOD)
    for _ in range(TURNS):
        if soak.closed or soak.checker.found[invariant]:
            break
        soak.turn()
    if invariant == "I9":
        soak.run()
    if isinstance(soak, BreaksI12):
        soak.close()
    assert soak.checker.found[invariant], soak.checker.examples


@pytest.mark.parametrize("kind", [BreaksI1, BreaksI2, BreaksI3])
def test_an_engine_that_checks_itself_stops_at_once(kind: type[Soak], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_STRICT", "1")
    soak = kind(REQUESTS, PERIOD)
    with pytest.raises(InvariantError):
        soak.run()
    assert soak.submitted < REQUESTS


def test_a_slot_with_two_owners_and_a_waiting_request_with_blocks_stop_a_strict_engine() -> None:
    soak = Soak(REQUESTS, PERIOD)
    while not soak.scheduler.running:
        soak.turn()
    soak.scheduler.audit()
    slot = next(iter(soak.scheduler._running.values())).slot
    soak.scheduler._slots.append(slot)
    with pytest.raises(InvariantError, match="slot"):
        soak.scheduler.audit()
    soak.scheduler._slots.pop()
    while not soak.scheduler.waiting:
        soak.turn()
    next(iter(soak.scheduler._waiting.values())).in_flight = 1
    with pytest.raises(InvariantError, match="waiting"):
        soak.scheduler.audit()


@pytest.mark.parametrize(
    ("pieces", "whole", "right"),
    [
        (["a", "é"], "aé", True),
        ([b"a", b"\xc3\xa9"], b"a\xc3\xa9", True),
        ([b"a\xc3", b"\xa9"], b"a\xc3\xa9", False),
        (["a\ufffd", "\ufffd"], "aé", False),
        ([[1, 2], [3]], [1, 2, 3], True),
        ([[1, 2], [2, 3]], [1, 2, 3], False),
        ([[1, 2]], [1, 2, 3], False),
        ([], [], True),
        ([], [1], False),
    ],
)
def test_pieces_are_the_whole_or_not(pieces: list[object], whole: object, right: bool) -> None:
    checker = Checker(alone)
    checker.streamed(pieces, whole)
    assert (checker.found["I5"] == 0) is right


def test_steps_in_which_nobody_gets_on_are_noticed() -> None:
    checker = Checker(alone)
    for _ in range(MOST_PASSED_OVER):
        checker.stepped([])
    assert not checker.found
    checker.stepped([])
    assert set(checker.found) == {"I8"}
