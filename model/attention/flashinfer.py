"""Attention on a GPU with FlashInfer's paged kernels.

A block is one page: [block_size, kv_heads, head_dim], K and V apart ("NHD"). Rows of one token go through the decode
wrapper, the rest of a mixed step through the prefill wrapper, whose query tiles would be wasted on single tokens. What
the host decides for a step is planned once, from host memory, so that planning waits for nothing on the device.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.kvcache.layout import SCALES
from octavo.kvcache.store import KVStore
from octavo.model.attention import AttentionBatch
from octavo.model.config import ModelConfig
from octavo.model.device import Fence, to_device
from octavo.model.flashinfer_library import load_flashinfer
from octavo.model.kernels.fp8 import FP8, LARGEST
from octavo.model.memory import RunnerLimits
from octavo.model.workspaces import FLOAT_WORKSPACE, INT_WORKSPACE, PREFILL_LENGTHS, XQA_WORKSPACE, Workspaces

HEAD_DIMS = (64, 128, 256)
XQA_BLOCK_SIZES = (16, 32, 64, 128)
DTYPES = (torch.bfloat16, torch.float16)

Cache = tuple[Tensor, Tensor]
"""K and V of one layer: [blocks, block_size, kv_heads, head_dim]."""
Scales = Mapping[str, float]
"""SCALES of one layer, by which what the cache holds is multiplied; or none."""
Run = Callable[[Tensor, Cache, Tensor, Scales], None]
"""Attend from queries [rows, heads, head_dim] to one layer's K and V, into an output of the same shape."""


@dataclass(slots=True)
class _Wrapper:
    """A FlashInfer wrapper, and when its pinned buffers may be written again."""

    wrapper: Any
    fence: Fence


