"""What the device knows of each running request: its tokens, its blocks and how it samples.

A request occupies one slot from its admission to its retirement. Its token ids live on the device, so a token sampled
by one step is read by the next without passing through the host; its block table and parameters live on the host,
where a step is laid out. Everything here changes in the order in which steps are applied, and only then.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.model.attention import AttentionBatch
from octavo.model.device import to_device
from octavo.model.masks import TokenMasks
from octavo.model.philox import unsigned_seed
from octavo.model.step import Admission, Growth, Row, Step

IntArray = NDArray[np.int64]

_FORBIDDING_BIAS = -100.0
"""The API calls this bias a ban: it is one even where the temperature is high or the other logits are lower still."""

_COPIED = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
"""Of SamplingParams, what is kept as it is."""

_SAMPLING = np.dtype(
    [
        *((name, np.float64) for name in _COPIED),
        ("top_k", np.int64),
        ("seed", np.uint64),
        ("min_tokens", np.int64),
        ("logprobs", np.int64),
        ("prompt_logprobs", np.int64),
        ("prompt_length", np.int64),
        ("biased", np.bool_),
    ],
    align=True,
)
"""One record per slot, so that a batch of rows is read with one gather. top_k is the size of the vocabulary where it
is off; -1 stands for no log-probabilities."""

Records = NDArray[np.void]
"""Rows of SlotTable.sampling."""
Record = np.void
"""One of them."""


@dataclass(frozen=True, slots=True)
class TokenLists:
    """The parameters of one slot that are lists of token ids, on the device."""

    bias_ids: Tensor
    """int64 [biases]"""
    bias_values: Tensor
    """float32 [biases]; minus infinity where a bias forbids its token."""
    ending_ids: Tensor
    """int64 [endings]: ids that min_tokens forbids."""


class SlotTable:
    """State of `max_slots` requests of at most `max_model_len` computed positions each."""

    def __init__(
        self,
        max_slots: int,
        max_model_len: int,
        block_size: int,
        max_blocks_per_slot: int,
        vocabulary: int,
        device: torch.device,
    ) -> None:
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.vocabulary = vocabulary
        self.device = device
        self.tokens = torch.zeros(max_slots, max_model_len + 1, dtype=torch.int32, device=device)
        """Prompt and output of each slot; one column more than can be computed, for the last sampled token."""
        self.sampling = np.zeros(max_slots, dtype=_SAMPLING)
        """Sampling parameters of each slot, with the length of its prompt."""
        self.lists: list[TokenLists | None] = [None] * max_slots
        """None where the slot is free."""
        self.masks = TokenMasks(max_slots, vocabulary, device)
        """Which tokens the rows of the last applied step may sample."""
        self._blocks = np.zeros((max_slots, max_blocks_per_slot), dtype=np.int32)
        self._block_counts = np.zeros(max_slots, dtype=np.int64)

    @property
    def nbytes(self) -> int:
        """Bytes on the device that do not depend on who runs."""
        return self.tokens.nbytes + self.masks.nbytes

    def apply(self, step: Step) -> None:
        """Retire, admit, grow and mask as the step says. Raises ValueError where the step contradicts the table."""
        for slot in step.retired:
            self._retire(slot)
        for admission in step.admitted:
            self._admit(admission)
        for growth in step.grown:
            self._grow(growth)
        self.masks.clear()
        for row in step.rows:
            if row.mask is not None:
                self.masks.restrict(row.slot, row.mask)

    def clear(self) -> None:
        """Free every slot."""
        self.lists = [None] * len(self.lists)
        self._block_counts[:] = 0

    def inputs(self, step: Step, tokens_out: Tensor, positions_out: Tensor, slots_out: Tensor) -> AttentionBatch:
        """Lay out the step's rows one after another and return what attention needs to know of them.

        Fills the first step.tokens entries of three int32 tensors [max_tokens] and leaves the rest alone: token ids and
        positions (on the device), and where K and V go (on the CPU; the batch's `slots` is a view of it). Call it
        after `apply`. Raises ValueError where a row names a free slot or positions beyond its blocks.
        """
        slots, starts, counts = _columns(step.rows)
        lengths = starts + counts
        used_blocks = -(-lengths // self.block_size)
        self._check_rows(slots, counts, lengths)
        query_indptr, row_of_token, offset = ragged(counts)
        positions = starts[row_of_token] + offset
        slot_of_token = slots[row_of_token]
        block = self._blocks[slot_of_token, positions // self.block_size]
        total = len(positions)
        slots_out[:total].copy_(_int32(block * self.block_size + positions % self.block_size))
        positions_out[:total].copy_(to_device(positions.astype(np.int32), self.device))
        torch.index_select(self.tokens.view(-1), 0, self._cells(slot_of_token, positions), out=tokens_out[:total])
        block_indptr, row_of_block, index = ragged(used_blocks)
        return AttentionBatch(
            query_indptr=_int32(query_indptr),
            kv_lengths=_int32(lengths),
            block_indptr=_int32(block_indptr),
            block_indices=_int32(self._blocks[slots[row_of_block], index]),
            last_block_len=_int32((lengths - 1) % self.block_size + 1),
            slots=slots_out[:total],
        )

    def append(self, slots: IntArray, positions: IntArray, tokens: Tensor) -> None:
        """Write tokens [n] (on the device) at the given position of each slot: prompt and output share one count."""
        self.tokens.view(-1).index_copy_(0, self._cells(slots, positions), tokens.to(torch.int32))

    def read(self, slots: IntArray, positions: IntArray) -> Tensor:
        """Return the token at the given position of each slot: int32 [n], on the device."""
        return self.tokens.view(-1).index_select(0, self._cells(slots, positions))

    def _cells(self, slots: IntArray, positions: IntArray) -> Tensor:
        """Return indices into the flattened token tensor: int64 [n], on the device."""
        return to_device(slots * self.tokens.shape[1] + positions, self.device)

    def _check_rows(self, slots: IntArray, counts: IntArray, lengths: IntArray) -> None:
        if (counts < 1).any():
            raise ValueError("a row of the step must compute at least one token")
        if (lengths > self._block_counts[slots] * self.block_size).any():
            raise ValueError("a row of the step needs more blocks than its slot has, or its slot is free")
        if (lengths > self.max_model_len).any():
            raise ValueError(f"a row of the step goes beyond max_model_len ({self.max_model_len})")

    def _retire(self, slot: int) -> None:
        if self.lists[slot] is None:
            raise ValueError(f"slot {slot} is retired but free")
        self.lists[slot] = None
        self._block_counts[slot] = 0

    def _admit(self, admission: Admission) -> None:
        slot, params = admission.slot, admission.params
        if self.lists[slot] is not None:
            raise ValueError(f"slot {slot} is admitted but occupied")
        tokens = self._valid_ids(admission.tokens)
        if not 0 < len(tokens) <= self.max_model_len:
            raise ValueError(f"slot {slot} is given {len(tokens)} tokens; max_model_len is {self.max_model_len}")
        self.tokens[slot, : len(tokens)].copy_(to_device(tokens.astype(np.int32), self.device))
        self.lists[slot] = self._token_lists(admission)
        self.sampling[slot] = (
            *(getattr(params, name) for name in _COPIED),
            params.top_k if 0 < params.top_k < self.vocabulary else self.vocabulary,
            unsigned_seed(params.seed),
            params.min_tokens if admission.ending_ids else 0,
            -1 if params.logprobs is None else params.logprobs,
            -1 if params.prompt_logprobs is None else params.prompt_logprobs,
            admission.prompt_length,
            bool(params.logit_bias),
        )
        self._grow(Growth(slot=slot, blocks=admission.blocks))

    def _token_lists(self, admission: Admission) -> TokenLists:
        bias = admission.params.logit_bias
        # A checkpoint may declare an end-of-sequence id that its own logits cannot name: it needs no mask.
        endings = [token for token in admission.ending_ids if 0 <= token < self.vocabulary]
        values = [-math.inf if value <= _FORBIDDING_BIAS else value for _, value in bias]
        return TokenLists(
            bias_ids=to_device(self._valid_ids(tuple(token for token, _ in bias)), self.device),
            bias_values=to_device(np.array(values, dtype=np.float32), self.device),
            ending_ids=to_device(np.array(endings, dtype=np.int64), self.device),
        )

    def _valid_ids(self, tokens: tuple[int, ...]) -> IntArray:
        """Return ids as an array. An id the model does not know would be read past the end of its embedding."""
        ids = np.array(tokens, dtype=np.int64)
        if len(ids) and not (ids.min() >= 0 and ids.max() < self.vocabulary):
            raise ValueError(f"token ids must be at least 0 and below {self.vocabulary}")
        return ids

    def _grow(self, growth: Growth) -> None:
        slot, count = growth.slot, int(self._block_counts[growth.slot])
        if self.lists[slot] is None:
            raise ValueError(f"slot {slot} is given blocks but free")
        end = count + len(growth.blocks)
        if end > self._blocks.shape[1]:
            raise ValueError(f"slot {slot} would have {end} blocks; a slot holds at most {self._blocks.shape[1]}")
        self._blocks[slot, count:end] = growth.blocks
        self._block_counts[slot] = end


def _columns(rows: tuple[Row, ...]) -> tuple[IntArray, IntArray, IntArray]:
    """Return slots, starts and counts of the rows, each [rows]."""
    table = np.array([(row.slot, row.start, row.count) for row in rows], dtype=np.int64).reshape(-1, 3)
    return table[:, 0], table[:, 1], table[:, 2]


def ragged(counts: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Lay out rows of `counts` items: returns indptr [rows + 1], and for each item its row and its index in the row."""
    indptr = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=indptr[1:])
    row = np.repeat(np.arange(len(counts)), counts)
    return indptr, row, np.arange(indptr[-1]) - indptr[row]


def _int32(values: NDArray[np.signedinteger]) -> Tensor:
    return torch.from_numpy(values.astype(np.int32))
