"""Attention on a CPU with the kernels of paged_attention.cpp."""

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from octavo.kvcache.store import KVStore
from octavo.model.attention import AttentionBatch
from octavo.model.config import ModelConfig

TILE = 48
"""Queries (heads x tokens) that one unit of parallel work computes; as in paged_attention.cpp."""
UNLIMITED = 2**31 - 1


class Plan(ctypes.Structure):
    """What does not change from layer to layer; mirrors `Plan` in paged_attention.cpp."""

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

    def __init__(self, config: ModelConfig, store: KVStore, library: ctypes.CDLL, variant: str) -> None:
        """`variant` names the copy of the kernels to use, for example "avx2".

        Raises:
            ValueError: a dtype, block size or head_dim that the kernel does not know.
        """
        _validate(store)
        layout = store.layout
        self._store = store
        self._layers = [(store.keys(i).data_ptr(), store.values(i).data_ptr()) for i in range(layout.layers)]
        self._positions = store.blocks * layout.block_size
        self._dtype = store.data.dtype
        self._heads = (layout.kv_heads * (config.heads // config.kv_heads), layout.head_dim)
        self._kv_heads = (layout.kv_heads, layout.head_dim)
        self._plan = Plan(
            kv_heads=layout.kv_heads,
            group=config.heads // config.kv_heads,
            head_dim=layout.head_dim,
            block_size=layout.block_size,
            window=UNLIMITED if config.sliding_window is None else config.sliding_window,
            scale=layout.head_dim**-0.5,
        )
        self._plan_reference = ctypes.byref(self._plan)
        self._tile_indptr = torch.zeros(1, dtype=torch.int32)
        self._batch: AttentionBatch | None = None
        name = str(self._dtype).removeprefix("torch.")
        self._kernel = library[f"octavo_attention_{name}_{variant}"]
        views = (c_void_p, c_int64) * 4
        self._kernel.argtypes = (c_void_p, c_void_p, c_void_p, *views, c_int32)
        self._kernel.restype = None

    def reserve(self, max_rows: int, max_tokens: int, max_blocks: int) -> int:  # noqa: ARG002
        """Allocate the one array that plan computes: an int32 for each row."""
        self._tile_indptr = torch.zeros(max_rows + 1, dtype=torch.int32)
        return self._tile_indptr.nbytes

    def plan(self, batch: AttentionBatch, *, padded_rows: int | None = None) -> None:  # noqa: ARG002
        """Divide the rows into tiles of queries; see AttentionBackend.

        Raises:
            ValueError: more rows than were reserved, or a block that the store does not have.
        """
        if batch.rows >= self._tile_indptr.shape[0]:
            raise ValueError(f"{batch.rows} rows exceed the {self._tile_indptr.shape[0] - 1} reserved")
        first, last = batch.block_indices.aminmax()
        if first < 0 or last >= self._store.blocks or batch.slots.max() >= self._positions:
            raise ValueError(f"a block outside the store's 0 .. {self._store.blocks - 1}")
        self._batch = batch  # keeps its memory while the kernel points to it
        tiles = (batch.query_indptr.diff() * self._plan.group + (TILE - 1)) // TILE
        torch.cumsum(tiles, dim=0, dtype=torch.int32, out=self._tile_indptr[1 : batch.rows + 1])
        plan = self._plan
        plan.rows, plan.tokens = batch.rows, batch.tokens
        plan.tile_indptr = self._tile_indptr.data_ptr()
        for name in ("query_indptr", "kv_lengths", "block_indptr", "block_indices", "slots"):
            setattr(plan, name, getattr(batch, name).data_ptr())

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Append, then attend; see AttentionBackend. Rows of `out` beyond the batch become zero.

        Raises:
            ValueError: a tensor of another dtype or shape than the store's, or one whose rows are not contiguous.
        """
        self._check(q, self._heads)
        self._check(k, self._kv_heads)
        self._check(v, self._kv_heads)
        self._check(out, self._heads)
        keys, values = self._layers[layer]
        self._kernel(
            self._plan_reference,
            keys,
            values,
            q.data_ptr(),
            q.stride(0),
            k.data_ptr(),
            k.stride(0),
            v.data_ptr(),
            v.stride(0),
            out.data_ptr(),
            out.stride(0),
            out.shape[0],
        )

    def _check(self, tensor: Tensor, heads: tuple[int, int]) -> None:
        tokens, *shape = tensor.shape
        if tensor.dtype is not self._dtype or tokens < self._plan.tokens or tuple(shape) != heads:
            raise ValueError(
                f"expected {self._dtype} [{self._plan.tokens} or more, {heads[0]}, {heads[1]}], "
                f"got {tensor.dtype} {list(tensor.shape)}"
            )
        if tensor.stride(2) != 1 or (heads[0] > 1 and tensor.stride(1) != heads[1]):
            raise ValueError(f"the heads of a token must be contiguous, got strides {tensor.stride()}")


def _validate(store: KVStore) -> None:
    layout = store.layout
    if store.data.dtype not in {torch.bfloat16, torch.float32}:
        raise ValueError(f"CPU attention keeps its cache in bfloat16 or float32, not {store.data.dtype}")
    if layout.block_size % 16 != 0:
        raise ValueError(f"block size {layout.block_size}: CPU attention needs a multiple of 16")
    if layout.head_dim % 2 != 0 or not 16 <= layout.head_dim <= 256:
        raise ValueError(f"head_dim {layout.head_dim}: CPU attention needs an even number from 16 to 256")
