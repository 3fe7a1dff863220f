"""One prompt through a model, with what every branch adds to the spine: for `octavo describe --trace`."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kvcache.store import KVStore
from octavo.model.arena import ActivationArena
from octavo.model.arena_layout import StepShape, arena_layout
from octavo.model.attention import AttentionBatch
from octavo.model.attention.load import load_attention
from octavo.model.kernels import Kernels
from octavo.model.memory import kv_layout
from octavo.model.transformer import Transformer
from octavo.model.weights.checkpoint import Checkpoint, load_weights

_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Trace:
    """Euclidean norms of vectors of d_model numbers, each the mean over the prompt's tokens."""

    embedding: float
    blocks: tuple[tuple[float, float, float], ...]
    """Of each block: what attention adds, what the feed-forward adds, and the spine that the block hands on."""
    largest_error: float
    """Largest difference between the final spine and the sum of all that was added to it, which is float64."""


def trace(
    checkpoint: Checkpoint,
    kernels: Kernels,
    dtype: torch.dtype,
    tokens: tuple[int, ...],
    progress: Callable[[int, int], None],
) -> Trace:
    """Load a model and run a prompt of token ids through it. Raises CheckpointError."""
    config, device, count = checkpoint.config, torch.device("cpu"), len(tokens)
    model = Transformer(config, kernels, dtype=dtype, device=device, max_positions=count)
    load_weights(checkpoint, model.destinations(), progress)
    layout = kv_layout(config, _BLOCK_SIZE, dtype.itemsize)
    store = KVStore(layout, layout.blocks_for(count), dtype, device)
    attention = load_attention(config, store, kernels)
    arena = ActivationArena(arena_layout(StepShape(config, count, 1, dtype.itemsize)), dtype, device)
    padded = arena.max_tokens
    for name, values in (("tokens", torch.tensor(tokens)), ("positions", torch.arange(count))):
        area = arena.view(name, padded)[:, 0]
        area.zero_()
        area[:count] = values
    attention.plan(_one_row(count, store.blocks))
    added: list[Tensor] = []
    handed_on: list[Tensor] = []

    def observe(contribution: Tensor) -> None:
        added.append(contribution[:count].double())
        handed_on.append(arena.view("spine", count).double())

    model.forward(arena, padded, attention, observe)
    handed_on.append(arena.view("spine", count).double())
    sizes = [_norm(part) for part in added]
    # The spine before a block's attention is what the block below has handed on.
    blocks = zip(sizes[1::2], sizes[2::2], map(_norm, handed_on[3::2]), strict=True)
    return Trace(sizes[0], tuple(blocks), float((torch.stack(added).sum(0) - handed_on[-1]).abs().max()))


def _norm(vectors: Tensor) -> float:
    return float(vectors.norm(dim=1).mean())


def _one_row(count: int, blocks: int) -> AttentionBatch:
    """A batch of one prompt in the first blocks of the store."""

    def int32(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    return AttentionBatch(
        query_indptr=int32(0, count),
        kv_lengths=int32(count),
        block_indptr=int32(0, blocks),
        block_indices=torch.arange(blocks, dtype=torch.int32),
        last_block_len=int32((count - 1) % _BLOCK_SIZE + 1),
        slots=torch.arange(count, dtype=torch.int32),
    )
