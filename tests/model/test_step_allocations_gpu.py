"""On a GPU too a forward pass makes no tensor larger than 4 KiB, in 8-bit floats or not.

What stands for compiled kernels here is torch, and makes tensors; only those are not counted. Sampling has memory of
its own there (model/workspaces.py).
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.checkpoints import tiny_model
from support.flashinfer_emulation import Emulation, emulated_flashinfer
from support.gpu_runners import build_on_gpu
from support.live_storage import made_by_operations
from torch.utils._python_dispatch import _disable_current_modes

from octavo.model.memory import RunnerLimits
from octavo.model.runner import ModelRunner
from octavo.model.step import Admission, Row, SamplingParams, Step
from octavo.model.weights.checkpoint import open_checkpoint
from octavo.model.workspaces import Workspaces

SMALL_BYTES = 4096
LIMITS = RunnerLimits(max_model_len=256, max_rows=8, max_tokens=128, block_size=16, blocks=64)
KERNELS = (
    "_paged_run",
    "_rmsnorm",
    "_fused_add_rmsnorm",
    "_rope",
    "_silu_and_mul",
    "multiply",
    "multiply_fp8",
    "_plan",
)


@pytest.fixture(scope="module", autouse=True)
def emulation() -> Iterator[Emulation]:
    with emulated_flashinfer() as found:
        yield found


@pytest.fixture(params=[(False, False), (True, False), (True, True)], ids=["bfloat16", "fp8", "fp8 and its cache"])
def runner(request: pytest.FixtureRequest, tmp_path: Path) -> ModelRunner:
    tiny_model(tmp_path, "qwen3", heads=4, kv_heads=2, head_dim=64, vocabulary=1100)
    fp8, fp8_cache = request.param
    workspaces = Workspaces(fp8_cache=fp8_cache, float_bytes=1 << 20)
    return build_on_gpu(open_checkpoint(tmp_path), LIMITS, workspaces=workspaces, fp8=fp8)[0]


def unseen(method: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any, **keywords: Any) -> Any:
        with _disable_current_modes():
            return method(*arguments, **keywords)

    return run


def steps() -> Iterator[Step]:
    """A prompt in two chunks, the second beside a decode, then decodes."""
    tokens = tuple(range(200))
    yield Step((), (Admission(0, tokens[:20], 20, (0, 1), SamplingParams()),), (), (Row(0, 0, 20, sample=False),))
    admission = Admission(1, tokens, 200, tuple(range(2, 15)), SamplingParams())
    yield Step((), (admission,), (), (Row(1, 0, 128, sample=False),))
    yield Step((), (), (), (Row(0, 19, 1, sample=False), Row(1, 128, 72, sample=False)))
    yield Step((), (), (), (Row(0, 19, 1, sample=False), Row(1, 199, 1, sample=False)))


def largest(runner: ModelRunner) -> int:
    def run(step: Step) -> None:
        runner.submit(step).wait()
        runner.model.logits(runner.arena, torch.arange(min(8, step.tokens)))

    return max(max(made_by_operations(lambda step=step: run(step)), default=0) for step in steps())


def test_no_forward_pass_makes_a_tensor_larger_than_4_kib(runner: ModelRunner, emulation: Emulation) -> None:
    with ExitStack() as stack:
        for name in KERNELS:
            stack.enter_context(mock.patch.object(emulation, name, unseen(getattr(emulation, name))))
        for name in ("multiply", "fp8.multiply"):
            module = "cuda.multiply" if name == "multiply" else name
            kernel = emulation.multiply if name == "multiply" else emulation.multiply_fp8
            stack.enter_context(mock.patch(f"octavo.model.kernels.{module}", kernel))
        assert largest(runner) <= SMALL_BYTES


def test_the_witness_would_see_one(runner: ModelRunner) -> None:
    assert largest(runner) > SMALL_BYTES
