"""Whole runners on the CPU, built as the engine builds them, and what transformers says about the same tokens."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from octavo.kvcache.ledger import MemoryLedger
from octavo.model.device import CPU
from octavo.model.kernels import Kernels
from octavo.model.kernels.load import load_kernels
from octavo.model.memory import Formats, RunnerLimits, plan_memory
from octavo.model.placement import Placement
from octavo.model.runner import ModelRunner, build_runner
from octavo.model.step import Admission, Row, SamplingParams, Step
from octavo.model.weights.checkpoint import Checkpoint, open_checkpoint

SMALL = RunnerLimits(max_model_len=256, max_rows=8, max_tokens=64, block_size=16, blocks=128)


@cache
def cpu_kernels(dtype: torch.dtype) -> Kernels:
    """The best that this machine has, or what OCTAVO_KERNELS names."""
    return load_kernels(dtype, threads=2)


def formats_of(kernels: Kernels, dtype: torch.dtype) -> Formats:
    """How these kernels keep numbers of this dtype."""
    size = dtype.itemsize
    return Formats(size, size, size, panels=kernels.panels, threads=kernels.threads)


def build(
    source: Path | Checkpoint,
    dtype: torch.dtype = torch.float32,
    planned: RunnerLimits | None = None,
    **limits: Any,
) -> tuple[ModelRunner, MemoryLedger]:
    """A runner within SMALL limits, of which some may be replaced, and the ledger of its memory.

    planned: the limits of the plan, where they differ from what is then built.
    """
    checkpoint = open_checkpoint(source) if isinstance(source, Path) else source
    kernels, within = cpu_kernels(dtype), replace(SMALL, **limits)
    plan = plan_memory(checkpoint.config, formats_of(kernels, dtype), planned or within, budget=1 << 40)
    ledger = MemoryLedger(plan)
    placement = Placement(CPU, dtype, kernels, None)
    return build_runner(checkpoint, placement, within, ledger, lambda done, total: None), ledger


def logits_of(runner: ModelRunner, tokens: list[int]) -> Tensor:
    """Logits of every position, computed as one row in slot 0 and blocks 0, 1, …: float32 [tokens, vocabulary]."""
    size = runner._slots.block_size
    blocks = tuple(range(-(-len(tokens) // size)))
    admission = Admission(0, tuple(tokens), len(tokens), blocks, SamplingParams())
    runner.submit(Step((), (admission,), (), (Row(0, 0, len(tokens), sample=False),))).wait()
    rows = torch.arange(len(tokens)).split(runner.arena.max_rows)
    logits = torch.cat([runner.model.logits(runner.arena, part).clone() for part in rows])
    runner.submit(Step((0,), (), (), ())).wait()
    return logits


@torch.no_grad()
def reference_logits(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """The same by transformers, in the model's own dtype."""
    return model(torch.tensor([tokens])).logits[0]
