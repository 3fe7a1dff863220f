"""The same operators in plain torch, where the C++ library cannot be built: slower, and with temporary tensors."""

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.model.kernels.unpacked import UnpackedLinear

HEAD_COLUMNS = 1024
"""Columns of float32 results that are computed at once from bfloat16, which bounds the temporary copy of W."""


class TorchLinear(UnpackedLinear):
    """A Linear in torch's own order, [out_features, in_features].

    The libraries behind torch choose their order of additions by the number of rows, and each in its own way. Here they
    are always given `row_multiple` rows at once, so that a row's bits do not depend on how many there are.
    """

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, row_multiple: int, *, bias: bool) -> None:
        """Tensors are made on torch's default device."""
        super().__init__(shape, dtype, dtype if bias else None, None)
        self._row_multiple = row_multiple

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """Compute out [tokens, out_features], of x's dtype or float32, from x [tokens, in_features]."""
        if x.shape[0] % self._row_multiple or out.shape != (x.shape[0], self.out_features):
            raise ValueError(
                f"out: expected [rows, {self.out_features}] and as many rows as x, a multiple of {self._row_multiple}; "
                f"got {list(out.shape)} and {x.shape[0]} rows of x"
            )
        if out.dtype == x.dtype:
            self._multiply(x, self._weight, self._bias, out)
            return
        if out.dtype != torch.float32:
            raise ValueError(f"out: expected {x.dtype} or torch.float32, got {out.dtype}")
        wide = x.float()
        for first in range(0, self.out_features, HEAD_COLUMNS):
            part = slice(first, first + HEAD_COLUMNS)
            bias = None if self._bias is None else self._bias[part].float()
            self._multiply(wide, self._weight[part].float(), bias, out[:, part])

    def _multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        for first in range(0, x.shape[0], self._row_multiple):
            rows = slice(first, first + self._row_multiple)
            if bias is None:
                torch.mm(x[rows], weight.T, out=out[rows])
            else:
                torch.addmm(bias, x[rows], weight.T, out=out[rows])

    def gather(self, rows: Tensor, out: Tensor) -> None:
        """Copy rows of W (int32 ids, [tokens]) to out [tokens, in_features]."""
        if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < self.out_features:
            raise ValueError(f"rows: ids must be 0 .. {self.out_features - 1}")
        super().gather(rows, out)


class TorchKernels:
    """The Kernels protocol in plain torch, bfloat16 or float32."""

    name = "torch"
    row_multiple = 8
    panels = False
    gate_in_place = True
    fp8 = None

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.threads = torch.get_num_threads()

    def linear(self, out_features: int, in_features: int, *, bias: bool = False, quantised: str = "") -> TorchLinear:
        """Make a Linear with uninitialised weights. ValueError for quantised ones: they must be widened."""
        if quantised:
            raise ValueError(f"torch's kernels do not multiply with {quantised} blocks")
        return TorchLinear((out_features, in_features), self.dtype, self.row_multiple, bias=bias)

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float, out: Tensor, branch: Tensor | None = None) -> None:
        """Add branch to x if it is given, then write x / sqrt(mean(x^2) + epsilon) * weight to out; see Kernels."""
        if branch is not None:
            x.add_(branch)
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
        torch.mul((wide * scale).to(x.dtype), weight, out=out)

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
        """Apply RoPE in place to q [tokens, heads, head_dim] and k [tokens, kv_heads, head_dim]."""
        cosines, sines = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
        for heads in (q, k):
            low, high = heads.float().chunk(2, dim=-1)
            heads.copy_(torch.cat((low * cosines - high * sines, high * cosines + low * sines), dim=-1))

    def silu_mul(self, gate_up: Tensor, out: Tensor | None = None) -> Tensor:
        """Write SiLU(gate) * up to out, or over the gate half of gate_up [tokens, 2 * width]; return that."""
        gate, up = gate_up.chunk(2, dim=-1)
        return (gate if out is None else out).copy_(F.silu(gate.float()) * up)