class FlashInferAttention:
    """Paged attention over one KV store on one GPU.

    bfloat16 and float16; head_dim 64, 128 or 256. A store of 8-bit floats keeps K and V rounded to nearest, and the
    largest number for what lies beyond it; fa2 widens them as it reads. Where the store has scales, what is rounded is
    the quotient, a number of dtype. The store has one block more than the pool: its last is read and written by padded
    rows. Which order a row's K and V are added in depends on the rows beside it, so its last bits do.
    """

    def __init__(
        self, config: ModelConfig, store: KVStore, workspaces: Workspaces, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        """Attend with queries and outputs of dtype, to a store of the same, or of 8-bit floats as `workspaces` say.

        Raises ValueError for what the kernels do not know, and DeviceError without FlashInfer.
        """
        validate(store.layout.head_dim, store.layout.block_size, dtype, workspaces)
        if store.data.dtype != (FP8 if workspaces.fp8_cache else dtype):
            raise ValueError(f"a cache of {store.data.dtype} beside queries of {dtype}")
        layout = store.layout
        self._library: Any = load_flashinfer()
        self._workspaces = workspaces
        self._device, self._dtype, self._cache_dtype = store.data.device, dtype, store.data.dtype
        self._heads, self._kv_heads, self._head_dim = config.heads, config.kv_heads, layout.head_dim
        self._block_size = layout.block_size
        self._shapes = _shapes(config, layout.block_size, dtype, store.data.dtype)
        pages = (store.blocks, layout.block_size, layout.kv_heads, layout.head_dim)
        self._layers = [(store.keys(i).view(pages), store.values(i).view(pages)) for i in range(layout.layers)]
        self._scales = store.scales
        self._padding_block = store.blocks - 1
        self._parts: list[tuple[slice, Run]] | None = None
        self._tokens = 0

    def reserve(self, max_rows: int, max_tokens: int, max_blocks: int) -> int:
        """Allocate all that steps work in; see AttentionBackend."""

        def int32(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=self._device)

        def scratch(nbytes: int) -> Tensor:
            return torch.zeros(nbytes, dtype=torch.uint8, device=self._device)

        self._table_width = max_blocks // max_rows
        self._slots = torch.zeros(max_tokens, dtype=torch.int64, device=self._device)
        self._indptr, self._last, self._indices = int32(max_rows + 1), int32(max_rows), int32(max_blocks)
        self._float_workspace = scratch(self._workspaces.float_bytes)
        self._decode_schedule, prefill_schedule = scratch(INT_WORKSPACE), scratch(INT_WORKSPACE)
        self._decode = self._decode_wrapper(None)
        self._replayed: dict[int, _Wrapper] = {}
        self._prefill = _Wrapper(
            self._library.BatchPrefillWithPagedKVCacheWrapper(
                self._float_workspace, kv_layout="NHD", backend=self._workspaces.prefill
            ),
            Fence(self._device),
        )
        self._prefill.wrapper.reset_workspace_buffer(self._float_workspace, prefill_schedule)
        held = [self._slots, self._indptr, self._last, self._indices, self._float_workspace]
        held += [self._decode_schedule, prefill_schedule]
        if self._workspaces.fp8_cache:
            shape = (max_tokens, self._kv_heads, self._head_dim)
            self._clamped = torch.zeros(shape, dtype=self._dtype, device=self._device)
            self._rounded = torch.zeros(shape, dtype=FP8, device=self._device)
            held += [self._clamped, self._rounded]
        if self._workspaces.decode == "xqa":
            self._xqa_workspace = scratch(XQA_WORKSPACE)
            self._table, self._lengths = int32(max_rows, self._table_width), int32(max_rows)
            queries = (max_rows, self._heads, self._head_dim)
            self._queries = torch.zeros(queries, dtype=self._dtype, device=self._device)
            held += [self._xqa_workspace, self._table, self._lengths, self._queries]
        return sum(tensor.nbytes for tensor in held) + PREFILL_LENGTHS

    def _decode_wrapper(self, rows: int | None) -> _Wrapper:
        """A wrapper for single tokens; with a number of rows, one that is captured and replayed with so many."""
        fixed = rows is not None and {
            "use_cuda_graph": True,
            "paged_kv_indptr_buffer": self._indptr[: rows + 1],
            "paged_kv_indices_buffer": self._indices,
            "paged_kv_last_page_len_buffer": self._last[:rows],
        }
        wrapper = self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._float_workspace, kv_layout="NHD", use_tensor_cores=True, backend="fa2", **(fixed or {})
        )
        # One schedule for all of them: a step runs one, and the next step's is copied behind it.
        wrapper.reset_workspace_buffer(self._float_workspace, self._decode_schedule)
        return _Wrapper(wrapper, Fence(self._device))

    def plan(self, batch: AttentionBatch, *, padded_rows: int | None = None) -> None:
        """Plan the step's rows; see AttentionBackend. Raises ValueError for tensors that are not int32 on the host."""
        _validate_batch(batch)
        if padded_rows is not None:
            batch = self._padded(batch, padded_rows)
        self._tokens = batch.tokens
        self._slots[: batch.tokens].copy_(to_device(batch.slots.numpy().astype(np.int64), self._device))
        singles = int((batch.query_indptr.diff() == 1).long().cumprod(0).sum())
        if padded_rows is not None and singles != batch.rows:
            raise ValueError("only rows of one token can be padded to a captured step")
        self._parts = []
        if singles:
            self._parts.append((slice(0, singles), self._plan_decode(self._part(batch, 0, singles), padded_rows)))
        if singles < batch.rows:
            rest = self._part(batch, singles, batch.rows)
            self._parts.append((slice(singles, batch.tokens), self._plan_prefill(rest)))

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Append, then attend; see AttentionBackend. Rows of `out` beyond the batch become zero."""
        if self._parts is None:
            raise RuntimeError("forward without a plan")
        for tensor in (q, k, v, out):
            # The kernels reinterpret memory: a tensor of another dtype would become noise, not an error.
            if tensor.dtype != self._dtype or tensor.device != self._device or tensor.shape[0] < self._tokens:
                raise ValueError(f"expected {self._dtype} on {self._device} with {self._tokens} tokens or more")
        cache, scales = self._layers[layer], self._scales[layer]
        for pages, new, name in zip(cache, (k, v), SCALES, strict=True):
            self._append(pages.flatten(0, 1), new[: self._tokens], scales.get(name, 1.0))
        # The kernels know no row stride of their output.
        target = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
        for tokens, run in self._parts:
            run(q[tokens], cache, target[tokens], scales)
        if self._tokens < out.shape[0]:
            target[self._tokens :].zero_()
        if target is not out:
            out.copy_(target)

    def _append(self, positions: Tensor, new: Tensor, scale: float) -> None:
        """Write K or V of the step's tokens to their slots among all positions of the cache."""
        slots = self._slots[: self._tokens]
        if self._cache_dtype == FP8:
            # Beyond the largest number lies NaN, so it is clamped first. The copy is one of bytes.
            rounded = self._rounded[: self._tokens]
            bound, clamped = LARGEST * scale, self._clamped[: self._tokens]
            torch.clamp(new, -bound, bound, out=clamped)
            rounded.copy_(clamped if scale == 1 else clamped.div_(scale))
            positions, new = positions.view(torch.uint8), rounded.view(torch.uint8)
        positions.index_copy_(0, slots, new)

    def _padded(self, batch: AttentionBatch, rows: int) -> AttentionBatch:
        """The batch with rows of length 1 in the block of padding: a length of 0 would divide by nothing."""
        missing = rows - batch.rows
        if missing < 0:
            raise ValueError(f"{batch.rows} rows do not fit into a captured step of {rows}")

        def longer(values: Tensor, first: int, step: int) -> Tensor:
            return torch.cat((values, first + step * torch.arange(missing, dtype=torch.int32)))

        return AttentionBatch(
            query_indptr=longer(batch.query_indptr, batch.rows + 1, 1),
            kv_lengths=longer(batch.kv_lengths, 1, 0),
            block_indptr=longer(batch.block_indptr, int(batch.block_indptr[-1]) + 1, 1),
            block_indices=longer(batch.block_indices, self._padding_block, 0),
            last_block_len=longer(batch.last_block_len, 1, 0),
            slots=longer(batch.slots, self._padding_block * self._block_size, 0),
        )

    def _part(self, batch: AttentionBatch, first: int, end: int) -> AttentionBatch:
        """Some of the rows, from pinned memory of their own, but for their blocks, which are on the device."""

        def host(values: Tensor) -> Tensor:
            return values.contiguous() if self._device.type == "cpu" else values.contiguous().pin_memory()

        queries, blocks = batch.query_indptr[first : end + 1], batch.block_indptr[first : end + 1]
        indices = batch.block_indices[int(blocks[0]) : int(blocks[-1])]
        return replace(
            batch,
            query_indptr=host(queries - queries[0]),
            kv_lengths=host(batch.kv_lengths[first:end]),
            block_indptr=host(blocks - blocks[0]),
            block_indices=to_device(indices.numpy(), self._device),
            last_block_len=host(batch.last_block_len[first:end]),
            slots=batch.slots[int(queries[0]) : int(queries[-1])],
        )

    def _plan_decode(self, part: AttentionBatch, padded_rows: int | None) -> Run:
        if self._workspaces.decode == "xqa":
            return self._plan_xqa(part)
        chosen = self._decode
        if padded_rows is not None:
            if padded_rows not in self._replayed:
                self._replayed[padded_rows] = self._decode_wrapper(padded_rows)
            chosen = self._replayed[padded_rows]
        chosen.fence.wait()
        chosen.wrapper.plan(
            indptr=part.block_indptr,
            indices=part.block_indices,
            last_page_len=part.last_block_len,
            head_dim=self._head_dim,
            seq_lens=part.kv_lengths,
            **self._shapes,
        )
        chosen.fence.set()
        return _runner(chosen.wrapper)

    def _plan_prefill(self, part: AttentionBatch) -> Run:
        self._prefill.fence.wait()
        self._prefill.wrapper.plan(
            qo_indptr=part.query_indptr,
            paged_kv_indptr=part.block_indptr,
            paged_kv_indices=part.block_indices,
            paged_kv_last_page_len=part.last_block_len,
            head_dim_qk=self._head_dim,
            causal=True,
            seq_lens=part.kv_lengths,
            **self._shapes,
        )
        self._prefill.fence.set()
        return _runner(self._prefill.wrapper)

    def _plan_xqa(self, part: AttentionBatch) -> Run:
        """XQA needs no schedule, only tables and lengths on the device, at addresses that never change."""
        rows = part.rows
        counts = part.block_indptr.diff()
        place = torch.arange(int(counts.sum())) - torch.repeat_interleave(part.block_indptr[:-1], counts)
        cells = torch.repeat_interleave(torch.arange(rows), counts) * self._table_width + place
        table = self._table[:rows].fill_(self._padding_block)
        table.view(-1).index_copy_(0, to_device(cells.numpy(), self._device), part.block_indices)
        self._lengths[:rows].copy_(part.kv_lengths, non_blocking=True)
        return self._run_xqa

    def _run_xqa(self, q: Tensor, cache: Cache, out: Tensor, _scales: Scales) -> None:
        rows = q.shape[0]
        queries = self._queries[:rows].copy_(q)  # XQA knows no row stride of its queries
        self._library.decode.xqa_batch_decode_with_kv_cache(
            query=queries,
            kv_cache=cache,
            workspace_buffer=self._xqa_workspace,
            block_tables=self._table[:rows],
            seq_lens=self._lengths[:rows],
            max_seq_len=self._table_width * self._block_size,
            bmm1_scale=self._shapes["sm_scale"],
            bmm2_scale=1.0,
            window_left=self._shapes["window_left"],
            out=out,
            kv_layout="NHD",
        )


