"""Where a checkpoint's tensors go. Imports no torch at run time: this package also serves the HTTP process."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


STORED_FP8 = "F8_E4M3"
"""A `quantised` of 8-bit floats: load takes those, and the scales of rows are a tensor of their own."""


@dataclass(frozen=True, slots=True)
class Destination:
    """What a model expects of one tensor, and how to hand it over."""

    shape: tuple[int, ...]
    """The whole tensor's, as the checkpoint has it."""
    load: Callable[[int, "Tensor"], None]
    """load(first_row, rows): rows first_row, first_row + 1, … of the tensor, in the checkpoint's dtype, on the CPU.

    Called in ascending order without gaps, for the rows that are wanted; the callee copies what it keeps.
    """
    quantised: str = ""
    """The type of quantised blocks that load takes instead, as uint8 [rows, bytes of a row], or STORED_FP8."""
    rows: tuple[int, int] | None = None
    """First row and end of those that load is given; None: all."""
