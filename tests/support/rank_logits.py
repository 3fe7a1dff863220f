"""Ranks of a divided model without an engine: `python rank_logits.py MODEL DIRECTORY SIZE ...`.

For each SIZE so many ranks are forked, and rank 2 of the third size writes the logits of TOKENS, float32 [tokens,
vocabulary], to 2-2.npy, after it has checked that memory was allocated as `octavo plan` says.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from support.runners import logits_of

from octavo.kvcache.ledger import BUCKETS
from octavo.model.parallel import Ranks, leave
from octavo.scheduler.loading import load
from octavo.scheduler.messages import EngineConfig

TOKENS = [1 + 37 * number % 129 for number in range(24)]


def engine_config(model: str, size: int, dtype: str = "float32") -> EngineConfig:
    return EngineConfig(
        model=model,
        device="cpu",
        dtype=dtype,
        tensor_parallel_size=size,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        kv_blocks=32,
    )


def compute(model: str, directory: Path, run: int, size: int, rank: int) -> None:
    meeting = str(directory / f"meet-{run}")
    _, runner, ready = load(engine_config(model, size), join=lambda _: Ranks(meeting, rank, size))
    lines = [line for line in ready.memory if line.bucket in BUCKETS]
    assert all(0 < line.allocated == line.planned for line in lines), lines
    assert ready.batch_invariant
    (directory / f"{run}-{rank}.txt").write_text(" ".join(str(line.allocated) for line in lines))
    together = logits_of(runner, TOKENS).numpy()
    alone = logits_of(runner, TOKENS[:1]).numpy()
    np.testing.assert_array_equal(alone, together[:1])
    np.save(directory / f"{run}-{rank}.npy", together)


def fork_ranks(size: int, compute: Callable[[int], None]) -> None:
    """Compute each rank in a process of its own, and end where one fails."""
    children = {}
    for rank in range(size):  # torch is imported, and has not computed: now a process can be forked
        if (child := os.fork()) == 0:
            compute(rank)
            leave(0)
        children[child] = rank
    for _ in range(size):
        child, status = os.wait()
        if status:
            sys.exit(f"rank {children[child]} of {size} failed")


def main() -> None:
    model, directory, *sizes = sys.argv[1:]
    for run, size in enumerate(map(int, sizes)):
        fork_ranks(size, lambda rank, run=run, size=size: compute(model, Path(directory), run, size, rank))


if __name__ == "__main__":
    main()
