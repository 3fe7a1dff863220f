"""Memory for packed weights, on huge pages."""

import contextlib
import mmap

import torch
from torch import Tensor

SLAB_BYTES = 64 << 20
HUGE_PAGE_BYTES = 2 << 20
ALIGNMENT = 64


class WeightMemory:
    """Gives out pieces of slabs that the system may back with huge pages; a slab lives as long as one of its pieces.

    A step with few rows does little but read the weights once. With pages of 4 KiB, a tenth of that time goes into
    translating addresses; a matrix of a small model is too small for huge pages of its own.
    """

    def __init__(self) -> None:
        self._slab = torch.empty(0, dtype=torch.uint8)

    def take(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor of zeros, or one without memory where torch's default device is "meta"."""
        if torch.get_default_device().type != "cpu":
            return torch.empty(elements, dtype=dtype)
        size = elements * dtype.itemsize
        if size > SLAB_BYTES // 4:
            return _huge_pages(size)[:size].view(dtype)
        if size > self._slab.numel():
            self._slab = _huge_pages(SLAB_BYTES)
        piece, self._slab = self._slab[:size], self._slab[-(-size // ALIGNMENT) * ALIGNMENT :]
        return piece.view(dtype)


def _huge_pages(size: int) -> Tensor:
    """At least `size` bytes that begin at the border of a huge page. Pages that are never written take no memory."""
    memory = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages: slower, not wrong
        memory.madvise(mmap.MADV_HUGEPAGE)
    slab = torch.frombuffer(memory, dtype=torch.uint8)
    return slab[-slab.data_ptr() % HUGE_PAGE_BYTES :]
