"""A device in plain Python that behaves like a real one where it matters to whoever drives it.

It executes steps in order and late: not when they are submitted but when somebody waits, so the host's state has always
moved on by then. Its cache remembers, for every position of every block, which token sequence up to there was stored;
each row checks all positions it attends to. A block that is freed too early, shared wrongly or named wrongly, a stale
slot, or a token lost or doubled ends in `CorruptionError`.
"""

import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from octavo.model.step import Admission, Row, RowResult, SamplingParams, Step, StepResult, TokenLogprobs


class CorruptionError(BaseException):
    """A step contradicts what the device knows or holds. No Exception, lest an engine recover and hide it."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise CorruptionError(message)


def token_logprobs(token: int, likeliest: int, alternatives: int, vocabulary: int) -> TokenLogprobs:
    """What the device reports of a token: see `ScriptedRunner` for the distribution."""

    def logprob(rank: int) -> float:
        return math.log((vocabulary + 1) / (vocabulary * (rank + 1) * (rank + 2)))

    top = tuple(((likeliest + rank) % vocabulary, logprob(rank)) for rank in range(alternatives))
    rank = (token - likeliest) % vocabulary
    return TokenLogprobs(token, logprob(rank), rank + 1, top)


@dataclass(slots=True)
class Slot:
    tokens: list[int]
    prompt_length: int
    blocks: list[int]
    params: SamplingParams
    ending_ids: frozenset[int]
    digests: list[int] = field(default_factory=list)
    """What the cache must hold at each position: K and V there depend on this token and all before it."""

    def digest(self, positions: int) -> list[int]:
        """The digests of at least so many positions."""
        digests = self.digests
        for token in self.tokens[len(digests) : positions]:
            digests.append(hash((digests[-1] if digests else 0, token)))
        return digests


class ScriptedRunner:
    """A `Runner` whose next token is a function of all tokens before it.

    `next_token` may return None: the row's logits are then not finite, and it fails. It may raise: then the step does.
    Log-probabilities belong to a real distribution over the vocabulary, in which the token k places after the likeliest
    one (counted round the vocabulary) has a probability proportional to 1 / ((k + 1)(k + 2)). Sampling is greedy;
    of the parameters only min_tokens, logprobs and prompt_logprobs have an effect, and masks do.
    """

    def __init__(
        self, next_token: Callable[[Sequence[int]], int | None], vocabulary: int, block_size: int = 16
    ) -> None:
        self.next_token = next_token
        self.vocabulary = vocabulary
        self.block_size = block_size
        self.slots: dict[int, Slot] = {}
        self.cache: defaultdict[int, list[int | None]] = defaultdict(lambda: [None] * block_size)
        """By block, for each of its positions: digest of the tokens up to there."""
        self.computed = 0
        """Positions computed so far, in all steps."""
        self.broken = False
        """Whether a step has failed since the last reset."""
        self._queue: deque[Step] = deque()

    def submit(self, step: Step) -> "PendingStep":
        self._queue.append(step)
        return PendingStep(self, step)

    def execute(self, step: Step) -> StepResult:
        if self.broken:
            raise RuntimeError("an earlier step broke the device: it computes nothing until it is reset")
        self.broken = True
        result = self.compute(step)
        self.broken = False
        return result

    def compute(self, step: Step) -> StepResult:
        require(bool(self._queue) and self._queue.popleft() is step, "steps must be awaited in the order submitted")
        self._apply(step)
        ordered = sorted(step.rows, key=lambda row: row.count > 1)
        require(list(step.rows) == ordered, "rows of one token come before longer ones")
        for row in step.rows:
            self._store(row)
        return StepResult(tuple(self._attend(row) for row in step.rows))

    def reset(self) -> None:
        """Forget all slots and steps."""
        self.broken = False
        self._queue.clear()
        self.slots.clear()

    def _apply(self, step: Step) -> None:
        for number in step.retired:
            require(self.slots.pop(number, None) is not None, f"slot {number} is retired but free")
        for admission in step.admitted:
            self._admit(admission)
        for growth in step.grown:
            require(growth.slot in self.slots, f"slot {growth.slot} grows but is free")
            self.slots[growth.slot].blocks += growth.blocks

    def _admit(self, admission: Admission) -> None:
        require(admission.slot not in self.slots, f"slot {admission.slot} is admitted but occupied")
        self.slots[admission.slot] = Slot(
            tokens=list(admission.tokens),
            prompt_length=admission.prompt_length,
            blocks=list(admission.blocks),
            params=admission.params,
            ending_ids=frozenset(admission.ending_ids),
        )

    def _store(self, row: Row) -> None:
        require(row.slot in self.slots, f"slot {row.slot} computes but is free")
        slot = self.slots[row.slot]
        end = row.start + row.count
        require(row.count >= 1, "a row computes at least one token")
        require(end <= len(slot.tokens), f"slot {row.slot} computes beyond its {len(slot.tokens)} tokens")
        require(end <= len(slot.blocks) * self.block_size, f"slot {row.slot} computes beyond its blocks")
        digests = slot.digest(end)
        for position in range(row.start, end):
            number, offset = divmod(position, self.block_size)
            self.cache[slot.blocks[number]][offset] = digests[position]
        self.computed += row.count

    def _attend(self, row: Row) -> RowResult:
        slot = self.slots[row.slot]
        end = row.start + row.count
        self._check_cache(slot, row.slot, end)
        scores = self._scores(slot, row) if row.score else ()
        if not row.sample:
            return RowResult(failed=True) if scores is None else RowResult(prompt_logprobs=scores)
        require(end == len(slot.tokens), f"slot {row.slot} samples after {end} of {len(slot.tokens)} tokens")
        likeliest = self.next_token(slot.tokens)
        if likeliest is None or scores is None or (row.mask is not None and not any(row.mask)):
            slot.tokens.append(0)  # rows that are queued behind it run all the same
            return RowResult(failed=True)
        token = self._sample(slot, row, likeliest)
        alternatives = slot.params.logprobs
        logprobs = None if alternatives is None else token_logprobs(token, likeliest, alternatives, self.vocabulary)
        slot.tokens.append(token)
        return RowResult(token, logprobs, scores)

    def _check_cache(self, slot: Slot, number: int, end: int) -> None:
        blocks = slot.blocks[: -(-end // self.block_size)]
        found = list(chain.from_iterable(map(self.cache.__getitem__, blocks)))
        require(found[:end] == slot.digest(end)[:end], f"slot {number} finds foreign K and V")

    def _sample(self, slot: Slot, row: Row, likeliest: int) -> int:
        token = likeliest
        if row.mask is not None:
            while not row.mask[token // 8] >> token % 8 & 1:
                token = (token + 1) % self.vocabulary
        elif len(slot.tokens) - slot.prompt_length < slot.params.min_tokens:
            while token in slot.ending_ids:
                token = (token + 1) % self.vocabulary
        return token

    def _scores(self, slot: Slot, row: Row) -> tuple[TokenLogprobs, ...] | None:
        entries = []
        for position in range(row.start + 1, min(row.start + row.count, slot.prompt_length - 1) + 1):
            likeliest = self.next_token(slot.tokens[:position])
            if likeliest is None:
                return None
            alternatives = slot.params.prompt_logprobs or 0
            entries.append(token_logprobs(slot.tokens[position], likeliest, alternatives, self.vocabulary))
        return tuple(entries)


@dataclass(frozen=True, slots=True)
class PendingStep:
    runner: ScriptedRunner
    step: Step

    def wait(self) -> StepResult:
        return self.runner.execute(self.step)
