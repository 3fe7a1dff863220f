"""The attention seam: what a backend is given and what it must do.

Behind it stand `cpu` (C++), `fallback` (torch), and on a GPU `flashinfer`.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The rows of one step in CSR form, named as FlashInfer names them. All tensors are int32 on the CPU.

    Row i computes the query tokens query_indptr[i] .. query_indptr[i+1]-1 of the batch; they are the last of the row's
    kv_lengths[i] positions, whose K and V lie in the blocks block_indices[block_indptr[i] .. block_indptr[i+1]-1].
    Query token j of a row that computes n tokens sees positions 0 .. kv_length - n + j, itself included, and of those
    only the last `window` where the model has a sliding window.
    """

    query_indptr: Tensor
    """[rows + 1]"""
    kv_lengths: Tensor
    """[rows]: positions in the cache once this step's own are appended."""
    block_indptr: Tensor
    """[rows + 1]"""
    block_indices: Tensor
    """[block_indptr[-1]]"""
    last_block_len: Tensor
    """[rows]: positions used in each row's last block, 1 .. block_size."""
    slots: Tensor
    """[tokens]: where each query token's K and V go: block * block_size + offset."""

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.kv_lengths.shape[0]

    @property
    def tokens(self) -> int:
        """Number of query tokens; q, k, v and out may be longer (padded), never shorter."""
        return self.slots.shape[0]


EMPTY_BATCH = AttentionBatch(
    query_indptr=torch.zeros(1, dtype=torch.int32),
    kv_lengths=torch.zeros(0, dtype=torch.int32),
    block_indptr=torch.zeros(1, dtype=torch.int32),
    block_indices=torch.zeros(0, dtype=torch.int32),
    last_block_len=torch.zeros(0, dtype=torch.int32),
    slots=torch.zeros(0, dtype=torch.int32),
)
"""A step without rows: what is planned for it is all padding."""


class AttentionBackend(Protocol):
    """Paged attention over one KV store on one device."""

    def reserve(self, max_rows: int, max_tokens: int, max_blocks: int) -> int:
        """Allocate fixed workspaces for the largest step and return their size in bytes. Called once.

        max_blocks: blocks in the tables of a step's rows together, shared ones counted as often as they occur.
        """
        ...

    def plan(self, batch: AttentionBatch, *, padded_rows: int | None = None) -> None:
        """Prepare one step. Called once before its forwards.

        padded_rows: rows of the captured step that is to be replayed; all rows of the batch are then of one token, and
        the missing ones read and write what nobody needs. Only where steps are captured.
        """
        ...

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Append k and v of all rows to the cache, then attend.

        q and out: [tokens, heads, head_dim]; k and v: [tokens, kv_heads, head_dim], all after RoPE and possibly views
        with a row stride. Within a call K and V of every row are appended before any row attends. Writes only `out`
        and the cache.
        """
        ...
