"""Kernels and attention that check shapes and write nothing but their outputs: for tensors without memory."""

from typing import Any

import torch
from torch import Tensor


class ShapeLinear:
    def __init__(self, out_features: int, in_features: int, dtype: torch.dtype, *, bias: bool) -> None:
        self.out_features, self.in_features = out_features, in_features
        self.nbytes = (out_features * in_features + bias * out_features) * dtype.itemsize

    def __call__(self, x: Tensor, out: Tensor) -> None:
        assert x.shape[1] == self.in_features
        assert out.shape == (x.shape[0], self.out_features)
        out.zero_()

    def gather(self, rows: Tensor, out: Tensor) -> None:
        assert out.shape == (rows.shape[0], self.in_features)
        out.zero_()


class ShapeKernels:
    name = "shapes"
    row_multiple = 8
    panels = False
    gate_in_place = True
    fp8 = None

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def linear(self, out_features: int, in_features: int, *, bias: bool = False, quantised: str = "") -> Any:
        return ShapeLinear(out_features, in_features, self.dtype, bias=bias)

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float, out: Tensor, branch: Tensor | None = None) -> None:
        if branch is not None:
            x.add_(branch)
        torch.mul(x, weight, out=out)

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
        assert q.shape[0] == k.shape[0] == positions.shape[0]
        q.neg_()
        k.neg_()

    def silu_mul(self, gate_up: Tensor, out: Tensor | None = None) -> Tensor:
        assert out is None
        width = gate_up.shape[1] // 2
        return gate_up[:, :width].mul_(gate_up[:, width:])


class ShapeAttention:
    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        assert q.shape == out.shape
        assert k.shape == v.shape
        out.copy_(q)
