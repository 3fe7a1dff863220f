"""One device, one step: from the scheduler's rows to sampled tokens and log-probabilities."""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.kvcache.layout import KVLayout
from octavo.kvcache.ledger import MemoryLedger
from octavo.kvcache.store import KVStore
from octavo.model.arena import ActivationArena
from octavo.model.arena_layout import arena_layout, bytes_in_use
from octavo.model.attention import EMPTY_BATCH, AttentionBackend
from octavo.model.attention.load import load_attention, scale_destinations
from octavo.model.device import Fence, Lander, to_device
from octavo.model.device_sampling import DeviceSampler
from octavo.model.draw import RowScratch, highest
from octavo.model.graphs import Capture, DecodeGraphs, Replay
from octavo.model.kernels.fp8 import FP8
from octavo.model.kernels.native import NativeKernels
from octavo.model.memory import RunnerLimits, kv_layout, largest_step, rank_shape
from octavo.model.parallel import Ranks, share_destinations
from octavo.model.placement import Placement
from octavo.model.poison import Poison, poison_wanted
from octavo.model.sampling import Sampled, Sampler
from octavo.model.slots import IntArray, SlotTable, ragged
from octavo.model.step import Pending, Row, RowResult, Step, StepResult
from octavo.model.transformer import Transformer
from octavo.model.weights.checkpoint import Checkpoint, load_weights
from octavo.model.weights.headers import stored_shapes

_log = logging.getLogger(__name__)

_MOST_RECORDINGS = 64
"""Steps of all sizes up to max_rows are recorded, longer ones while there are fewer recordings than this: about 100 KB
each. The longest steps that are allowed come early and often."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Logits that a step asks for. Arrays [wanted], on the host."""

    tokens: IntArray
    """Which token of the step's batch to take to the LM head."""
    slots: IntArray
    positions: IntArray
    """Index, in prompt and output, of the token that these logits predict."""

    def parts(self, size: int) -> Iterator["_Wanted"]:
        """Divide into parts of at most `size`."""
        for start in range(0, len(self.tokens), size):
            part = slice(start, start + size)
            yield _Wanted(self.tokens[part], self.slots[part], self.positions[part])


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of a step as arrays [rows]."""

    slots: IntArray
    starts: IntArray
    counts: IntArray
    samples: NDArray[np.bool_]
    scores: IntArray
    """How many of the row's tokens predict a prompt token that is to be scored."""

    @classmethod
    def of(cls, rows: tuple[Row, ...], prompt_lengths: IntArray) -> "_Rows":
        """Gather the columns; prompt_lengths: [slots]."""
        columns = [(row.slot, row.start, row.count, row.sample, row.score) for row in rows]
        slots, starts, counts, samples, score = np.array(columns, dtype=np.int64).reshape(-1, 5).T
        scores = np.where(score, np.clip(prompt_lengths[slots] - 1 - starts, 0, counts), 0)
        return cls(slots, starts, counts, samples.astype(np.bool_), scores)

    def sampled(self) -> _Wanted:
        """The last token of every row that samples."""
        ends, chosen = np.cumsum(self.counts), self.samples
        return _Wanted(ends[chosen] - 1, self.slots[chosen], (self.starts + self.counts)[chosen])

    def scored(self) -> _Wanted:
        """The tokens that predict a prompt token to be scored, row after row."""
        _, row, offset = ragged(self.scores)
        first = np.cumsum(self.counts) - self.counts
        return _Wanted(first[row] + offset, self.slots[row], self.starts[row] + offset + 1)


Landed = tuple[Sampled, Fence]
"""Results on their way to the host, and when they are there."""


@dataclass(frozen=True, slots=True)
class _Queued:
    """A step on its way: results are read once they have landed on the host."""

    rows: _Rows
    sampled: list[Landed]
    scored: list[Landed]
    activations: int

    def wait(self) -> StepResult:
        """Put together what was sampled and scored, in the order of the rows."""
        for _, fence in (*self.sampled, *self.scored):
            fence.wait()
        sampled = iter([result for part, _ in self.sampled for result in part.results()])
        scored = iter([result for part, _ in self.scored for result in part.results()])
        results = []
        for samples, scores in zip(self.rows.samples, self.rows.scores, strict=True):
            own = next(sampled) if samples else RowResult()
            results.append(_with_scores(own, [next(scored) for _ in range(scores)]))
        return StepResult(tuple(results), self.activations)


def _with_scores(result: RowResult, scores: list[RowResult]) -> RowResult:
    if result.failed or any(score.failed for score in scores):
        return RowResult(failed=True)
    found = tuple(score.logprobs for score in scores if score.logprobs is not None)
    return replace(result, prompt_logprobs=found)


