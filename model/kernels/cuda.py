"""The dense operations on an NVIDIA GPU: products by cuBLAS through torch, everything else by FlashInfer.

All sums are made in float32 and rounded once. Which order cuBLAS adds in depends on the number of rows, so a row's bits
are those of its step, not of the row alone.
"""

from typing import Any

import torch
from torch import Tensor

from octavo.model.flashinfer_library import load_flashinfer
from octavo.model.kernels import FP8_KIND
from octavo.model.kernels.fp8 import Fp8Linear, Fp8Scratch
from octavo.model.kernels.unpacked import UnpackedLinear

DTYPES = (torch.bfloat16, torch.float16)


class CudaLinear(UnpackedLinear):
    """A Linear that is multiplied by cuBLAS."""

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """Compute out [tokens, out_features], of x's dtype or float32, from x [tokens, in_features]."""
        multiply(x, self._weight, self._bias, out)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write x W^T + b to out, which may be float32 where x is not: then the sums are not rounded."""
    if out.dtype != x.dtype:
        torch.mm(x, weight.T, out_dtype=out.dtype, out=out)
        if bias is not None:
            out.add_(bias)
    elif bias is None:
        torch.mm(x, weight.T, out=out)
    else:
        torch.addmm(bias, x, weight.T, out=out)


class CudaKernels:
    """The Kernels protocol on one GPU, in bfloat16 or float16; with fp8, the blocks' matrices in 8-bit floats."""

    name = "flashinfer"
    row_multiple = 1
    panels = False
    gate_in_place = False
    threads = 0
    """Of the host."""

    def __init__(self, dtype: torch.dtype, device: torch.device, *, fp8: bool = False) -> None:
        """Raises ValueError for another dtype, and DeviceError without FlashInfer."""
        if dtype not in DTYPES:
            raise ValueError(f"the GPU kernels compute in bfloat16 or float16, not in {dtype}")
        self.dtype = dtype
        self.fp8 = Fp8Scratch() if fp8 else None
        self._device = device
        self._library: Any = load_flashinfer()

    def linear(
        self, out_features: int, in_features: int, *, bias: bool = False, quantised: str = ""
    ) -> CudaLinear | Fp8Linear:
        """Make a Linear with uninitialised weights. ValueError for quantised blocks: they must be widened."""
        if quantised == FP8_KIND and self.fp8 is not None:
            return Fp8Linear(self.fp8, self._device, (out_features, in_features), bias=bias)
        if quantised:
            raise ValueError(f"the GPU kernels do not multiply with {quantised} blocks")
        return CudaLinear((out_features, in_features), self.dtype, self.dtype if bias else None, self._device)

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float, out: Tensor, branch: Tensor | None = None) -> None:
        """Write x / sqrt(mean(x^2) + epsilon) * weight to out, rounded once, after the product with weight.

        With a branch, x += branch, and the norm is that of the sum before it is rounded.
        """
        if branch is None:
            self._library.rmsnorm(input=x, weight=weight, eps=epsilon, out=out)
            return
        if out.data_ptr() != branch.data_ptr():
            out.copy_(branch)
        self._library.fused_add_rmsnorm(input=out, residual=x, weight=weight, eps=epsilon)

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
        """Apply RoPE in place, from the float32 table: FlashInfer's own sines lose accuracy at large positions."""
        self._library.apply_rope_with_cos_sin_cache_inplace(
            positions=positions, query=q, key=k, head_size=q.shape[-1], cos_sin_cache=cos_sin, is_neox=True
        )

    def silu_mul(self, gate_up: Tensor, out: Tensor | None = None) -> Tensor:
        """Write SiLU(gate) * up to out [tokens, width], contiguous and apart from gate_up; return out."""
        if out is None or not out.is_contiguous():
            raise ValueError("out: FlashInfer writes SiLU(gate) * up to contiguous memory of its own")
        self._library.silu_and_mul(input=gate_up, out=out)
        return out
