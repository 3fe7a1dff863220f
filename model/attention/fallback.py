"""Attention on a CPU without a compiler: batched torch operations of fixed shape."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from octavo.kvcache.store import KVStore
from octavo.model.attention import AttentionBatch
from octavo.model.config import ModelConfig

SPAN = 64
"""Positions looked at together, counted from position 0 in ascending order."""
TILE = 8
"""Tokens of one row computed together; the last tile of a row repeats its last token, so that every product has as
many rows and BLAS takes the same path for it."""
PASS_ELEMENTS = 4 * 2**20
"""Float32 numbers that one pass over some tiles may hold: bounds the temporary memory, whatever the step's size."""
LOWEST = -1e30


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiles of a step, those that look furthest first."""

    tokens: Tensor
    """[tiles, TILE]: which query token of the batch."""
    valid: Tensor
    """[tiles, TILE]: false where a token repeats the row's last one."""
    positions: Tensor
    """[tiles, TILE]: each token's own position, the last it sees."""
    blocks_from: Tensor
    """[tiles]: where the row's blocks begin in block_indices."""
    kv_lengths: Tensor
    """[tiles]"""

    def part(self, first: int, end: int) -> "Tiles":
        """Some of the tiles, as views."""
        return Tiles(*(getattr(self, field.name)[first:end] for field in fields(self)))


