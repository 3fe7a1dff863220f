"""The K and V tensors of the whole pool: one allocation, made once.

The store owns the bytes of a block; the attention backend owns the order of elements inside it.
"""

import torch
from torch import Tensor

from octavo.kvcache.layout import KVLayout


class KVStore:
    """One tensor [layers, 2, blocks, block_size * kv_heads * head_dim].

    Zeros are written to it, so that its pages are there from the first minute on and nobody can take them later.
    """

    def __init__(self, layout: KVLayout, blocks: int, dtype: torch.dtype, device: torch.device) -> None:
        elements = layout.block_size * layout.kv_heads * layout.head_dim
        self.layout = layout
        self.blocks = blocks
        self.data = torch.zeros(layout.layers, 2, blocks, elements, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of the allocation."""
        return self.data.untyped_storage().nbytes()

    def keys(self, layer: int) -> Tensor:
        """K of one layer: [blocks, block_size * kv_heads * head_dim], contiguous."""
        return self.data[layer, 0]

    def values(self, layer: int) -> Tensor:
        """V of one layer, shaped as its K."""
        return self.data[layer, 1]
