"""Attention on a CPU with the kernels of paged_attention.h."""

import ctypes
from ctypes import c_char_p, c_float, c_int32, c_void_p
from struct import Struct

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from octavo.kvcache.store import KVStore
from octavo.model.attention import AttentionBatch
from octavo.model.config import ModelConfig
from octavo.model.kernels.library import Library
from octavo.model.kernels.native import SUFFIXES

TILE = 96
"""Queries (heads x tokens) that one unit of parallel work computes; as in paged_attention.h."""
UNLIMITED = 2**31 - 1

_operands = Struct("8q").pack
"""Mirrors `Operands` in paged_attention.h: addresses and token strides of q, k, v and out."""


class Plan(ctypes.Structure):
    """What does not change from layer to layer; mirrors `Plan` in paged_attention.h."""

    _fields_ = (
        ("query_indptr", c_void_p),
        ("kv_lengths", c_void_p),
        ("block_indptr", c_void_p),
        ("block_indices", c_void_p),
        ("slots", c_void_p),
        ("tile_indptr", c_void_p),
        ("rows", c_int32),
        ("tokens", c_int32),
        ("kv_heads", c_int32),
        ("group", c_int32),
        ("head_dim", c_int32),
        ("block_size", c_int32),
        ("window", c_int32),
        ("scale", c_float),
    )


class CpuAttention:
    """Paged attention whose bits depend neither on chunking nor on neighbours nor on the number of threads.

    bfloat16 and float32; block sizes that are multiples of 16; even head_dim from 16 to 256; any number of query heads
    to a KV head. The order of elements inside a block is the kernel's own. In bfloat16 the weights are rounded to
    bfloat16 before they meet V; all sums are float32.
    """

    def __init__(self, config: ModelConfig, store: KVStore, library: Library, variant: str) -> None:
        """`variant` names the copy of the kernel to use, for example "avx2"; two are for bfloat16 only.

        Raises:
            ValueError: a dtype, block size or head_dim that the kernel does not know.
        """
        _validate(store)
        layout = store.layout
        self._store = store  # keeps the memory that the kernel points to
        self._layers = [(store.keys(i).data_ptr(), store.values(i).data_ptr()) for i in range(layout.layers)]
        self._blocks = store.blocks
        self._positions = store.blocks * layout.block_size
        self._dtype = store.data.dtype
        self._heads = layout.kv_heads * (config.heads // config.kv_heads)
        self._kv_heads = layout.kv_heads
        self._head_dim = layout.head_dim
        self._plan = Plan(
            kv_heads=layout.kv_heads,
            group=config.heads // config.kv_heads,
            head_dim=layout.head_dim,
            block_size=layout.block_size,
            window=UNLIMITED if config.sliding_window is None else config.sliding_window,
            scale=layout.head_dim**-0.5,
        )
        self._plan_address = ctypes.addressof(self._plan)
        self._planned: tuple[AttentionBatch, NDArray[np.int32]] | None = None
        name = f"paged_attention_{SUFFIXES[self._dtype]}_{variant}"
        self._kernel = library.function(name, c_void_p, c_void_p, c_void_p, c_char_p, c_int32)

    def reserve(self, max_rows: int, max_tokens: int, max_blocks: int) -> int:  # noqa: ARG002
        """Reserve nothing: a tile's state lives on the stack of the thread that computes it."""
        return 0

    def plan(self, batch: AttentionBatch, *, padded_rows: int | None = None) -> None:  # noqa: ARG002
        """Divide the rows into tiles of queries; see AttentionBackend.

        Raises:
            ValueError: a block that the store does not have.
        """
        # NumPy's calls cost a fraction of torch's on arrays this small.
        for places, count in ((batch.block_indices.numpy(), self._blocks), (batch.slots.numpy(), self._positions)):
            if places.min() < 0 or places.max() >= count:
                raise ValueError(f"a block outside the store's 0 .. {self._blocks - 1}")
        tiles = (np.diff(batch.query_indptr.numpy()) * self._plan.group + (TILE - 1)) // TILE
        tile_indptr = np.zeros(batch.rows + 1, dtype=np.int32)
        np.cumsum(tiles, out=tile_indptr[1:])
        self._planned = (batch, tile_indptr)  # keeps their memory while the kernel points to it
        plan = self._plan
        plan.rows, plan.tokens = batch.rows, batch.tokens
        plan.tile_indptr = tile_indptr.ctypes.data
        for name in ("query_indptr", "kv_lengths", "block_indptr", "block_indices", "slots"):
            setattr(plan, name, getattr(batch, name).data_ptr())

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Append, then attend; see AttentionBackend. Rows of `out` beyond the batch become zero.

        Raises:
            ValueError: a tensor of another dtype or shape than the store's, or one whose rows are not contiguous.
        """
        if self._planned is None:
            raise RuntimeError("forward without a plan")
        operands = _operands(
            *self._view(q, self._heads),
            *self._view(k, self._kv_heads),
            *self._view(v, self._kv_heads),
            *self._view(out, self._heads),
        )
        keys, values = self._layers[layer]
        self._kernel(self._plan_address, keys, values, operands, out.shape[0])

    def _view(self, tensor: Tensor, heads: int) -> tuple[int, int]:
        """Check a tensor [tokens, heads, head_dim]; return its address and the stride of its tokens."""
        shape, stride, head_dim = tensor.shape, tensor.stride(), self._head_dim
        if tensor.dtype is not self._dtype or not tensor.is_cpu or len(shape) != 3:
            raise self._unexpected(tensor, heads)
        if shape[0] < self._plan.tokens or shape[1] != heads or shape[2] != head_dim:
            raise self._unexpected(tensor, heads)
        if stride[2] != 1 or (heads > 1 and stride[1] != head_dim):
            raise ValueError(f"the heads of a token must be contiguous, got strides {stride}")
        return tensor.data_ptr(), stride[0]

    def _unexpected(self, tensor: Tensor, heads: int) -> ValueError:
        return ValueError(
            f"expected {self._dtype} [{self._plan.tokens} or more, {heads}, {self._head_dim}] on the CPU, "
            f"got {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        )


def _validate(store: KVStore) -> None:
    layout = store.layout
    if store.data.dtype not in SUFFIXES:
        raise ValueError(f"CPU attention keeps its cache in bfloat16 or float32, not {store.data.dtype}")
    if layout.block_size % 16 != 0:
        raise ValueError(f"block size {layout.block_size}: CPU attention needs a multiple of 16")
    if layout.head_dim % 2 != 0 or not 16 <= layout.head_dim <= 256:
        raise ValueError(f"head_dim {layout.head_dim}: CPU attention needs an even number from 16 to 256")
