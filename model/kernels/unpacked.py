"""What the Linears share whose weight lies as the checkpoint has it."""

import torch
from torch import Tensor


class UnpackedLinear:
    """A weight [out_features, in_features], and perhaps a bias. Who multiplies with them is a class of its own."""

    scratch_nbytes = 0
    """No thread keeps anything to multiply with it."""

    def __init__(
        self, shape: tuple[int, int], dtype: torch.dtype, bias: torch.dtype | None, device: torch.device | None
    ) -> None:
        """`bias`: its type, where there is one; `device`: torch's default one if None."""
        self.out_features, self.in_features = shape
        self._weight = torch.empty(shape, dtype=dtype, device=device)
        self._bias = None if bias is None else torch.zeros(self.out_features, dtype=bias, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of the stored weight and bias."""
        return self._weight.nbytes + (0 if self._bias is None else self._bias.nbytes)

    def load(self, first_row: int, weight: Tensor) -> None:
        """Store weight [rows, in_features], any float dtype, at rows first_row .. of W."""
        _store(self._weight, first_row, weight)

    def load_bias(self, first_row: int, bias: Tensor) -> None:
        """Store bias [rows] at rows first_row .. ; only for a Linear that was made with a bias."""
        if self._bias is None:
            raise ValueError("this linear has no bias")
        _store(self._bias, first_row, bias)

    def gather(self, rows: Tensor, out: Tensor) -> None:
        """Copy rows of W (int32 ids, [tokens]) to out [tokens, in_features]."""
        torch.index_select(self._weight, 0, rows, out=out)


def _store(target: Tensor, first_row: int, source: Tensor) -> None:
    last_row = first_row + source.shape[0]
    if first_row < 0 or last_row > target.shape[0] or source.shape[1:] != target.shape[1:]:
        raise ValueError(f"{list(source.shape)} at row {first_row} does not fit into {list(target.shape)}")
    target[first_row:last_row].copy_(source)
