"""The parts of a block that are not matrices: norms and the table behind RoPE."""

import math

import torch
from torch import Tensor

from octavo.model.config import ModelConfig, RopeScaling
from octavo.model.kernels import Kernels


class RMSNorm:
    """Root mean square norm (Zhang and Sennrich, 2019) with a learned weight [width]."""

    def __init__(self, kernels: Kernels, width: int, epsilon: float, dtype: torch.dtype, device: torch.device) -> None:
        self._kernels = kernels
        self._epsilon = epsilon
        self.weight = torch.empty(width, dtype=dtype, device=device)

    def load(self, first: int, values: Tensor) -> None:
        """Store weights [count], any float dtype, beginning at index first."""
        self.weight[first : first + values.shape[0]].copy_(values)

    def __call__(self, x: Tensor, out: Tensor, branch: Tensor | None = None) -> None:
        """Write norm(x) to out, over the last dimension, after x += branch if it is given; see Kernels.rms_norm."""
        self._kernels.rms_norm(x, self.weight, self._epsilon, out, branch)


def rope_table(config: ModelConfig, positions: int) -> Tensor:
    """Cosines and sines of RoPE (Su et al., 2021): float32 [positions, head_dim], half cosines, half sines.

    The angles are products of float32 numbers, as in the reference implementation: at position 100,000 their rounding
    is larger than that of the activations, so a table from float64 would be another model.
    """
    angles = torch.arange(positions).float()[:, None] * inverse_frequencies(config)
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Angle per position of each pair of dimensions: float32 [head_dim / 2]."""
    exponents = torch.arange(0, config.head_dim, 2).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "factors":
        return frequencies / torch.tensor(scaling.factors)
    if scaling.kind == "llama3":
        return _llama3_frequencies(frequencies, scaling)
    raise ValueError(f"RoPE scaling {scaling.kind!r} is not supported: linear, llama3 and factors are")


def _llama3_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Divide the frequencies that never turned once in the trained context, keep the fast ones, blend between.

    Source: the reference implementation of Llama 3.1 (apply_scaling in its model.py).
    """
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_context / wavelengths
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    blend = (turns - low) / (high - low)
    blended = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    scaled = torch.where(wavelengths > scaling.original_context / low, frequencies / scaling.factor, blended)
    return torch.where(wavelengths < scaling.original_context / high, frequencies, scaled)
