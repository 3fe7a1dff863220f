"""The operators under test, on every code path that this machine can run, and bounds on their rounding."""

import functools

import torch
from torch import Tensor

from octavo.model.kernels import Kernels, Linear
from octavo.model.kernels.fallback import TorchKernels
from octavo.model.kernels.load import available_paths, open_library
from octavo.model.kernels.native import NativeKernels

DTYPES = (torch.bfloat16, torch.float32)
NATIVE = [(path, dtype) for dtype in DTYPES for path in available_paths(dtype)]
ALL = [*NATIVE, *(("torch", dtype) for dtype in DTYPES)]

ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}
"""Largest relative error of rounding to nearest: half a unit in the last of 8 or 24 bits."""


@functools.cache
def make_kernels(path: str, dtype: torch.dtype) -> Kernels:
    return TorchKernels(dtype) if path == "torch" else NativeKernels(open_library(2), path, dtype)


def make_linear(path: str, weight: Tensor, bias: Tensor | None = None) -> Linear:
    """A Linear that holds `weight` [out_features, in_features], in weight's dtype."""
    linear = make_kernels(path, weight.dtype).linear(*weight.shape, bias=bias is not None)
    linear.load(0, weight)
    if bias is not None:
        linear.load_bias(0, bias)
    return linear


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The exact y in float64, and how far a float32 sum in any order, rounded to out_dtype, may be from it.

    A sum of n terms is off by at most n roundoffs of the sum of their magnitudes (Higham, Accuracy and Stability of
    Numerical Algorithms, section 4.2), and so is one with products that are rounded first, with n + 1.
    """
    exact, magnitude = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    terms = x.shape[1] + 1
    if bias is not None:
        exact, magnitude, terms = exact + bias.double(), magnitude + bias.double().abs(), terms + 1
    error = terms * 2.0**-24 * magnitude
    return exact, error + ROUNDOFF[out_dtype] * (exact.abs() + error)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether all elements are equal, NaNs of the same bits included."""
    words = {2: torch.int16, 4: torch.int32}[one.element_size()]
    return one.shape == other.shape and torch.equal(
        one.contiguous().view(words), other.to(one.dtype).contiguous().view(words)
    )
