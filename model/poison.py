"""For tests only: fill memory that nothing may be read from with NaN, so that whatever is read from it shows.

OCTAVO_POISON=1 turns it on, for every runner on a CPU that is built in the process.
"""

import os
from dataclasses import dataclass
from typing import Final

import torch

from octavo.kvcache.store import KVStore
from octavo.model.arena import ActivationArena
from octavo.model.step import Step

_NAN_BYTE: Final = 255
"""Every byte of a NaN of bfloat16, float32 or float64, and of the token id -1."""


def poison_wanted() -> bool:
    """Whether this process is under test."""
    return os.environ.get("OCTAVO_POISON") == "1"


@dataclass(frozen=True, slots=True)
class Poison:
    """Poisons a runner's pool and arena: both at the start, blocks as they are handed out, the arena before each step.

    A block that is given up may still be found by its name, so it is poisoned when it is given to somebody else.
    """

    store: KVStore
    arena: ActivationArena

    def fill(self) -> None:
        """Poison everything."""
        self.store.data.view(torch.uint8).fill_(_NAN_BYTE)
        self.arena.fill(_NAN_BYTE)

    def before(self, step: Step) -> None:
        """Poison what a step is given and must not read before it has written it.

        Of an admitted request's blocks the first ones may be shared: those before the position that its row begins at.
        """
        if step.rows:
            self.arena.fill(_NAN_BYTE)
        size = self.store.layout.block_size
        shared = {row.slot: -(-row.start // size) for row in step.rows}
        fresh = [block for growth in step.grown for block in growth.blocks]
        for admission in step.admitted:
            fresh += admission.blocks[shared.get(admission.slot, len(admission.blocks)) :]
        self.store.data.view(torch.uint8).index_fill_(2, torch.tensor(fresh, dtype=torch.int64), _NAN_BYTE)
