"""The operator seam: the dense operations of a block, which differ from device to device.

On a CPU they come from a small C++ library (`native`), or from torch where there is no compiler (`fallback`). Both are
batch-invariant: a row of the result has the same bits whatever other rows are computed. On a GPU (`cuda`) it has not.
This package imports no torch at run time, so that sizes can be planned without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from octavo.model.kernels.fp8 import Fp8Scratch

FP8_KIND = "fp8"
"""The `quantised` of a Linear in 8-bit floats, with kernels that have `fp8`: rounded while it is loaded."""


class Linear(Protocol):
    """y = x W^T + b, with W: [out_features, in_features] kept in whatever order the kernel likes.

    Weights arrive slice by slice while a checkpoint is read, and are stored once.
    """

    out_features: int
    in_features: int

    @property
    def nbytes(self) -> int:
        """Bytes of the stored weight and bias."""
        ...

    @property
    def scratch_nbytes(self) -> int:
        """Bytes that each thread keeps to multiply with it: 0, or of one expanded panel of quantised weights."""
        ...

    def load(self, first_row: int, weight: Tensor) -> None:
        """Store weight [rows, in_features], any float dtype, at rows first_row .. of W, converting and packing.

        A quantised Linear takes uint8 [rows, bytes of a row]: blocks as they lie in a GGUF file.
        """
        ...

    def load_bias(self, first_row: int, bias: Tensor) -> None:
        """Store bias [rows] at rows first_row .. ; only for a Linear that was made with a bias."""
        ...

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """Compute out [tokens, out_features] from x [tokens, in_features]; both may be views with a row stride.

        out may be float32 where x is bfloat16 (the LM head): then the sums are not rounded.
        """
        ...

    def gather(self, rows: Tensor, out: Tensor) -> None:
        """Copy rows of W (int32 ids, [tokens]) to out [tokens, in_features]: the embedding of a tied model."""
        ...


@runtime_checkable
class GatedLinear(Protocol):
    """A Linear that can gate what it multiplies, while it is still in the cache."""

    def gated(self, x: Tensor, out: Tensor) -> Tensor:
        """Compute out [tokens, 2 * width] from x and write SiLU(gate) * up over the gate half; return that."""
        ...


class Kernels(Protocol):
    """One device's dense operations. Activations are of one dtype; sums are made in float32."""

    name: str
    """The code path, for example "amx_bf16", "avx512_bf16", "avx2", "torch"."""
    dtype: torch.dtype
    """Of activations."""
    row_multiple: int
    """Token counts passed to these kernels must be multiples of this (1: any); the runner pads with idle rows."""
    panels: bool
    """Whether weights are kept in padded panels (see packing.py), in quantised blocks too, or as they are."""
    gate_in_place: bool
    """Whether SiLU(gate) * up may overwrite the gate; otherwise the arena has an area for it."""
    threads: int
    """How many threads compute."""

    @property
    def fp8(self) -> Fp8Scratch | None:
        """Where activations are rounded to, if the blocks' matrices are kept in 8-bit floats; else None."""
        ...

    def linear(self, out_features: int, in_features: int, *, bias: bool = False, quantised: str = "") -> Linear:
        """Make a Linear with uninitialised weights.

        quantised: a key of packing.QUANTISED, with kernels that have `panels`: W is kept in blocks of this type. Its
        numbers, rounded to the activations' dtype, are multiplied as if they had been widened while loading: the
        results have the same bits.
        """
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float, out: Tensor, branch: Tensor | None = None) -> None:
        """Write x / sqrt(mean(x^2) + epsilon) * weight to out (Zhang and Sennrich, 2019), after x += branch if given.

        x and out: [tokens, width] or, for norms per head, [tokens, heads, width], possibly strided views, possibly the
        same tensor; weight: [width]. The normalised value is rounded to x's dtype before the product with weight,
        as in the reference implementation of the Llama family. With a branch all are [tokens, width]; out may be the
        branch.
        """
        ...

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
        """Apply RoPE in place (Su et al., 2021), in the half-split form of Hugging Face checkpoints.

        q: [tokens, heads, head_dim], k: [tokens, kv_heads, head_dim], strided views; positions: int32 [tokens];
        cos_sin: float32 [max_positions, head_dim]: head_dim / 2 cosines, then as many sines.
        """
        ...

    def silu_mul(self, gate_up: Tensor, out: Tensor | None = None) -> Tensor:
        """Write SiLU(gate) * up to out [tokens, width], or over the gate half of gate_up [tokens, 2 * width].

        Returns what it was written to; without `out` that is a view of gate_up. Where `gate_in_place` is false, `out`
        must be given.
        """
        ...
