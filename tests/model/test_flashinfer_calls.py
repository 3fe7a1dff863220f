"""Every call of Octavo's binds to the installed FlashInfer's signatures, and says what must not be defaulted."""

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from support.attention import FLASHINFER, Bench, Row, Shape
from support.flashinfer_emulation import PLAN_TAIL, Emulation, emulated_flashinfer

from octavo.model.attention.flashinfer import FlashInferAttention, float_workspace
from octavo.model.device import CPU, DeviceError
from octavo.model.flashinfer_library import TESTED_VERSIONS, flashinfer_problem, kernels_problem, load_flashinfer
from octavo.model.kernels.cuda import CudaKernels
from octavo.model.memory import RunnerLimits

BFLOAT16 = Shape(dtype=torch.bfloat16)


@pytest.fixture(autouse=True)
def emulation() -> Iterator[Emulation]:
    with emulated_flashinfer() as found:
        yield found


class Spy:
    """Notes the calls of some functions and lets them through."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack = stack
        self.calls: dict[str, list[dict[str, Any]]] = {}

    def on(self, owner: Any, name: str, *, method: bool = False) -> None:
        original = getattr(owner, name)
        calls = self.calls.setdefault(f"{owner.__name__}.{name}" if method else name, [])

        def noted(*positional: Any, **keywords: Any) -> Any:
            assert len(positional) == int(method), f"{name} is given arguments by position"
            inspect.signature(original).bind(*positional, **keywords)
            calls.append(keywords)
            return original(*positional, **keywords)

        self.stack.enter_context(mock.patch.object(owner, name, noted))


def spied(run: Callable[[], None]) -> dict[str, list[dict[str, Any]]]:
    library = load_flashinfer()
    decode, prefill = library.BatchDecodeWithPagedKVCacheWrapper, library.BatchPrefillWithPagedKVCacheWrapper
    with ExitStack() as stack:
        spy = Spy(stack)
        for wrapper in (decode, prefill):
            for name in ("plan", "run"):
                spy.on(wrapper, name, method=True)
        for name in ("rmsnorm", "fused_add_rmsnorm", "apply_rope_with_cos_sin_cache_inplace", "silu_and_mul"):
            spy.on(library, name)
        spy.on(importlib.import_module("flashinfer.decode"), "xqa_batch_decode_with_kv_cache")
        run()
        return spy.calls


@pytest.mark.parametrize("backend", ["flashinfer", "flashinfer-fp8"])
def test_the_planner_is_asked_for_memory_with_the_types_of_the_plans(backend: str) -> None:
    asked: list[dict[str, Any]] = []
    config, limits = BFLOAT16.config(), RunnerLimits(64, 4, 16, 16, 8)
    library, fp8 = load_flashinfer(), backend == "flashinfer-fp8"
    with ExitStack() as stack:
        spy = Spy(stack)
        for wrapper in (library.BatchDecodeWithPagedKVCacheWrapper, library.BatchPrefillWithPagedKVCacheWrapper):
            spy.on(wrapper, "workspace_size", method=True)
        float_workspace(config, limits, torch.bfloat16, CPU, fp8_cache=fp8)
        asked += [keywords for calls in spy.calls.values() for keywords in calls]
    assert len(asked) > 6
    for keywords in asked:
        assert keywords["q_data_type"] == keywords["o_data_type"] == torch.bfloat16
        assert keywords["kv_data_type"] == (torch.float8_e4m3fn if fp8 else torch.bfloat16)


def attend(backend: str) -> None:
    bench = Bench.of(BFLOAT16, backend)
    old, new = bench.sequence(40), bench.sequence(20)
    bench.step([Row(old, 0, 39)])
    bench.step([Row(old, 39, 1), Row(new, 0, 20)])


@pytest.mark.parametrize("backend", ["flashinfer", "flashinfer-fp8"])
def test_the_attention_calls_say_types_scale_mask_and_lengths_themselves(backend: str) -> None:
    calls = spied(lambda: attend(backend))
    kept = torch.float8_e4m3fn if backend == "flashinfer-fp8" else torch.bfloat16
    decode, prefill = (f"Batch{kind}WithPagedKVCacheWrapper" for kind in ("Decode", "Prefill"))
    plans = calls[f"{decode}.plan"] + calls[f"{prefill}.plan"]
    assert len(calls[f"{decode}.plan"]) == 1
    assert len(calls[f"{prefill}.plan"]) == 2
    planned = load_flashinfer().BatchDecodeWithPagedKVCacheWrapper._plan_impl
    for keywords in calls[f"{decode}.plan"]:
        inspect.signature(planned).bind(None, **keywords)
    for keywords in plans:
        types = [keywords[f"{name}_data_type"] for name in ("q", "kv", "o")]
        assert types == [torch.bfloat16, kept, torch.bfloat16]
        assert keywords["sm_scale"] == 64**-0.5
        assert keywords["seq_lens"].is_cpu
    assert all(keywords["causal"] is True for keywords in calls[f"{prefill}.plan"])
    runs = calls[f"{decode}.run"] + calls[f"{prefill}.run"]
    assert len(runs) == 3
    assert all(keywords["out"] is not None for keywords in runs)


def test_the_call_of_xqa_binds() -> None:
    (call,) = spied(lambda: attend("flashinfer-xqa"))["xqa_batch_decode_with_kv_cache"]
    assert call["kv_layout"] == "NHD"
    assert (call["bmm1_scale"], call["bmm2_scale"]) == (64**-0.5, 1.0)


def test_the_calls_of_the_dense_operations_bind_and_write_where_they_are_told() -> None:
    kernels = CudaKernels(torch.bfloat16, CPU)
    x, branch, weight = (torch.randn(3, 64).bfloat16(), torch.randn(3, 64).bfloat16(), torch.randn(64).bfloat16())
    out, gated = torch.empty_like(x), torch.empty(3, 32, dtype=torch.bfloat16)
    heads = torch.randn(3, 2, 64).bfloat16()
    table, positions = torch.randn(9, 64), torch.tensor([0, 3, 8], dtype=torch.int32)

    def run() -> None:
        kernels.rms_norm(x, weight, 1e-5, out)
        kernels.rms_norm(x, weight, 1e-5, branch, branch)
        kernels.rotate(heads, heads.clone(), positions, table)
        kernels.silu_mul(x, gated)

    calls = spied(run)
    assert calls["rmsnorm"][0]["eps"] == calls["fused_add_rmsnorm"][0]["eps"] == 1e-5
    assert calls["rmsnorm"][0]["out"] is out
    assert calls["silu_and_mul"][0]["out"] is gated
    assert calls["apply_rope_with_cos_sin_cache_inplace"][0]["cos_sin_cache"].dtype == torch.float32
    with pytest.raises(ValueError, match="memory of its own"):
        kernels.silu_mul(x)


def test_the_emulation_knows_every_tested_version() -> None:
    assert set(PLAN_TAIL) == set(TESTED_VERSIONS)
    assert load_flashinfer().__version__ in TESTED_VERSIONS


def test_a_version_that_was_never_tested_or_is_missing_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert flashinfer_problem() is None
    monkeypatch.setattr("octavo.model.flashinfer_library.version", lambda _name: "0.6.13")
    problem = flashinfer_problem()
    assert problem is not None
    assert problem.startswith("FlashInfer 0.6.13 was never tested with Octavo: pip install flashinfer-python==")
    load_flashinfer.cache_clear()
    with pytest.raises(DeviceError, match="never tested") as raised:
        load_flashinfer()
    assert raised.value.exit_code == 69


def test_a_package_without_kernels_or_a_compiler_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    place = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr("octavo.model.flashinfer_library.find_spec", lambda _name: place)
    assert "no compiled kernels and no nvcc" in (kernels_problem() or "")
    module = tmp_path / "data" / "aot" / "norm" / "norm.so"
    module.parent.mkdir(parents=True)
    module.touch()
    monkeypatch.delenv("FLASHINFER_CUDA_ARCH_LIST", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    assert kernels_problem() is None
    for built, fits in (("8.6", True), ("8.0", True), ("8.9", False), ("9.0a 8.0", True), ("9.0a", False)):
        monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", built)
        assert (kernels_problem() is None) == fits
    assert kernels_problem() == "FlashInfer's kernels are compiled for 9.0a, the GPU is 8.6: build for that"
    module.unlink()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    assert kernels_problem() is None


def test_tensors_that_the_kernels_would_misread_are_refused() -> None:
    bench = Bench.of(BFLOAT16, "flashinfer")
    sequence = bench.sequence(4)
    bench.step([Row(sequence, 0, 4)])
    q, k = sequence.q.clone(), sequence.k.clone()
    for wrong in (
        (q.float(), k, k, q),
        (q, k.half(), k, q),
        (q, k, k.float(), q),
        (q, k, k, q.float()),
        (q[:3], k, k, q),
    ):
        with pytest.raises(ValueError, match=r"expected torch.bfloat16 on cpu with 4 tokens"):
            bench.backend.forward(0, *wrong)


def test_indices_of_another_width_and_steps_that_do_not_fit_are_refused() -> None:
    bench = Bench.of(BFLOAT16, "flashinfer")
    batch = bench.batch([Row(bench.sequence(4), 0, 4)])
    wide = replace(batch, block_indptr=batch.block_indptr.long())
    with pytest.raises(ValueError, match=r"block_indptr: expected int32 on the host, got torch.int64"):
        bench.backend.plan(wide)
    with pytest.raises(ValueError, match="only rows of one token"):
        bench.backend.plan(batch, padded_rows=2)
    singles = bench.batch([Row(bench.sequence(4), 3, 1), Row(bench.sequence(4), 3, 1)])
    with pytest.raises(ValueError, match="2 rows do not fit into a captured step of 1"):
        bench.backend.plan(singles, padded_rows=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_dtype_without_kernels_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="bfloat16 or float16, not in"):
        CudaKernels(dtype, CPU)
    shape = Shape(dtype=dtype)
    with pytest.raises(ValueError, match="bfloat16 or float16, not in"):
        FlashInferAttention(shape.config(), shape.store(2), FLASHINFER["flashinfer"], dtype)


def test_pinned_memory_is_not_planned_into_again_before_the_device_has_read_it() -> None:
    log: list[str] = []

    class Fence:
        def __init__(self, _device: torch.device) -> None:
            pass

        def wait(self) -> None:
            log.append("wait")

        def set(self) -> None:
            log.append("set")

    plan = Emulation._plan

    def noted(self: Emulation, *arguments: Any) -> Any:
        log.append("plan")
        return plan(self, *arguments)

    with (
        mock.patch("octavo.model.attention.flashinfer.Fence", Fence),
        mock.patch.object(Emulation, "_plan", noted),
    ):
        attend("flashinfer")
    assert log == ["wait", "plan", "set"] * 3
