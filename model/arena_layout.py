"""Where every tensor of a forward pass lies in the activation arena. Plain arithmetic: imports no torch.

Each tensor is an *area*: so many rows of so many numbers, alive at some points of the pass. Two areas may share bytes
when no point needs both, so the arena is as large as the fullest point and a step allocates nothing. The layout is
arithmetic on shapes: the memory plan uses it before anything is loaded, and the arena is built from the same numbers.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from octavo.model.config import ModelConfig

ROW_PADDING: Final = 8
"""Capacities are rounded up to this many rows: the largest `Kernels.row_multiple`."""

_ALIGNMENT: Final = 64
"""Bytes of a cache line and of an AVX-512 register."""

_QKV, _ATTENTION, _OUTPUT, _GATE_UP, _SILU, _DOWN, _PICK, _HEAD, _SAMPLE = range(9)
_PRODUCTS: Final = (_QKV, _OUTPUT, _GATE_UP, _DOWN)
FP8_AREA, FP8_SCALES_AREA = "fp8", "fp8_scales"
"""What a product of 8-bit floats multiplies with: its input rounded, and the scale of each token."""
_SCRATCH: Final = {"probabilities": 8, "ranked": 8, "keys": 8, "flags": 1, "logprobs": 4}
"""What sampling needs of one row, in bytes for each token of the vocabulary: `RowScratch` in draw.py."""
BLOCK_POINTS: Final = range(_QKV, _DOWN + 1)
"""The products and fused operations of one block, in order; those of the LM head and of sampling follow."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """What the tensors of a step follow from."""

    config: ModelConfig
    """The shapes of one rank."""
    tokens: int
    rows: int
    """How many at a time meet the LM head."""
    element_bytes: int
    """Of an activation."""
    ranks: int = 1
    gate_in_place: bool = True
    """Whether SiLU(gate) * up overwrites the gate (`Kernels.gate_in_place`)."""
    fp8: bool = False
    """Whether the inputs of the block's products are rounded to 8 bits."""


@dataclass(frozen=True, slots=True)
class Area:
    """One tensor [rows, columns] and the points of the pass at which its contents are needed."""

    name: str
    rows: int
    columns: int
    element_bytes: int
    points: frozenset[int]

    @property
    def nbytes(self) -> int:
        """Size, rounded up to the alignment."""
        return -(-self.rows * self.columns * self.element_bytes // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """Where each area of a step begins, in bytes, and how many bytes hold them all."""

    shape: StepShape
    areas: dict[str, Area]
    offsets: dict[str, int]
    bytes: int


def padded(rows: int) -> int:
    """Round a number of rows up to the row padding."""
    return -(-rows // ROW_PADDING) * ROW_PADDING


def load(areas: Iterable[Area], points: Iterable[int]) -> int:
    """Bytes needed at the fullest of the given points: no layout can do with fewer."""
    areas = tuple(areas)
    return max(sum(area.nbytes for area in areas if point in area.points) for point in points)


def step_areas(shape: StepShape) -> tuple[Area, ...]:
    """All tensors of a forward pass.

    `to_attention` and `to_feed_forward` are the normed spine; the branches leave their results in the same bytes, from
    where they are added to the spine. With `fp8` each of the block's four products has its input in 8 bits as well, one
    after another in the same bytes. SiLU(gate) * up overwrites the gate half, so it needs no area, unless the kernels
    cannot write there (`gate_in_place`). The logits are float32 straight from the product: 4V bytes a row where a
    half-precision product and its copy would take 6V. The last norm's output outlives a slice of logits, since a scored
    prompt takes several slices. From the logits tokens are sampled row by row, in the scratch of one row: 29V bytes of
    what the rest of the pass has left.

    With tensor parallelism a rank computes its part of the vocabulary and samples from the whole.

    The order is that of placement. The longest-lived come first, `to_feed_forward` right after the area whose bytes it
    takes over, so that no gap is left between them. With an area of its own for SiLU(gate) * up, the three that are
    alive together at the fullest point come first instead, and the normed spine goes where one of them is not needed.
    """
    config, tokens, rows = shape.config, padded(shape.tokens), padded(shape.rows)
    whole_pass = range(_SAMPLE + 1)

    def activation(name: str, columns: int, points: Iterable[int]) -> Area:
        return Area(name, tokens, columns, shape.element_bytes, frozenset(points))

    normed = (
        activation("to_attention", config.width, (_QKV, _DOWN, _PICK, _HEAD, _SAMPLE)),
        activation("to_feed_forward", config.width, (_OUTPUT, _GATE_UP)),
    )
    spine = activation("spine", config.width, BLOCK_POINTS)
    gate_up = activation("gate_up", 2 * config.ffn_width, (_GATE_UP, _SILU, _DOWN)[: 3 if shape.gate_in_place else 2])
    gated = activation("gated", config.ffn_width, (_SILU, _DOWN))
    widest = max(config.width, config.q_width, config.ffn_width)
    rounded = ((FP8_AREA, widest, 1), (FP8_SCALES_AREA, 1, 4)) if shape.fp8 else ()
    return (
        Area("tokens", tokens, 1, 4, frozenset(whole_pass)),
        Area("positions", tokens, 1, 4, frozenset(whole_pass)),
        *((*normed, spine, gate_up) if shape.gate_in_place else (spine, gate_up, gated, *normed)),
        activation("qkv", config.q_width + 2 * config.kv_width, (_QKV, _ATTENTION)),
        activation("attended", config.q_width, (_ATTENTION, _OUTPUT)),
        *(Area(name, tokens, columns, size, frozenset(_PRODUCTS)) for name, columns, size in rounded),
        Area("logits", rows, config.vocabulary, 4, frozenset((_HEAD, _SAMPLE))),
        Area("picked", rows, config.width, shape.element_bytes, frozenset((_PICK, _HEAD))),
        *(
            Area(name, 1, shape.ranks * config.vocabulary, size, frozenset((_SAMPLE,)))
            for name, size in _SCRATCH.items()
        ),
    )


def arena_layout(shape: StepShape) -> ArenaLayout:
    """Place the areas of `step_areas` in the order they are listed.

    Each goes to the lowest offset that is free at all of its points.

    For models whose feed-forward is at least as wide as q and k together (all common ones) the result is optimal: its
    size is the load of the fullest point.
    """
    areas = step_areas(shape)
    offsets: dict[str, int] = {}
    for area in areas:
        rivals = [other for other in areas if other.name in offsets and other.points & area.points]
        offsets[area.name] = _first_fit(area.nbytes, [(offsets[other.name], other.nbytes) for other in rivals])
    end = max(offsets[area.name] + area.nbytes for area in areas)
    return ArenaLayout(shape, {area.name: area for area in areas}, offsets, end)


@lru_cache(maxsize=4096)
def bytes_in_use(shape: StepShape) -> int:
    """Bytes that a step fills at its fullest point; 0 for a step without tokens.

    Of the largest step it is the size of the arena.
    """
    return load(step_areas(shape), range(_SAMPLE + 1)) if shape.tokens else 0


def _first_fit(size: int, taken: list[tuple[int, int]]) -> int:
    """Lowest offset at which `size` bytes touch none of the taken (offset, size) ranges."""
    offset = 0
    for start, length in sorted(taken):
        if offset + size <= start:
            break
        offset = max(offset, start + length)
    return offset
