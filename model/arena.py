"""The activation arena: one allocation that holds every tensor of a forward pass, placed by `arena_layout`."""

from typing import Final

import torch
from torch import Tensor

from octavo.model.arena_layout import FP8_AREA, FP8_SCALES_AREA, ArenaLayout

_OTHER_TYPES: Final = {
    **dict.fromkeys(("tokens", "positions"), torch.int32),
    **dict.fromkeys(("logits", "logprobs", FP8_SCALES_AREA), torch.float32),
    **dict.fromkeys(("probabilities", "ranked"), torch.float64),
    "keys": torch.int64,
    "flags": torch.bool,
    FP8_AREA: torch.float8_e4m3fn,
}


class ActivationArena:
    """The slab and its views. Activations are of one dtype; the areas of _OTHER_TYPES are not activations."""

    def __init__(self, layout: ArenaLayout, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = layout.shape
        """The largest step's."""
        # Written, so that its pages are there from the first minute on.
        self._slab = torch.zeros(layout.bytes, dtype=torch.uint8, device=device)
        self._areas: dict[str, Tensor] = {}
        for name, area in layout.areas.items():
            size = area.rows * area.columns * area.element_bytes
            data = self._slab[layout.offsets[name] :][:size].view(_OTHER_TYPES.get(name, dtype))
            self._areas[name] = data.view(area.rows, area.columns)

    @property
    def nbytes(self) -> int:
        """Bytes of the allocation."""
        return self._slab.untyped_storage().nbytes()

    @property
    def max_tokens(self) -> int:
        """Tokens the largest step may have, padding included."""
        return self._areas["spine"].shape[0]

    @property
    def max_rows(self) -> int:
        """Rows whose logits fit at one time, padding included."""
        return self._areas["logits"].shape[0]

    def __contains__(self, name: str) -> bool:
        return name in self._areas

    def fill(self, byte: int) -> None:
        """Overwrite everything."""
        self._slab.fill_(byte)

    def view(self, name: str, rows: int) -> Tensor:
        """Return the first rows of an area: [rows, columns], contiguous. IndexError if the area has fewer."""
        area = self._areas[name]
        if rows > area.shape[0]:
            raise IndexError(f"the arena's {name} area holds {area.shape[0]} rows, not {rows}")
        return area[:rows]
