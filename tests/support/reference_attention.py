"""Attention spelled out: the oracle that the fast backends are compared with."""

import torch
from torch import Tensor

from octavo.kvcache.store import KVStore
from octavo.model.attention import AttentionBatch
from octavo.model.config import ModelConfig


class ReferenceAttention:
    """Plain torch, one row after another, on any device and in any dtype.

    A block holds K (and V) as [block_size, kv_heads, head_dim]: FlashInfer's NHD. Scores and softmax are made in
    float32, in float64 where the store is float64.
    """

    def __init__(self, config: ModelConfig, store: KVStore) -> None:
        layout = store.layout
        self._store = store
        self._block_shape = (store.blocks * layout.block_size, layout.kv_heads, layout.head_dim)
        self._group = config.heads // config.kv_heads
        self._window = config.sliding_window
        self._batch: AttentionBatch | None = None

    def reserve(self, max_rows: int, max_tokens: int, max_blocks: int) -> int:
        """Reserve nothing."""
        return 0

    def plan(self, batch: AttentionBatch, *, padded_rows: int | None = None) -> None:
        """Keep the batch."""
        self._batch = batch

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Append, then attend; see AttentionBackend."""
        if self._batch is None:
            raise RuntimeError("forward without a plan")
        batch = self._batch
        keys = self._store.keys(layer).view(self._block_shape)
        values = self._store.values(layer).view(self._block_shape)
        keys[batch.slots.long()] = k[: batch.tokens]
        values[batch.slots.long()] = v[: batch.tokens]
        out.zero_()
        for row in range(batch.rows):
            first, end = batch.query_indptr[row : row + 2].tolist()
            slots = self._slots(batch, row)
            out[first:end] = self._attend(q[first:end], keys[slots], values[slots])

    def _slots(self, batch: AttentionBatch, row: int) -> Tensor:
        """Where the positions of a row lie: [kv_length]."""
        first, end = batch.block_indptr[row : row + 2].tolist()
        size = self._store.layout.block_size
        slots = batch.block_indices[first:end, None] * size + torch.arange(size, dtype=torch.int32)
        return slots.flatten()[: int(batch.kv_lengths[row])].long()

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend from q [tokens, heads, head_dim] to keys and values [positions, kv_heads, head_dim]."""
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        keys = keys.to(wide).repeat_interleave(self._group, dim=1)
        values = values.to(wide).repeat_interleave(self._group, dim=1)
        scores = torch.einsum("thd,phd->htp", q.to(wide), keys) * q.shape[-1] ** -0.5
        seen_from = torch.arange(keys.shape[0] - q.shape[0], keys.shape[0])[:, None]
        position = torch.arange(keys.shape[0])
        visible = position <= seen_from
        if self._window is not None:
            visible &= position > seen_from - self._window
        weights = scores.masked_fill(~visible.to(scores.device), float("-inf")).softmax(dim=-1)
        return torch.einsum("htp,phd->thd", weights, values).to(q.dtype)
