from pathlib import Path
from random import Random

import pytest
import torch
from support.checkpoints import tiny_model
from support.driving import Driver, Request
from support.runners import SMALL, build
from torch import Tensor

from octavo.model.kernels.load import load_kernels
from octavo.model.kernels.native import NativeKernels
from octavo.model.runner import ModelRunner


def native(dtype: torch.dtype = torch.float32) -> NativeKernels:
    kernels = load_kernels(dtype, threads=2)
    if not isinstance(kernels, NativeKernels):
        pytest.skip("there is no compiler, or OCTAVO_KERNELS asks for torch")
    return kernels


WEIGHT, NORM = torch.ones(16), torch.empty(2, 16)


def add(kernels: NativeKernels, x: Tensor, branch: Tensor) -> None:
    """x += branch, both [2, 16] or [1, 16], in a call of the library."""
    kernels.rms_norm(x, WEIGHT, 1e-5, NORM[: len(x)], branch)


def test_what_is_repeated_computes_on_what_the_memory_holds_by_then() -> None:
    kernels = native()
    x, branch = torch.zeros(2, 16), torch.ones(2, 16)
    repeat = kernels.library.record(lambda: add(kernels, x, branch))
    assert x.eq(1).all()
    branch.fill_(3)
    repeat()
    repeat()
    assert x.eq(7).all()


def test_a_repetition_ends_at_an_id_that_is_out_of_range() -> None:
    kernels = native()
    table = kernels.linear(10, 16)
    table.load(0, torch.arange(160.0).view(10, 16))
    ids, found, x, branch = (
        torch.tensor([3], dtype=torch.int32),
        torch.empty(1, 16),
        torch.zeros(1, 16),
        torch.ones(1, 16),
    )

    def body() -> None:
        table.gather(ids, out=found)
        add(kernels, x, branch)

    repeat = kernels.library.record(body)
    ids.fill_(10)
    with pytest.raises(ValueError, match="out of range"):
        repeat()
    assert x.eq(1).all()


def test_an_error_while_recording_ends_the_recording() -> None:
    kernels = native()
    x = torch.zeros(1, 16)

    def body() -> None:
        add(kernels, x, torch.ones(1, 16))
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        kernels.library.record(body)
    repeat = kernels.library.record(lambda: add(kernels, x, x))
    repeat()
    assert x.eq(4).all()


def test_a_runner_that_repeats_gives_the_bits_of_one_that_does_not(tmp_path: Path) -> None:
    tiny_model(tmp_path, "llama")
    random = Random(3)
    prompts = [tuple(random.choices(range(100), k=length)) for length in (1, 9, 20, 40)]
    repeating, plain = build(tmp_path, dtype=torch.bfloat16)[0], build(tmp_path, dtype=torch.bfloat16)[0]
    plain._record = None

    def answers(runner: ModelRunner) -> list[Request]:
        driver = Driver(runner, block_size=SMALL.block_size, max_tokens=SMALL.max_tokens)
        return list(driver.run([Request(prompt, 24) for prompt in prompts], delays=[0, 2, 3, 5]))

    assert answers(repeating) == answers(plain)
    assert not plain._repeats
    assert len(repeating._repeats) >= 3
