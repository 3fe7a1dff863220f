"""Destinations that are plain tensors."""

from collections.abc import Mapping

import torch
from torch import Tensor

from octavo.model.weights.checkpoint import Checkpoint, load_weights
from octavo.model.weights.destination import Destination


def plain_destinations(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype = torch.float32
) -> tuple[dict[str, Tensor], dict[str, Destination]]:
    """Tensors full of NaN, and destinations that copy rows into them."""
    tensors = {name: torch.full(shape, torch.nan, dtype=dtype) for name, shape in shapes.items()}
    return tensors, {name: Destination(shapes[name], copier(tensor)) for name, tensor in tensors.items()}


def copier(target: Tensor):
    """A load function that refuses rows out of order."""
    expected = 0

    def load(first_row: int, rows: Tensor) -> None:
        nonlocal expected
        assert first_row == expected
        target[first_row : first_row + len(rows)].copy_(rows)
        expected = first_row + len(rows)

    return load


def loaded(checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """All tensors of a checkpoint as float32, through load_weights."""
    tensors, destinations = plain_destinations(shapes)
    load_weights(checkpoint, destinations, lambda done, total: None)
    return tensors
