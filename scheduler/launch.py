"""Ranks that a launcher starts, one process each, as torchrun's environment variables tell. Imports no torch.

https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from octavo.scheduler.sizing import ConfigurationError

_ELSEWHERE = ("RANK", "MASTER_ADDR", "MASTER_PORT")
"""What a launcher says beside WORLD_SIZE; torch.distributed reads the last two itself."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What one of the processes is."""

    rank: int
    local_rank: int
    """Among those of its machine; the number of its GPU."""
    local_size: int
    """How many ranks share its machine."""


def find_launch(size: int, environment: Mapping[str, str] = os.environ) -> Launch | None:
    """Return which of `size` ranks this process is to be; None where no launcher has started it.

    The engine then spawns ranks itself. Raises ConfigurationError.
    """
    if environment.get("WORLD_SIZE", "1") == "1":
        return None
    if missing := [name for name in _ELSEWHERE if not environment.get(name)]:
        raise ConfigurationError(f"{', '.join(missing)} missing: WORLD_SIZE says that a launcher has started this rank")
    world = _number(environment, "WORLD_SIZE", 64)
    if world != size:
        raise ConfigurationError(f"WORLD_SIZE is {world}: give --tensor-parallel-size {world}, not {size}")
    return Launch(
        rank=_number(environment, "RANK", size - 1),
        local_rank=_number(environment, "LOCAL_RANK", size - 1),
        local_size=max(1, _number(environment, "LOCAL_WORLD_SIZE", size)),
    )


def _number(environment: Mapping[str, str], name: str, most: int) -> int:
    text = environment.get(name, "0")
    if not (text.isdecimal() and int(text) <= most):
        raise ConfigurationError(f"{name}: {text[:40]!r}: give a number from 0 to {most}")
    return int(text)