class TorchAttention:
    """Paged attention in torch whose bits depend neither on chunking nor on neighbours nor on the number of threads.

    Each entry of a batched product is one tile of TILE tokens and one KV head against SPAN positions; a block holds K
    (and V) as [block_size, kv_heads, head_dim]. All arithmetic is float32. Slow, but bounded in memory.
    """

    def __init__(self, config: ModelConfig, store: KVStore) -> None:
        layout = store.layout
        self._store = store
        self._group = config.heads // config.kv_heads
        self._window = config.sliding_window
        self._scale = layout.head_dim**-0.5
        self._block_shape = (store.blocks * layout.block_size, layout.kv_heads, layout.head_dim)
        gathered = 2 * SPAN * layout.kv_heads * layout.head_dim
        queries = TILE * layout.kv_heads * self._group * 2 * (layout.head_dim + SPAN)
        self._tiles_per_pass = max(1, PASS_ELEMENTS // (gathered + queries))
        self._batch: AttentionBatch | None = None
        self._tiles: Tiles

    def reserve(self, max_rows: int, max_tokens: int, max_blocks: int) -> int:  # noqa: ARG002
        """Reserve nothing: torch allocates the temporaries of a pass."""
        return 0

    def plan(self, batch: AttentionBatch, *, padded_rows: int | None = None) -> None:  # noqa: ARG002
        """Divide the rows into tiles; see AttentionBackend."""
        self._batch = batch
        self._tiles = divide(batch)

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Append, then attend; see AttentionBackend. Rows of `out` beyond the batch become zero."""
        if self._batch is None:
            raise RuntimeError("forward without a plan")
        batch = self._batch
        keys = self._store.keys(layer).view(self._block_shape)
        values = self._store.values(layer).view(self._block_shape)
        slots = batch.slots.long()
        keys.index_copy_(0, slots, k[: batch.tokens])
        values.index_copy_(0, slots, v[: batch.tokens])
        out[batch.tokens :] = 0
        for first in range(0, self._tiles.kv_lengths.shape[0], self._tiles_per_pass):
            tiles = self._tiles.part(first, first + self._tiles_per_pass)
            result = self._attend(tiles, q, keys, values, batch.block_indices)
            out[tiles.tokens[tiles.valid]] = result[tiles.valid].to(out.dtype)

    def _attend(self, tiles: Tiles, q: Tensor, keys: Tensor, values: Tensor, blocks: Tensor) -> Tensor:
        """Attend from every token of the tiles: [tiles, TILE, heads, head_dim], float32."""
        kv_heads, head_dim = keys.shape[1:]
        count = tiles.kv_lengths.shape[0]
        queries = q[tiles.tokens].float().view(count, TILE, kv_heads, self._group, head_dim).transpose(1, 2)
        queries = queries.reshape(count, kv_heads, TILE * self._group, head_dim)
        highest = torch.full((count, kv_heads, TILE * self._group, 1), LOWEST)
        total = torch.zeros_like(highest)
        sums = torch.zeros_like(queries)
        furthest = tiles.positions[:, -1]
        for base in range(self._first_base(tiles), int(furthest[0]) + 1, SPAN):
            active = int((furthest >= base).sum())
            part = tiles.part(0, active)
            span_keys, span_values = self._gather(part, base, keys, values, blocks)
            scores = torch.matmul(queries[:active], span_keys.transpose(2, 3)) * self._scale
            scores.masked_fill_(~self._visible(part, base), float("-inf"))
            previous = highest[:active].clone()
            torch.maximum(previous, scores.amax(dim=-1, keepdim=True), out=highest[:active])
            # Where nothing was visible, the decay is exp(0) = 1 and the weights are 0: the state stays as it was.
            decay = (previous - highest[:active]).exp_()
            weights = (scores - highest[:active]).exp_()
            total[:active].mul_(decay).add_(weights.sum(dim=-1, keepdim=True))
            sums[:active].mul_(decay).add_(torch.matmul(weights, span_values))
        result = (sums / total).add_(0.0)  # -0 becomes +0: spans that were masked may have done so before, or not
        result = result.view(count, kv_heads, TILE, self._group, head_dim).transpose(1, 2)
        return result.reshape(count, TILE, kv_heads * self._group, head_dim)

    def _first_base(self, tiles: Tiles) -> int:
        if self._window is None:
            return 0
        return max(0, int(tiles.positions.min()) - self._window + 1) // SPAN * SPAN

    def _gather(self, tiles: Tiles, base: int, keys: Tensor, values: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of one span for each tile: [tiles, kv_heads, SPAN, head_dim], float32."""
        size = self._store.layout.block_size
        last = (tiles.kv_lengths - 1)[:, None]
        wanted = torch.arange(base, base + SPAN)
        position = torch.minimum(wanted, last)  # the row may end within the span: what is repeated is masked
        own = blocks[tiles.blocks_from[:, None] + position // size]
        slots = own.long() * size + position % size
        return keys[slots].float().transpose(1, 2), values[slots].float().transpose(1, 2)

    def _visible(self, tiles: Tiles, base: int) -> Tensor:
        """Which positions of a span each query sees: [tiles, 1, TILE * group, SPAN]."""
        position = torch.arange(base, base + SPAN)
        seen_from = tiles.positions[:, :, None]
        visible = position <= seen_from
        if self._window is not None:
            visible &= position > seen_from - self._window
        return visible.repeat_interleave(self._group, dim=1)[:, None]


def divide(batch: AttentionBatch) -> Tiles:
    """Divide the rows of a step into tiles of TILE tokens, those that look furthest first."""
    counts = batch.query_indptr.diff().long()
    tiles = (counts + (TILE - 1)) // TILE
    row = torch.repeat_interleave(torch.arange(batch.rows), tiles)
    number = torch.arange(row.shape[0]) - (tiles.cumsum(0) - tiles)[row]
    wanted = number[:, None] * TILE + torch.arange(TILE)
    token = torch.minimum(wanted, counts[row, None] - 1)
    positions = (batch.kv_lengths - counts)[row, None] + token
    order = positions[:, -1].argsort(descending=True)
    return Tiles(
        tokens=(batch.query_indptr[row, None] + token)[order],
        valid=(wanted == token)[order],
        positions=positions[order],
        blocks_from=batch.block_indptr[row].long()[order],
        kv_lengths=batch.kv_lengths[row].long()[order],
    )
