"""One prompt through a model, with what every branch adds to the spine: for `octavo describe --trace`."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kvcache.ledger import MemoryLedger
from octavo.model.memory import RunnerLimits, plan_memory
from octavo.model.placement import Placement
from octavo.model.runner import build_runner
from octavo.model.step import Admission, Row, SamplingParams, Step
from octavo.model.weights.checkpoint import Checkpoint

_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Trace:
    """Euclidean norms of vectors of d_model numbers, each the mean over the prompt's tokens."""

    embedding: float
    blocks: tuple[tuple[float, float, float], ...]
    """Of each block: what attention adds, what the feed-forward adds, and the spine that the block hands on."""
    largest_error: float
    """Largest difference between the final spine and the sum of all that was added to it, which is float64."""


def trace(
    checkpoint: Checkpoint, placement: Placement, tokens: tuple[int, ...], progress: Callable[[int, int], None]
) -> Trace:
    """Load a model and run a prompt of token ids through it. Raises CheckpointError."""
    count = len(tokens)
    limits = RunnerLimits(count, 1, count, _BLOCK_SIZE, -(-count // _BLOCK_SIZE))
    ledger = MemoryLedger(plan_memory(checkpoint.config, placement.formats, limits, budget=0))
    runner = build_runner(checkpoint, placement, limits, ledger, progress)
    added: list[Tensor] = []
    handed_on: list[Tensor] = []

    def observe(contribution: Tensor) -> None:
        added.append(contribution[:count].double())
        handed_on.append(runner.arena.view("spine", count).double())

    runner.observe = observe
    admission = Admission(0, tokens, count, tuple(range(limits.blocks)), SamplingParams())
    runner.submit(Step((), (admission,), (), (Row(0, 0, count, sample=False),))).wait()
    handed_on.append(runner.arena.view("spine", count).double())
    sizes = [_norm(part) for part in added]
    # The spine before a block's attention is what the block below has handed on.
    blocks = zip(sizes[1::2], sizes[2::2], map(_norm, handed_on[3::2]), strict=True)
    return Trace(sizes[0], tuple(blocks), float((torch.stack(added).sum(0) - handed_on[-1]).abs().max()))


def _norm(vectors: Tensor) -> float:
    return float(vectors.norm(dim=1).mean())
