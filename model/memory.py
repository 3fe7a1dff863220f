"""What a model takes in memory, from its shapes alone: nothing is loaded, nothing large is allocated."""

from dataclasses import dataclass

import torch

from octavo.kvcache.layout import KVLayout
from octavo.kvcache.ledger import MemoryPlan
from octavo.model.arena_layout import arena_layout
from octavo.model.config import ModelConfig
from octavo.model.kernels import Kernels
from octavo.model.transformer import Transformer


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """What a runner is built for. All of its memory follows from these numbers and the model's shapes."""

    max_model_len: int
    """Prompt and output of one request, in tokens."""
    max_rows: int
    """Rows of a step, and so requests that run at one time."""
    max_tokens: int
    """Tokens of a step."""
    block_size: int
    """Positions in a block of the cache."""
    blocks: int
    """Blocks in the pool."""

    @property
    def slot_bytes(self) -> int:
        """Token ids kept on the device: an int32 for every position of every slot, and one for the last sample."""
        return 4 * self.max_rows * (self.max_model_len + 1)


def plan_memory(
    config: ModelConfig, kernels: Kernels, dtype: torch.dtype, limits: RunnerLimits, budget: int
) -> MemoryPlan:
    """Plan the three buckets of one device.

    The attention backends of a CPU reserve no workspaces, so none are planned. Before the number of blocks is decided,
    a plan with none of them tells how much of a budget is taken (`MemoryPlan.fixed`).
    """
    layout = kv_layout(config, limits.block_size, dtype)
    arena = arena_layout(config, limits.max_tokens, limits.max_rows, dtype.itemsize)
    return MemoryPlan(
        weights=weights_bytes(config, kernels, dtype, limits.max_model_len),
        activations=arena.bytes + limits.slot_bytes,
        block_bytes=layout.block_bytes,
        blocks=limits.blocks,
        budget=budget,
    )


def kv_layout(config: ModelConfig, block_size: int, dtype: torch.dtype) -> KVLayout:
    """Shape of the cache of a model."""
    return KVLayout(config.layers, config.kv_heads, config.head_dim, block_size, dtype.itemsize)


def weights_bytes(config: ModelConfig, kernels: Kernels, dtype: torch.dtype, max_model_len: int) -> int:
    """Bytes of the matrices as the kernels pack them, the norms, and the RoPE table of max_model_len positions.

    They are those of the real model, made where tensors have shapes and no memory.
    """
    meta = torch.device("meta")
    with meta:
        return Transformer(config, kernels, dtype=dtype, device=meta, max_positions=max_model_len).weights_nbytes