def _shapes(config: ModelConfig, block_size: int, dtype: torch.dtype, cache_dtype: torch.dtype) -> dict[str, Any]:
    """What every plan must be told, as FlashInfer's defaults are of another model."""
    return {
        "num_qo_heads": config.heads,
        "num_kv_heads": config.kv_heads,
        "page_size": block_size,
        "window_left": -1 if config.sliding_window is None else config.sliding_window - 1,
        "sm_scale": config.head_dim**-0.5,
        "q_data_type": dtype,
        "kv_data_type": cache_dtype,
        "o_data_type": dtype,
    }


def float_workspace(
    config: ModelConfig, limits: RunnerLimits, dtype: torch.dtype, device: torch.device, *, fp8_cache: bool
) -> int:
    """Ask FlashInfer what the largest steps need for partial results: bytes, at least FLOAT_WORKSPACE.

    Asked for are steps of one token and of as many tokens as there may be, in few rows and in many, all of full length.
    """
    library: Any = load_flashinfer()
    shapes = _shapes(config, limits.block_size, dtype, FP8 if fp8_cache else dtype)
    small = torch.zeros(16, dtype=torch.uint8, device=device)
    decode = library.BatchDecodeWithPagedKVCacheWrapper(small, kv_layout="NHD", use_tensor_cores=True, backend="fa2")
    prefill = library.BatchPrefillWithPagedKVCacheWrapper(small, kv_layout="NHD", backend="fa2")
    pages = -(-limits.max_model_len // limits.block_size)
    last = limits.max_model_len - (pages - 1) * limits.block_size
    needed = FLOAT_WORKSPACE
    for rows in (1, 8, limits.max_rows):
        indptr = pages * torch.arange(rows + 1, dtype=torch.int32)
        indices, lasts = torch.zeros(rows * pages, dtype=torch.int32), torch.full((rows,), last, dtype=torch.int32)
        size, _ = decode.workspace_size(
            indptr=indptr, indices=indices, last_page_len=lasts, head_dim=config.head_dim, **shapes
        )
        needed = max(needed, size)
        for tokens in {2, min(limits.max_tokens // rows, limits.max_model_len)} - {0}:
            size, _ = prefill.workspace_size(
                qo_indptr=tokens * torch.arange(rows + 1, dtype=torch.int32),
                paged_kv_indptr=indptr,
                paged_kv_indices=indices,
                paged_kv_last_page_len=lasts,
                head_dim_qk=config.head_dim,
                causal=True,
                **shapes,
            )
            needed = max(needed, size)
    return needed


def validate(head_dim: int, block_size: int, dtype: torch.dtype, workspaces: Workspaces) -> None:
    """Raise ValueError, in one line that names the flag, for what FlashInfer's kernels do not know."""
    if dtype not in DTYPES:
        raise ValueError(f"FlashInfer attends in bfloat16 or float16, not in {dtype}")
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim {head_dim}: FlashInfer's attention knows {', '.join(map(str, HEAD_DIMS))}")
    if workspaces.decode == "xqa" and block_size not in XQA_BLOCK_SIZES:
        sizes = ", ".join(map(str, XQA_BLOCK_SIZES))
        raise ValueError(f"--block-size {block_size}: --attention-decode xqa takes {sizes}")
    if workspaces.fp8_cache and (workspaces.prefill, workspaces.decode) != ("fa2", "fa2"):
        raise ValueError(
            "--kv-cache-dtype fp8_e4m3: fa3 and xqa would round queries to 8 bits too; leave "
            "--attention-prefill and --attention-decode at fa2"
        )


def _validate_batch(batch: AttentionBatch) -> None:
    """FlashInfer would compile other kernels for indices of another width, and wait for those on the device."""
    for name in ("query_indptr", "kv_lengths", "block_indptr", "block_indices", "last_block_len", "slots"):
        values = getattr(batch, name)
        if values.dtype != torch.int32 or not values.is_cpu:
            raise ValueError(f"{name}: expected int32 on the host, got {values.dtype} on {values.device}")


def _runner(wrapper: Any) -> Run:
    def run(q: Tensor, cache: Cache, out: Tensor, scales: Scales) -> None:
        wrapper.run(q=q, paged_kv_cache=cache, out=out, **scales)

    return run
