"""How many bytes a token and a block of KV take."""

from dataclasses import dataclass
from typing import Final

SCALES: Final = ("k_scale", "v_scale")
"""What the K and the V of a layer may be multiplied with, where 8-bit floats are kept of them."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of the cache of one rank. Sizes are in bytes.

    For Llama-3-70B in bfloat16 (80 layers, 8 KV heads of 128): 4,096 bytes a token and layer, 327,680 a token.
    """

    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    """Positions in a block."""
    element_bytes: int

    @property
    def token_layer_bytes(self) -> int:
        """K and V of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.element_bytes

    @property
    def token_bytes(self) -> int:
        """K and V of one token in all layers."""
        return self.layers * self.token_layer_bytes

    @property
    def block_bytes(self) -> int:
        """One block in all layers."""
        return self.block_size * self.token_bytes

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold this many positions."""
        return -(-tokens // self.block_size)
