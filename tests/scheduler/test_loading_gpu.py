"""--device cuda, from the options to tokens: on CPU tensors, with FlashInfer's compiled modules and CUDA emulated."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.checkpoints import tiny_model
from support.flashinfer_emulation import Emulation
from support.gpu_runners import FakeCapture, emulated_gpu

from octavo.model import placement
from octavo.model.device import CPU, DeviceError, choose_device, gpu_problem
from octavo.model.graphs import captured_sizes
from octavo.model.kernels.cuda import CudaKernels
from octavo.model.placement import Placement
from octavo.model.step import SamplingParams
from octavo.model.workspaces import FLOAT_WORKSPACE, Workspaces
from octavo.scheduler import loading
from octavo.scheduler.messages import EngineConfig, MemoryLine, Ready, Submission
from octavo.scheduler.planning import GPU_RUNTIME
from octavo.scheduler.sizing import ConfigurationError

GIB = 1 << 30


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    tiny_model(path, "llama", heads=4, kv_heads=2, head_dim=64, max_context=256, eos_token_id=5)
    return path


@pytest.fixture
def gpu() -> Iterator[Emulation]:
    with emulated_gpu(EagerCapture) as found:
        yield found


class EagerCapture(FakeCapture):
    def _poison(self) -> None:
        """The runner is not at hand here; test_gpu_engine.py poisons."""


def config(directory: Path, **fields: Any) -> EngineConfig:
    return EngineConfig(model=str(directory), max_num_seqs=4, max_num_batched_tokens=32, **fields)


def served(directory: Path, **fields: Any) -> tuple[list[int | None], Any]:
    scheduler, runner, ready = loading.load(config(directory, **fields))
    greedy = SamplingParams(temperature=0.0, ignore_eos=True)
    assert scheduler.add(Submission(request=1, prompt=(1, 2, 3), params=greedy, max_tokens=6)) is None
    tokens = []
    while (step := scheduler.schedule()) is not None:
        tokens += [event.token for event in scheduler.commit(step, runner.submit(step).wait())]
    return tokens, ready


def assert_as_planned(ready: Ready) -> dict[str, MemoryLine]:
    """The memory of an engine by bucket, after comparing the three buckets with their plans."""
    memory = {line.bucket: line for line in ready.memory}
    for bucket in ("weights", "cache", "activations"):
        assert memory[bucket].allocated == memory[bucket].planned > 0
    return memory


def test_an_engine_on_a_gpu_is_planned_built_warmed_and_serves(gpu: Emulation, directory: Path) -> None:
    tokens, ready = served(directory)
    assert len(tokens) == 6
    memory = assert_as_planned(ready)
    assert (ready.kernels, ready.dtype) == ("flashinfer", "bfloat16")
    assert memory["runtime"].planned == GPU_RUNTIME
    spent = sum(memory[bucket].planned for bucket in ("weights", "cache", "activations"))
    assert 0 <= 4 * GIB - GPU_RUNTIME - spent < ready.block_size * ready.kv_bytes_per_token
    eager, _ = served(directory, enforce_eager=True)
    assert eager == tokens


def test_an_engine_in_8_bits_holds_and_says_what_was_planned(gpu: Emulation, directory: Path) -> None:
    tokens, ready = served(directory, quantization="fp8")
    assert len(tokens) == 6
    _, usual = served(directory)
    assert_as_planned(ready)
    assert (ready.dtype, ready.quantised, usual.quantised) == ("bfloat16", ("fp8",), ())
    assert ready.memory[0].allocated < usual.memory[0].allocated
    assert (ready.batch_invariant, usual.batch_invariant) == (False, False)
    assert "add in orders that depend on the whole step" in ready.batch_invariance_reason


def test_a_cache_in_8_bits_holds_twice_as_much(gpu: Emulation, directory: Path) -> None:
    tokens, ready = served(directory, kv_cache_dtype="fp8_e4m3")
    assert len(tokens) == 6
    _, usual = served(directory)
    assert_as_planned(ready)
    assert 2 * ready.kv_bytes_per_token == usual.kv_bytes_per_token
    assert 1.98 < ready.blocks / usual.blocks <= 2


def test_every_kernel_has_run_before_the_engine_is_ready(gpu: Emulation, directory: Path) -> None:
    loading.load(config(directory, attention_decode="xqa"))
    assert {path for path, _ in gpu.calls.runs} == {"fa2", "xqa"}
    assert set(gpu.calls.kernels) == {"rmsnorm", "fused_add_rmsnorm", "rope", "silu_and_mul", "multiply"}


def test_a_workspace_that_flashinfer_asks_for_is_planned_and_allocated(
    gpu: Emulation, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("support.flashinfer_emulation.FLOAT_WORKSPACE", FLOAT_WORKSPACE + 4096)
    _, _, ready = loading.load(config(directory))
    monkeypatch.setattr("support.flashinfer_emulation.FLOAT_WORKSPACE", 1)
    _, _, usual = loading.load(config(directory))
    activations = [next(line for line in found.memory if line.bucket == "activations") for found in (ready, usual)]
    assert activations[0].allocated - activations[1].allocated == 4096
    assert activations[0].allocated == activations[0].planned


def test_what_flashinfer_cannot_do_is_refused_in_one_line(
    gpu: Emulation, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model(tmp_path, "llama", head_dim=16)
    for path, option, named in (
        (tmp_path, {}, "head_dim 16: FlashInfer's attention knows 64, 128, 256"),
        (
            directory,
            {"kv_cache_dtype": "fp8_e4m3", "attention_decode": "xqa"},
            "--kv-cache-dtype fp8_e4m3: fa3 and xqa",
        ),
        (directory, {"dtype": "float32"}, "--dtype float32 is not for a GPU"),
        (
            directory,
            {"attention_decode": "xqa", "block_size": 8},
            "--block-size 8: --attention-decode xqa takes 16, 32",
        ),
        (directory, {"kv_blocks": 20_000_000}, "--kv-blocks 20000000 needs"),
    ):
        with pytest.raises(ConfigurationError, match=named) as raised:
            loading.load(config(path, **option))
        assert raised.value.exit_code == 64
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device=None: (GIB, 4 * GIB))
    with pytest.raises(ConfigurationError, match=f"can give only {GIB} now"):
        loading.load(config(directory))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device=None: (8, 0))
    for option, named in (
        ({"attention_prefill": "fa3"}, "fa3 needs a Hopper"),
        ({"attention_decode": "xqa"}, "xqa needs"),
    ):
        with pytest.raises(ConfigurationError, match=named):
            loading.load(config(directory, **option))


def test_a_gpu_that_is_missing_too_old_or_without_flashinfer_is_refused_or_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert (gpu_problem() or "").startswith("there is no usable GPU (torch ")
    assert choose_device("cpu", lambda: None) == choose_device("auto", lambda: None) == CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    old = "NVIDIA T4 has compute capability 7.5, and 8.0 is the least that serves"
    with pytest.raises(DeviceError, match=f"--device cuda: {old}; or use --device cpu") as raised:
        choose_device("cuda", lambda: None)
    assert raised.value.exit_code == 69
    assert choose_device("auto", lambda: None) == CPU
    assert f"computing on the CPU, not on the GPU: {old}" in caplog.text
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(DeviceError, match="FlashInfer is missing"):
        choose_device("cuda", lambda: "FlashInfer is missing")
    assert choose_device("auto", lambda: None) == torch.device("cuda", 1)


def test_captured_sizes_are_powers_and_multiples_up_to_the_most_rows() -> None:
    assert captured_sizes(1) == (1,)
    assert captured_sizes(5) == (1, 2, 4, 5)
    assert captured_sizes(32) == (1, 2, 4, 8, 16, 24, 32)
    assert captured_sizes(27) == (1, 2, 4, 8, 16, 24, 27)
    assert len(captured_sizes(256)) == 35


def test_an_eager_placement_captures_nothing(gpu: Emulation) -> None:
    found = Placement(CPU, torch.bfloat16, CudaKernels(torch.bfloat16, CPU), Workspaces())
    with mock.patch.object(placement, "CudaCapture", lambda device: ("captures on", device)):
        assert found.capture(eager=True) is None
        assert found.capture(eager=False) == ("captures on", CPU)
