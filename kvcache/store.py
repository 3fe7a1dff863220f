"""The K and V tensors of the whole pool: one allocation, made once.

The store owns the bytes of a block; the attention backend owns the order of elements inside it.
"""

import contextlib
import math
import mmap

import torch
from torch import Tensor

from octavo.kvcache.layout import KVLayout

HUGE_PAGE_BYTES = 2 << 20


class KVStore:
    """One tensor [layers, 2, blocks, block_size * kv_heads * head_dim].

    Zeros are written to it, so that its pages are there from the first minute on and nobody can take them later. On a
    CPU they are huge ones where the system has them: attention reads 2 KB here and 2 KB there.
    """

    def __init__(self, layout: KVLayout, blocks: int, dtype: torch.dtype, device: torch.device) -> None:
        elements = layout.block_size * layout.kv_heads * layout.head_dim
        self.layout = layout
        self.blocks = blocks
        self.scales: list[dict[str, float]] = [{} for _ in range(layout.layers)]
        """By layer and the names in SCALES: what the numbers in the store are multiplied with, where that is not 1."""
        shape = (layout.layers, 2, blocks, elements)
        if device.type == "cpu":
            size = math.prod(shape) * dtype.itemsize
            self.data = huge_pages(size)[:size].view(dtype).view(shape).zero_()
        else:
            self.data = torch.zeros(shape, dtype=dtype, device=device)

    def keys(self, layer: int) -> Tensor:
        """K of one layer: [blocks, block_size * kv_heads * head_dim], contiguous."""
        return self.data[layer, 0]

    def values(self, layer: int) -> Tensor:
        """V of one layer, shaped as its K."""
        return self.data[layer, 1]


def huge_pages(size: int) -> Tensor:
    """At least `size` bytes that begin at the border of a huge page. Pages that are never written take no memory."""
    memory = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages: slower, not wrong
        memory.madvise(mmap.MADV_HUGEPAGE)
    slab = torch.frombuffer(memory, dtype=torch.uint8)
    return slab[-slab.data_ptr() % HUGE_PAGE_BYTES :]
