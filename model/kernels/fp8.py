"""Products of 8-bit floats (e4m3) on a GPU: a scale for every output row of a matrix, and one for every token.

Matrices are rounded once, while they are loaded; activations in every step, by their own largest number. The products
are added in float32 and scaled after that, so y = scale_x scale_w (x_8 . w_8) loses only what rounding to 8 bits lost.
"""

import math

import torch
from torch import Tensor

from octavo.model.arena import ActivationArena
from octavo.model.arena_layout import FP8_AREA, FP8_SCALES_AREA
from octavo.model.kernels.unpacked import UnpackedLinear

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest number of this type: above it lies NaN."""
MULTIPLE = 16
"""Both sides of a matrix must be multiples of this."""
_SMALLEST_SCALE = 2.0**-100
"""A row of zeros has a scale too."""


class Fp8Scratch:
    """Where activations are rounded to: two areas of the arena, which is made after the matrices."""

    arena: ActivationArena | None = None

    def round(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Round x [tokens, width] with `round_rows`; return views of the arena, valid until the next call."""
        if self.arena is None:
            raise RuntimeError("a product of 8-bit floats before there is an arena")
        rounded = self.arena.view(FP8_AREA, x.shape[0]).view(-1)[: x.numel()].view(x.shape)
        scales = self.arena.view(FP8_SCALES_AREA, x.shape[0])
        round_rows(x, rounded, scales)
        return rounded, scales


class Fp8Linear(UnpackedLinear):
    """A Linear of 8-bit floats [out_features, in_features] with float32 scales; a bias stays in bfloat16."""

    def __init__(self, scratch: Fp8Scratch, device: torch.device, shape: tuple[int, int], *, bias: bool) -> None:
        super().__init__(shape, FP8, torch.bfloat16 if bias else None, device)
        self._scratch = scratch
        self._scales = torch.empty(1, self.out_features, dtype=torch.float32, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of the stored weight, scales and bias."""
        return super().nbytes + self._scales.nbytes

    def load(self, first_row: int, weight: Tensor) -> None:
        """Store weight [rows, in_features], any float dtype, at rows first_row .. of W, each with its own scale.

        What is in 8 bits already is kept as it is, and has scales of its own: see load_scales.
        """
        rows = slice(first_row, first_row + weight.shape[0])
        if weight.dtype == FP8:
            self._weight[rows].copy_(weight)
            return
        round_rows(weight.to(self._weight.device), self._weight[rows], self._scales[0, rows, None])

    def load_scales(self, first_row: int, scales: Tensor) -> None:
        """Store the scales [rows] of rows first_row .. that were in 8 bits."""
        self._scales[0, first_row : first_row + scales.shape[0]].copy_(scales)

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """Compute out, bfloat16 [tokens, out_features] and contiguous, from x [tokens, in_features]."""
        rounded, scales = self._scratch.round(x)
        multiply(rounded, self._weight.T, scales, self._scales, self._bias, out)

    def gather(self, rows: Tensor, out: Tensor) -> None:
        """Copy rows of W to out. ValueError: the embedding is not kept in 8 bits."""
        raise ValueError(f"rows {list(rows.shape)} of a matrix in 8-bit floats cannot be read to {list(out.shape)}")


def round_rows(x: Tensor, rounded: Tensor, scales: Tensor) -> None:
    """Write `rounded` = x / scales, where each row's largest number becomes the largest of 8 bits.

    x and rounded: [rows, columns]; scales: float32 [rows, 1]. A quotient q is off by 2^-4 |q| at most, or by 2^-10
    below 2^-6. Makes no tensor: the quotients are rounded as they are stored.
    """
    torch.linalg.vector_norm(x, math.inf, dim=1, keepdim=True, dtype=torch.float32, out=scales)
    scales.div_(LARGEST).clamp_(min=_SMALLEST_SCALE)
    torch.div(x, scales, out=rounded)


def multiply(
    x: Tensor, weight: Tensor, x_scales: Tensor, weight_scales: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    """Write x_scales (x W) weight_scales + bias to out. 8-bit x [tokens, K]; W [K, N], column after column.

    x_scales: [tokens, 1]; weight_scales: [1, N]. Every sum is one of float32 (no fast accumulation).
    """
    torch._scaled_mm(  # noqa: SLF001  its public name takes no `out`
        x, weight, scale_a=x_scales, scale_b=weight_scales, bias=bias, out_dtype=out.dtype, out=out
    )
