"""How large a matrix is once it is packed for the compiled kernels. Plain arithmetic: imports no torch."""

PANEL_WIDTH = 64
"""Output columns that are packed together, as in linear.h."""
TILE_DEPTH = 32
"""bfloat16 rows are padded to a multiple of this, as in linear.h."""

QUANTISED = {"Q4_0": (32, 18), "Q4_1": (32, 20), "Q8_0": (32, 34), "Q4_K": (256, 144)}
"""GGUF's types of quantised blocks that the compiled kernels multiply with: numbers and bytes of a block."""


def packed_elements(out_features: int, in_features: int, element_bytes: int) -> int:
    """Numbers stored for W [out_features, in_features], padding included."""
    depth = in_features if element_bytes == 4 else -(-in_features // TILE_DEPTH) * TILE_DEPTH
    return -(-out_features // PANEL_WIDTH) * PANEL_WIDTH * depth


def quantised_bytes(out_features: int, in_features: int, kind: str) -> int:
    """Bytes of W [out_features, in_features] in quantised blocks, the padding of its last panel included.

    Raises ValueError where rows are no whole number of blocks.
    """
    elements, block_bytes = QUANTISED[kind]
    if in_features % elements:
        raise ValueError(f"{in_features} columns cannot be divided into blocks of {elements} ({kind})")
    return -(-out_features // PANEL_WIDTH) * PANEL_WIDTH * (in_features // elements) * block_bytes


def expanded_bytes(in_features: int, element_bytes: int) -> int:
    """Bytes of one panel of quantised weights as numbers: what each thread has beside the weights."""
    return packed_elements(PANEL_WIDTH, in_features, element_bytes) * element_bytes
