"""FlashInfer's own Python on CPU tensors, with nothing but its compiled modules replaced.

Its wrapper classes, argument checks and dispatch run as they are installed; what would be CUDA code is torch, and
refuses what the CUDA code would misread: outputs that are not contiguous, indices that are not int32, K and V of
unequal strides.
"""

import contextlib
import importlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from octavo.model.flashinfer_library import load_flashinfer
from octavo.model.kernels.fp8 import multiply as multiply_fp8

HOPPER = (9, 0)
MULTIPROCESSORS = 132
CAUSAL = 1
NHD = 0
FLOAT_WORKSPACE = 24 << 20
"""What the emulated planner asks for, whatever the batch."""
PLAN_TAIL = {"0.7.4": 5, "0.7.2.post1": 4}
"""Arguments of a plan that only fa2 takes, by version."""


@dataclass
class Calls:
    """What the emulated modules were asked to do."""

    plans: list[tuple[str, int, int]] = field(default_factory=list)
    """Attention path, rows and query tokens of each plan."""
    runs: list[tuple[str, int]] = field(default_factory=list)
    """Attention path and query tokens of each run."""
    addresses: list[tuple[int, ...]] = field(default_factory=list)
    """Of every tensor that a run was given."""
    kernels: list[str] = field(default_factory=list)


