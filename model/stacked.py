"""Linears of fused matrices, also where their parts are kept in different forms."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

from torch import Tensor

from octavo.model.kernels import Kernels, Linear
from octavo.model.kernels.fp8 import Fp8Linear
from octavo.model.matrices import FusedMatrix
from octavo.model.weights.destination import STORED_FP8, Destination


class StackedLinear:
    """Several Linears over the same x, whose outputs lie side by side: parts of one matrix in different forms."""

    def __init__(self, parts: list[Linear]) -> None:
        self._parts = parts
        self.in_features = parts[0].in_features
        self.out_features = sum(part.out_features for part in parts)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self._parts)

    @property
    def scratch_nbytes(self) -> int:
        """As much as the part that needs most."""
        return max(part.scratch_nbytes for part in self._parts)

    def load(self, first_row: int, weight: Tensor) -> None:
        """Store rows of one part."""
        part, first = self._part_of(first_row)
        part.load(first_row - first, weight)

    def load_bias(self, first_row: int, bias: Tensor) -> None:
        """Store biases of one part."""
        part, first = self._part_of(first_row)
        part.load_bias(first_row - first, bias)

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """Compute out [tokens, out_features] from x [tokens, in_features], one part after another."""
        for part, first in self._places():
            part(x, out=out[:, first : first + part.out_features])

    def gather(self, rows: Tensor, out: Tensor) -> None:
        """Copy rows of W (int32 ids, [tokens]) to out [tokens, in_features]. ValueError: an embedding has one part."""
        raise ValueError(f"rows {list(rows.shape)} of a fused matrix cannot be read back to {list(out.shape)}")

    def _places(self) -> Iterator[tuple[Linear, int]]:
        """Each part and its first row."""
        first = 0
        for part in self._parts:
            yield part, first
            first += part.out_features

    def _part_of(self, row: int) -> tuple[Linear, int]:
        return next((part, first) for part, first in self._places() if row < first + part.out_features)


def fused_linear(kernels: Kernels, matrix: FusedMatrix, quantised: Mapping[str, str], numbers: str = "") -> Linear:
    """Make the Linear of a matrix.

    quantised: types of the tensors that are kept in their blocks; numbers: what the other ones are kept in.
    """
    linears: list[Linear] = [
        kernels.linear(rows, matrix.in_features, bias=matrix.bias, quantised=kind or numbers)
        for kind, rows in matrix.runs(quantised)
    ]
    return linears[0] if len(linears) == 1 else StackedLinear(linears)


def destinations(
    linear: Linear, matrix: FusedMatrix, quantised: Mapping[str, str], *, stored_fp8: bool = False
) -> Iterator[tuple[str, Destination]]:
    """Where the tensors of a matrix go in its Linear.

    stored_fp8: they are 8-bit floats. Only a Linear of such takes them, and their scales, as they are.
    """
    scaled = linear if stored_fp8 and isinstance(linear, Fp8Linear) else None
    first = 0
    for name, rows in matrix.parts:
        tensor = name + ".weight"
        load = partial(_shifted, linear.load, first)
        kind = quantised.get(tensor, "") if scaled is None else STORED_FP8
        yield tensor, Destination((rows, matrix.in_features), load, kind)
        if stored_fp8:
            load_scales = unwanted if scaled is None else partial(_shifted, scaled.load_scales, first)
            yield name + ".weight_scale", Destination((rows,), load_scales)
        if matrix.bias:
            yield name + ".bias", Destination((rows,), partial(_shifted, linear.load_bias, first))
        first += rows


def unwanted(_first: int, _rows: Tensor) -> None:
    """Load nothing: a tensor of the checkpoint that this model has no use for."""


def _shifted(load: Callable[[int, Tensor], None], offset: int, first: int, rows: Tensor) -> None:
    load(offset + first, rows)
