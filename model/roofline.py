"""How fast a device could be at best: bytes over bandwidth, operations over their peak. Imports no torch.

Roofline model: Williams, Waterman and Patterson, 2009. No implementation is faster than these bounds.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from octavo.model.config import ModelConfig
from octavo.model.memory import Formats, kv_layout, rank_shape, weights_bytes

_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator by its data sheet."""

    name: str
    memory: int
    """Bytes that its driver reports."""
    bandwidth: float = 0.0
    """Bytes a second from its memory; 0 where it is not known, and then there are no bounds."""
    flops: float = 0.0
    """Dense 16-bit operations a second, with sums in float32 and without sparsity."""
    fast_8_bit: bool = True
    """Whether 8-bit floats are multiplied twice as fast."""

    def peak(self, element_bytes: int) -> float:
        """Operations a second for numbers of this size (4: TF32)."""
        return self.flops * (2 / element_bytes if element_bytes > 1 or self.fast_8_bit else 1)


DEVICES: Final[Mapping[str, Device]] = {
    device.name: device
    for device in (
        Device("rtx-4090", 24_564 * _MIB, 1.008e12, 165.2e12),
        Device("l40s-48g", 46_068 * _MIB, 0.864e12, 362.05e12),
        Device("h100-80g", 81_559 * _MIB, 3.35e12, 989.4e12),
        Device("a100-80g", 81_920 * _MIB, 2.039e12, 312e12, fast_8_bit=False),
        Device("h200", 143_771 * _MIB, 4.8e12, 989.4e12),
        Device("b200", 183_359 * _MIB, 8e12, 2_250e12),
    )
}
"""By memory, the smallest first."""


def decode_seconds(config: ModelConfig, formats: Formats, device: Device, batch: int, context: int) -> float:
    """Least time of a step that computes one token for each of `batch` requests with `context` tokens behind them.

    Every weight is read once, an untied embedding but for a few rows not at all; the cache of every request is read.
    """
    rank = rank_shape(config, formats.ranks)
    seen = min(context, config.sliding_window or context)
    embedding = 0 if config.tied_embeddings else rank.vocabulary * rank.width * formats.activations
    read = weights_bytes(config, formats) - embedding + batch * seen * kv_layout(rank, 1, formats.cache).token_bytes
    # Each number of a matrix takes part in a product and a sum; so does each of q twice, for every position seen.
    matrices = rank.layers * block_parameters(rank) + rank.vocabulary * rank.width
    operations = batch * (2 * matrices + 4 * seen * rank.layers * rank.q_width)
    return max(read / device.bandwidth, operations / device.peak(formats.matrices))


def prefill_rate(config: ModelConfig, formats: Formats, device: Device) -> float:
    """Most prompt tokens a second: the products of the blocks alone, neither attention nor the LM head."""
    operations = 2 * config.layers * block_parameters(config)
    return device.peak(formats.matrices) * formats.ranks / operations


def block_parameters(config: ModelConfig) -> int:
    """Numbers in the seven matrices of one block."""
    attention = 2 * config.width * (config.q_width + config.kv_width)
    return attention + 3 * config.width * config.ffn_width