def require(condition: bool, what: str) -> None:
    if not condition:
        raise RuntimeError(f"the compiled module would refuse or misread this: {what}")


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, window_left: int) -> Tensor:
    """Causal attention of the last queries of a row: q [tokens, heads, head_dim], k and v [positions, kv_heads, …].

    The same operations as the reference backend's, so that equal inputs give equal bits.
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.float().repeat_interleave(group, dim=1), v.float().repeat_interleave(group, dim=1)
    scores = torch.einsum("thd,phd->htp", q.float(), k) * scale
    own = torch.arange(k.shape[0] - q.shape[0], k.shape[0])[:, None]
    position = torch.arange(k.shape[0])
    visible = position <= own
    if window_left >= 0:
        visible &= position >= own - window_left
    return torch.einsum("htp,phd->thd", scores.masked_fill(~visible, float("-inf")).softmax(dim=-1), v)


def gather(pages: Tensor, table: Tensor, length: int) -> Tensor:
    """The first positions of a row: [length, kv_heads, head_dim]."""
    return pages[table.long()].flatten(0, 1)[:length]


class Emulation:
    """The modules that FlashInfer would compile or load."""

    def __init__(self, version: str) -> None:
        self.calls = Calls()
        self._wide: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        """Weights in float32, by address and version; each is kept, so that its address stays its own."""
        self._tail = PLAN_TAIL[version]

    def prefill_module(self, path: str, *arguments: Any) -> SimpleNamespace:
        """What decode and prefill wrappers load: one kernel serves both."""
        query, cache, output, index = arguments[:4]
        require(path in ("fa2", "fa3"), f"no path {path}")
        require(query == output and cache in (query, torch.float8_e4m3fn), "dtypes of q, cache and output")
        require(path == "fa2" or cache == query, "fa3 takes a cache of 8 bits for queries of 8 bits only")
        require(index == torch.int32, f"indices are {index}: another module would be compiled for them")

        def plan(floats: Tensor, ints: Tensor, staging: Tensor, *rest: Any) -> list[int]:
            require(ints.numel() == staging.numel(), "the pinned buffer is not as large as the schedule")
            return self._plan(path, *rest)

        def workspace_size(floats: Tensor, *rest: Any) -> tuple[int, int]:
            self._plan(path, *rest)
            return FLOAT_WORKSPACE, 8192

        def paged_run(floats: Tensor, ints: Tensor, plan_info: list[int], *rest: Any) -> None:
            self._paged_run(path, plan_info, *rest)

        return SimpleNamespace(plan=plan, workspace_size=workspace_size, paged_run=paged_run, ragged_run=None)

    def _plan(self, path: str, qo: Tensor, pages: Tensor, lengths: Tensor, tokens: int, rows: int, *rest: Any) -> Any:
        heads, kv_heads, page, _graph, head_dim, value_dim, _causal, _window, *tail = rest
        require(len(tail) == (self._tail if path == "fa2" else 0), f"{len(tail)} arguments at the end")
        require(heads % kv_heads == 0 and head_dim == value_dim, "shapes")
        for name, values, count in (("qo", qo, rows + 1), ("pages", pages, rows + 1), ("lengths", lengths, rows)):
            require(values.is_cpu and values.dtype == torch.int32 and values.numel() == count, name)
        require(int(qo[-1]) == tokens and bool((lengths >= qo.diff()).all()), "more queries than positions")
        require(bool((pages.diff() == (lengths + page - 1) // page).all()), "pages do not match the lengths")
        self.calls.plans.append((path, rows, tokens))
        return [rows, tokens]

    def _paged_run(self, path: str, plan_info: list[int], *rest: Any) -> None:
        q, keys, values, qo, pages, indices, last, out, _lse, mask, layout, window, _pdl, *more = rest
        # fa2 and fa3 pass different numbers of optional tensors; the soft cap and the scale follow the last of them.
        scale = next(value for value in more if isinstance(value, float) and value > 0)
        require(layout == NHD and keys.stride() == values.stride(), "K and V must lie alike, as NHD")
        require(q.dtype == out.dtype and keys.dtype == values.dtype, "dtypes differ")
        require(out.is_contiguous() and q.stride(2) == 1, "the output has no strides, a head no gaps")
        require(all(x.dtype == torch.int32 for x in (qo, pages, indices, last)), "int32")
        require(plan_info == [last.numel(), q.shape[0]], "planned for another batch")
        for row in range(last.numel()):
            first, end = int(qo[row]), int(qo[row + 1])
            table = indices[int(pages[row]) : int(pages[row + 1])]
            require(1 <= int(last[row]) <= keys.shape[1] and len(table) > 0, "last_page_len")
            require(int(table.max()) < keys.shape[0] and int(table.min()) >= 0, "a page outside the cache")
            length = (len(table) - 1) * keys.shape[1] + int(last[row])
            require(mask == CAUSAL or end - first == 1, "several queries and no causal mask")
            result = attend(q[first:end], gather(keys, table, length), gather(values, table, length), scale, window)
            out[first:end] = result.to(out.dtype)
        self.calls.runs.append((path, q.shape[0]))
        used = (q, keys, values, qo, pages, indices, last, out)
        self.calls.addresses.append(tuple(tensor.data_ptr() for tensor in used))

    def xqa_module(self, *arguments: Any) -> SimpleNamespace:
        query, cache, page, _head_dim, _group, _sliding, output, tokens, _ragged = arguments
        require(query == cache == output and tokens == 1 and page in (16, 32, 64, 128), "shapes of XQA")
        return SimpleNamespace(xqa=self._xqa)

    def _xqa(self, _fp8: bool, processors: int, kv_heads: int, window: int, q_scale: float, out: Tensor, *rest: Any):
        _rcp, q, _sinks, keys, values, _ksf, _vsf, table, longest, lengths, rows, kv_scale, semaphores, *_ = rest
        require(processors == MULTIPROCESSORS and kv_scale == 1.0, "scales")
        require(q.is_contiguous() and out.is_contiguous(), "XQA knows no strides of q and out")
        require(table.dtype == lengths.dtype == torch.int32 and table.is_contiguous(), "int32 tables")
        require(longest == table.shape[1] * keys.shape[1] and not semaphores.any(), "semaphores must be zero")
        scale = q_scale * q.shape[-1] ** -0.5
        for row in range(rows):
            length = int(lengths[row, 0])
            require(1 <= length <= longest, "a length outside the table")
            k, v = gather(keys, table[row], length), gather(values, table[row], length)
            out[row] = attend(q[row], k, v, scale, window - 1 if window else -1).to(out.dtype)
        self.calls.runs.append(("xqa", rows))
        self.calls.addresses.append(tuple(x.data_ptr() for x in (q, keys, values, table, lengths, out)))

    def norm_module(self) -> SimpleNamespace:
        return SimpleNamespace(rmsnorm=self._rmsnorm, fused_add_rmsnorm=self._fused_add_rmsnorm)

    def _rmsnorm(self, out: Tensor, x: Tensor, weight: Tensor, epsilon: float, _pdl: bool) -> None:
        require(x.dim() in (2, 3) and out.shape == x.shape and x.shape[-1] == weight.shape[0], "shapes of rmsnorm")
        require(x.dtype == weight.dtype == out.dtype and x.stride(-1) == out.stride(-1) == 1, "rmsnorm")
        out.copy_(_normed(x.float(), weight, epsilon))
        self.calls.kernels.append("rmsnorm")

    def _fused_add_rmsnorm(self, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, _pdl: bool) -> None:
        require(x.shape == residual.shape and x.dim() == 2 and x.dtype == residual.dtype == weight.dtype, "shapes")
        require(x.data_ptr() != residual.data_ptr(), "x and residual are one tensor")
        total = x.float() + residual.float()
        residual.copy_(total)
        x.copy_(_normed(total, weight, epsilon))
        self.calls.kernels.append("fused_add_rmsnorm")

    def rope_module(self) -> SimpleNamespace:
        return SimpleNamespace(apply_rope_pos_ids_cos_sin_cache=self._rope)

    def _rope(
        self, q: Tensor, k: Tensor, q_out: Tensor, k_out: Tensor, table: Tensor, at: Tensor, turned: bool
    ) -> None:
        require(table.dtype == torch.float32 and table.is_contiguous() and at.is_contiguous(), "the table of RoPE")
        require(not turned and at.dtype in (torch.int32, torch.int64), "positions")
        require(int(at.max()) < table.shape[0] and int(at.min()) >= 0, "a position outside the table")
        cosines, sines = table[at.long()].unsqueeze(1).chunk(2, dim=-1)
        for heads, out in ((q, q_out), (k, k_out)):
            require(heads.shape[2] == table.shape[1] and heads.stride(2) == 1, "heads")
            low, high = heads.float().chunk(2, dim=-1)
            out.copy_(torch.cat((low * cosines - high * sines, high * cosines + low * sines), dim=-1))
        self.calls.kernels.append("rope")

    def activation_module(self, name: str) -> SimpleNamespace:
        require(name == "silu", name)
        return SimpleNamespace(silu_and_mul=self._silu_and_mul)

    def _silu_and_mul(self, out: Tensor, gate_up: Tensor, _pdl: bool) -> None:
        require(out.is_contiguous() and gate_up.is_contiguous(), "silu_and_mul knows no strides")
        inside = gate_up.data_ptr() <= out.data_ptr() < gate_up.data_ptr() + gate_up.nbytes
        require(not inside, "silu_and_mul would overwrite what it has not read")
        gate, up = gate_up.float().chunk(2, dim=-1)
        out.copy_(gate / (1 + torch.exp(-gate)) * up)
        self.calls.kernels.append("silu_and_mul")

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """cuBLAS: float32 sums, rounded once. Eight rows at a time, so that a row's bits depend on the row alone."""
        require(x.dtype == weight.dtype and out.dtype in (x.dtype, torch.float32), "dtypes of a product")
        key = (weight.data_ptr(), weight._version)
        if key not in self._wide:
            self._wide[key] = weight, weight.float().T
        wide = self._wide[key][1]
        for first in range(0, x.shape[0], 8):
            rows = x[first : first + 8].float()
            product = torch.cat((rows, rows.new_zeros(8 - len(rows), rows.shape[1]))) @ wide
            out[first : first + 8] = product[: len(rows)] + (0 if bias is None else bias.float())
        self.calls.kernels.append("multiply")

    def multiply_fp8(self, x: Tensor, weight: Tensor, x_scales: Tensor, weight_scales: Tensor, bias: Any, out: Tensor):
        """torch's own product, once everything is as its row-wise kernels on a GPU demand it."""
        tokens, (inputs, outputs) = x.shape[0], weight.shape
        require(x.dtype == weight.dtype == torch.float8_e4m3fn and out.dtype == torch.bfloat16, "dtypes")
        require(x.is_contiguous() and weight.T.is_contiguous() and out.is_contiguous(), "x by rows, W by columns")
        require(inputs % 16 == 0 and outputs % 16 == 0, "sides that 16 does not divide")
        require(x_scales.shape == (tokens, 1) and weight_scales.shape == (1, outputs), "one scale a row and column")
        require(x_scales.dtype == weight_scales.dtype == torch.float32, "scales in float32")
        require(x_scales.is_contiguous() and weight_scales.is_contiguous(), "scales without gaps")
        require(bias is None or bias.dtype == torch.bfloat16, "a bias of the result's dtype")
        multiply_fp8(x, weight, x_scales, weight_scales, bias, out)
        self.calls.kernels.append("multiply_fp8")


