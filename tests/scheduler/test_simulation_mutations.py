"""The simulation must notice what it is there for: each class here breaks one rule, and some seed must fail."""

import struct
from collections.abc import Sequence

import pytest
from support.fake_device import CorruptionError
from support.simulation import Parts, simulate

from octavo.kvcache.pool import BlockPool
from octavo.kvcache.prefix import PrefixHasher
from octavo.model.step import Row, RowResult, Step, StepResult
from octavo.scheduler.draft import Draft
from octavo.scheduler.messages import TokenEvent
from octavo.scheduler.policy import Scheduler
from octavo.scheduler.request import Request


class ForgetsParents(PrefixHasher):
    """Equal tokens get equal names, whatever came before them."""

    def name(self, parent: bytes, tokens: Sequence[int]) -> bytes:
        return super().name(b"", tokens)


class KeepsNamesOfEvictedBlocks(BlockPool):
    def _forget(self, block: int) -> None:
        self._names[block] = None


class SharesWithoutReference(BlockPool):
    """Found blocks stay up for eviction while they are in use."""

    def share(self, blocks: Sequence[int]) -> None:
        pass

    def release(self, blocks: Sequence[int]) -> None:
        super().release([block for block in blocks if self._references[block]])


class NamesTheNextBlock(BlockPool):
    """Contents are promised for a block that has other ones."""

    def publish(self, block: int, name: bytes) -> None:
        other = (block + 1) % self.total
        if self._references[other] and self._names[other] is None:
            super().publish(other, name)


class PublishesTooEarly(Scheduler):
    """A block gets its name one step before the step that fills it."""

    def _add_row(self, request: Request, slot: int, count: int, draft: Draft) -> None:
        known_blocks = min(len(request.prompt), len(request.blocks) * self._limits.block_size)
        self._reuse.publish(request, known_blocks)
        super()._add_row(request, slot, count, draft)


class HidesRetirements(Scheduler):
    """The runner does not learn that a slot has changed hands."""

    def _vacate(self, request: Request) -> None:
        super()._vacate(request)
        self._retired.pop()


class FreesWhatItStillUses(Scheduler):
    """Blocks go back before the last row that reads them is scheduled."""

    def _add_row(self, request: Request, slot: int, count: int, draft: Draft) -> None:
        super()._add_row(request, slot, count, draft)
        if len(request.output) + request.pending == request.limit - 1:
            blocks, request.blocks = request.blocks, []
            self.pool.release(blocks)


class PreemptsUnderARunningStep(Scheduler):
    def _make_room(self, request: Request, draft: Draft) -> bool:
        next(reversed(self._running.values())).in_flight = 0
        return super()._make_room(request, draft)


class PreemptsTheOldest(Scheduler):
    def _make_room(self, request: Request, draft: Draft) -> bool:
        self._running = dict(reversed(self._running.items()))
        try:
            return super()._make_room(request, draft)
        finally:
            self._running = dict(reversed(self._running.items()))


class TrustsSlotNumbers(Scheduler):
    """A row is credited to whoever holds its slot when the step lands."""

    def commit(self, step: Step, result: StepResult) -> list[TokenEvent]:
        holders = {request.slot: request for request in self._running.values()}
        flight = self._flights[0]
        requests = tuple(
            holders.get(row.slot, request) for row, request in zip(step.rows, flight.requests, strict=True)
        )
        self._flights[0] = type(flight)(flight.step, requests, flight.published)
        return super().commit(step, result)


class DeliversAfterTheEnd(Scheduler):
    """Rows of a request that has ended meanwhile are not dropped."""

    def commit(self, step: Step, result: StepResult) -> list[TokenEvent]:
        for request in self._flights[0].requests:
            request.finish = None
        return super().commit(step, result)


class KeepsWhatAFailedStepPromised(Scheduler):
    """Blocks that a failed step was to fill can still be found."""

    def rollback(self) -> None:
        for flight in self._flights:
            object.__setattr__(flight, "published", ())
        super().rollback()


class BlamesTheFirst(Scheduler):
    """Whoever comes first in a step that failed is ended."""

    def fail(self, error: str) -> TokenEvent | None:
        first = self._flights[0].requests[0]
        event = super().fail(error)
        if event is None and first.finish is None:
            self._end(first, "error")
            event = first.announce(TokenEvent(request=first.id, finish="error", error=error))
        return event


class ScoresTwice(Scheduler):
    """Prompt log-probabilities that were reported before a preemption are reported again."""

    def _commit_row(self, request: Request, row: Row, outcome: RowResult) -> TokenEvent | None:
        request.scored = 0
        return super()._commit_row(request, row, outcome)


class ForgetsWhatItScored(Scheduler):
    def _requeue(self, request: Request) -> None:
        super()._requeue(request)
        request.scored = 0


class LosesOutputAtPreemption(Scheduler):
    def _requeue(self, request: Request) -> None:
        super()._requeue(request)
        request.output.clear()


class ComputesPausedRequests(Scheduler):
    def pause(self, request_id: int, paused: bool) -> None:
        pass


class NeverResumes(Scheduler):
    def pause(self, request_id: int, paused: bool) -> None:
        super().pause(request_id, True)


class PutsPausedBackUnderARunningStep(Scheduler):
    def _put_back_paused(self) -> bool:
        for request in self._running.values():
            if request.paused:
                request.in_flight = 0
        return super()._put_back_paused()


class ReservesTheLastPromptToken(Scheduler):
    """A prompt that is cached to its end leaves nothing to compute."""

    def _claim_blocks(self, request: Request) -> bool:
        claimed = super()._claim_blocks(request)
        if claimed and request.published and request.remaining == 1:
            request.computed += 1
        return claimed


MUTATIONS = [
    Parts(hasher=ForgetsParents),
    Parts(pool=KeepsNamesOfEvictedBlocks),
    Parts(pool=SharesWithoutReference),
    Parts(pool=NamesTheNextBlock),
    Parts(scheduler=PublishesTooEarly),
    Parts(scheduler=HidesRetirements),
    Parts(scheduler=FreesWhatItStillUses),
    Parts(scheduler=PreemptsUnderARunningStep),
    Parts(scheduler=PreemptsTheOldest),
    Parts(scheduler=TrustsSlotNumbers),
    Parts(scheduler=DeliversAfterTheEnd),
    Parts(scheduler=KeepsWhatAFailedStepPromised),
    Parts(scheduler=BlamesTheFirst),
    Parts(scheduler=ScoresTwice),
    Parts(scheduler=ForgetsWhatItScored),
    Parts(scheduler=LosesOutputAtPreemption),
    Parts(scheduler=ComputesPausedRequests),
    Parts(scheduler=NeverResumes),
    Parts(scheduler=PutsPausedBackUnderARunningStep),
    Parts(scheduler=ReservesTheLastPromptToken),
]


def survives(parts: Parts) -> bool:
    """Whether no seed shows a fault. Errors that only a slip in the mutation itself could raise are let through."""
    for seed in range(160):
        for lookahead in (0, 1, 2):
            try:
                simulate(seed, lookahead, parts)
            except (CorruptionError, AssertionError, ValueError, LookupError, struct.error):
                return False
    return True


def mutated(parts: Parts) -> str:
    kinds = {parts.pool, parts.hasher, parts.scheduler} - {BlockPool, PrefixHasher, Scheduler}
    return kinds.pop().__name__


@pytest.mark.parametrize("parts", MUTATIONS, ids=mutated)
def test_a_broken_rule_is_noticed(parts: Parts) -> None:
    assert not survives(parts)
