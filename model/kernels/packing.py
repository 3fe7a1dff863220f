"""How large a matrix is once it is packed for the compiled kernels. Plain arithmetic: imports no torch."""

PANEL_WIDTH = 64
"""Output columns that are packed together, as in linear.h."""
TILE_DEPTH = 32
"""bfloat16 rows are padded to a multiple of this, as in linear.h."""


def packed_elements(out_features: int, in_features: int, element_bytes: int) -> int:
    """Numbers stored for W [out_features, in_features], padding included."""
    depth = in_features if element_bytes == 4 else -(-in_features // TILE_DEPTH) * TILE_DEPTH
    return -(-out_features // PANEL_WIDTH) * PANEL_WIDTH * depth