def _normed(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight.float()


@contextlib.contextmanager
def emulated_flashinfer() -> Iterator[Emulation]:
    """Let the installed FlashInfer compute on the CPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library = load_flashinfer()
        names = ("activation", "decode", "norm", "prefill", "rope", "utils", "xqa")
        activation, decode, norm, prefill, rope, utils, xqa = (
            importlib.import_module(f"flashinfer.{name}") for name in names
        )
    emulation = Emulation(library.__version__)
    empty = torch.empty

    def unpinned(*shape: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        return empty(*shape, **options)

    replaced = [
        (prefill, "get_batch_prefill_module", emulation.prefill_module),
        (decode, "get_batch_prefill_module", emulation.prefill_module),
        (xqa, "get_xqa_module", emulation.xqa_module),
        (norm, "get_norm_module", emulation.norm_module),
        (rope, "get_rope_module", emulation.rope_module),
        (activation, "get_act_and_mul_module", emulation.activation_module),
        *((module, "get_compute_capability", lambda _device: HOPPER) for module in (decode, prefill, xqa, utils)),
        *((module, "get_device_sm_count", lambda _device: MULTIPROCESSORS) for module in (decode, prefill, xqa)),
        (torch, "empty", unpinned),
    ]
    with contextlib.ExitStack() as stack:
        for module, name, replacement in replaced:
            stack.enter_context(mock.patch.object(module, name, replacement))
        stack.enter_context(mock.patch("octavo.model.kernels.cuda.multiply", emulation.multiply))
        stack.enter_context(mock.patch("octavo.model.kernels.fp8.multiply", emulation.multiply_fp8))
        yield emulation
