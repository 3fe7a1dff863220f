"""Memory for packed weights, on huge pages."""

import torch
from torch import Tensor

from octavo.kvcache.store import huge_pages

SLAB_BYTES = 64 << 20
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
            return huge_pages(size)[:size].view(dtype)
        if size > self._slab.numel():
            self._slab = huge_pages(SLAB_BYTES)
        piece, self._slab = self._slab[:size], self._slab[-(-size // ALIGNMENT) * ALIGNMENT :]
        return piece.view(dtype)