class ModelRunner:
    """Executes steps on one device, in the order they are submitted."""

    def __init__(
        self,
        model: Transformer,
        attention: AttentionBackend,
        slots: SlotTable,
        sampler: Sampler,
        arena: ActivationArena,
        record: Capture | None = None,
        capture: Capture | None = None,
    ) -> None:
        """`record` runs a forward pass and returns what repeats it, of kernels and attention alike.

        With `capture`, steps of one token a row are captured now, in all sizes, and replayed from then on.
        """
        self.model = model
        self.weights_digest = ""
        """SHA-256 of the weights that were loaded, in hexadecimal."""
        self.arena = arena
        self.poison: Poison | None = None
        self.observe: Callable[[Tensor], None] | None = None
        """Hears what is added to the spine, see Transformer.forward; not in a step that repeats a recorded one."""
        self._attention = attention
        self._slots = slots
        self._sampler = sampler
        self._record = record
        self._repeats: dict[int, Replay] = {}
        """How to repeat the forward pass of so many tokens."""
        self._lander = Lander(slots.device)
        self._cache_slots = torch.empty(arena.max_tokens, dtype=torch.int32)
        """Where each token's K and V go: on the host, as the attention backends plan there."""
        self._all_rows = torch.arange(arena.max_rows, device=slots.device)
        self._logits_ready = False
        """Whether the arena holds the logits of every row of the step, still unchanged."""
        self._graphs: DecodeGraphs | None = None
        if capture is not None:
            self._graphs = DecodeGraphs(capture, slots.tokens.shape[0], self._prepare_capture, self._decode)

    def submit(self, step: Step) -> Pending:
        """Queue a step. ValueError if it is larger than the arena or contradicts the slot table."""
        self._slots.apply(step)
        if self.poison is not None:
            self.poison.before(step)
        rows = _Rows.of(step.rows, self._slots.sampling["prompt_length"])
        if step.rows:
            self._forward(step)
        sampled, scored = list(self._sample(rows.sampled())), list(self._score(rows.scored()))
        return _Queued(rows, sampled, scored, self._activations(step.tokens, rows))

    def _activations(self, tokens: int, rows: _Rows) -> int:
        """Bytes of the activations' bucket that a step uses: what is in use always, and its part of the arena."""
        logits = min(self.arena.max_rows, max(int(rows.samples.sum()), int(rows.scores.sum())))
        kept = self._slots.nbytes + self.model.rope.nbytes + self.model.kernels.threads * self.model.scratch_nbytes
        gathered = self.model.ranks.nbytes if self.model.ranks else 0
        return kept + gathered + bytes_in_use(replace(self.arena.shape, tokens=tokens, rows=logits))

    def reset(self) -> None:
        """Forget all slots and what a step that failed has left behind."""
        self._slots.clear()

    def _forward(self, step: Step) -> None:
        """Compute the final norm of every token of the step, and append its K and V to the cache."""
        tokens, multiple = step.tokens, self.model.kernels.row_multiple
        if tokens > self.arena.max_tokens:
            raise ValueError(f"a step of {tokens} tokens exceeds the {self.arena.max_tokens} this runner is built for")
        size = self._graphs.size_for(tokens) if self._graphs is not None and tokens == len(step.rows) else None
        padded = size or -(-tokens // multiple) * multiple
        token_ids = self.arena.view("tokens", padded)[:, 0]
        positions = self.arena.view("positions", padded)[:, 0]
        token_ids[tokens:].zero_()
        positions[tokens:].zero_()
        batch = self._slots.inputs(step, token_ids, positions, self._cache_slots)
        self._attention.plan(batch, padded_rows=size)
        self._logits_ready = size is not None
        if self._graphs is not None and size is not None:
            self._graphs.replay(size)
        elif (repeat := self._repeats.get(padded)) is not None:
            repeat()
        elif self._record is None or (padded > self.arena.max_rows and len(self._repeats) >= _MOST_RECORDINGS):
            self.model.forward(self.arena, padded, self._attention, self.observe)
        else:
            forward = partial(self.model.forward, self.arena, padded, self._attention, self.observe)
            self._repeats[padded] = self._record(forward)

    def _decode(self, rows: int) -> None:
        """Queue a whole step of one token a row, as it is captured: from the arena's tokens to its logits."""
        self.model.forward(self.arena, rows, self._attention)
        self.model.logits(self.arena, self._all_rows[:rows])

    def _prepare_capture(self, rows: int) -> None:
        """Plan a step in which every row is padding."""
        self.arena.view("tokens", rows).zero_()
        self.arena.view("positions", rows).zero_()
        self._attention.plan(EMPTY_BATCH, padded_rows=rows)

    def _sample(self, wanted: _Wanted) -> Iterator[Landed]:
        """Choose the next tokens and append them to their slots, where the next step finds them."""
        for part in wanted.parts(self.arena.max_rows):
            sampled = self._sampler.sample(self._logits(part), part.slots, part.positions)
            if self.model.ranks is not None:
                self.model.ranks.agree(sampled.tokens)
            self._slots.append(part.slots, part.positions, sampled.tokens)
            yield sampled.to_host(self._lander)

    def _score(self, wanted: _Wanted) -> Iterator[Landed]:
        """Look up the log-probabilities of prompt tokens, as many at a time as the arena's logits hold."""
        for part in wanted.parts(self.arena.max_rows):
            scored = self._sampler.score(self._logits(part), part.slots, part.positions)
            yield scored.to_host(self._lander)

    def _logits(self, wanted: _Wanted) -> Tensor:
        """Return float32 [wanted, vocabulary], a view of the arena until the next call, and the caller's to change."""
        count = len(wanted.tokens)
        ready, self._logits_ready = self._logits_ready, False
        if ready and np.array_equal(wanted.tokens, np.arange(count)):
            return self.model.computed_logits(self.arena, count)
        return self.model.logits(self.arena, to_device(wanted.tokens, self._slots.device))


def build_runner(
    checkpoint: Checkpoint,
    placement: Placement,
    limits: RunnerLimits,
    ledger: MemoryLedger,
    progress: Callable[[int, int], None],
    ranks: Ranks | None = None,
    capture: Capture | None = None,
) -> ModelRunner:
    """Allocate everything a runner will ever use, enter it into the ledger, and load the weights.

    progress hears bytes loaded and bytes in all; ranks is None where the model is whole; capture is for steps of a GPU.
    Raises CheckpointError, or MemoryError beyond the ledger's plan.
    """
    kernels, device, dtype, workspaces = placement.kernels, placement.device, placement.dtype, placement.workspaces
    config = rank_shape(checkpoint.config, placement.ranks)
    cache_dtype = FP8 if workspaces and workspaces.fp8_cache else dtype
    layout = kv_layout(config, limits.block_size, cache_dtype.itemsize)
    model = Transformer(config, kernels, dtype=dtype, device=device, max_positions=limits.max_model_len, ranks=ranks)
    ledger.allocate("weights", model.weights_nbytes)
    padding_blocks = 1 if workspaces else 0
    store = _make_store(layout, limits.blocks + padding_blocks, cache_dtype, device)
    ledger.allocate("cache", limits.blocks * layout.block_bytes)
    attention = load_attention(config, store, kernels, workspaces)
    arena = ActivationArena(arena_layout(largest_step(config, placement.formats, limits)), dtype, device)
    if kernels.fp8 is not None:
        kernels.fp8.arena = arena
    blocks_per_slot = layout.blocks_for(limits.max_model_len)
    vocabulary = checkpoint.config.vocabulary
    slots = SlotTable(limits.max_rows, limits.max_model_len, limits.block_size, blocks_per_slot, vocabulary, device)
    worked_in = attention.reserve(limits.max_rows, arena.max_tokens, limits.table_entries)
    worked_in += kernels.threads * model.scratch_nbytes
    worked_in += padding_blocks * layout.block_bytes + (workspaces.library_bytes() if workspaces else 0)
    if ranks:
        worked_in += ranks.reserve(arena.max_rows, vocabulary, arena.max_tokens, config.width, device)
    ledger.allocate("activations", arena.nbytes + slots.nbytes + model.rope.nbytes + worked_in)
    destinations = model.destinations() | scale_destinations(config, store)
    if ranks:
        destinations = share_destinations(destinations, stored_shapes(checkpoint.config), ranks.rank)
    digest = load_weights(checkpoint, destinations, progress)
    scratch = RowScratch.of(arena, vocabulary)
    native = kernels if isinstance(kernels, NativeKernels) else None
    choose = native.highest if native else highest
    sampler = DeviceSampler(slots, scratch) if workspaces else Sampler(slots, scratch, choose)
    record = native.library.record if native and not ranks else None
    runner = ModelRunner(model, attention, slots, sampler, arena, record, capture)
    runner.weights_digest = ranks.combine(digest) if ranks else digest
    if poison_wanted() and not workspaces:
        runner.poison = Poison(store, arena)
        runner.poison.fill()
    return runner


def _make_store(layout: KVLayout, blocks: int, dtype: torch.dtype, device: torch.device) -> KVStore:
    """Make the pool, and say so where it has taken long: the system clears every page of it."""
    started = time.monotonic()
    store = KVStore(layout, blocks, dtype, device)
    if (seconds := time.monotonic() - started) > 1:
        _log.info("KV cache: %s bytes in %.1f s", f"{store.data.nbytes:,}", seconds)
    return store
