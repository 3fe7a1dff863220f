"""Kernels compiled ahead of time. What needs nvcc runs with `pytest -m nvcc`."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
SCRIPT = TESTS.parent / "deploy" / "build_kernels.py"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})


@pytest.fixture
def tools(tmp_path: Path) -> dict[str, str]:
    """A PATH with something called nvcc in it, and a place for what FlashInfer writes when it is imported."""
    (tmp_path / "nvcc").touch(mode=0o755)
    return {"PATH": f"{tmp_path}:{os.environ['PATH']}", "FLASHINFER_WORKSPACE_BASE": str(tmp_path)}


def modules(backend: str, head_dim: int, window: int, base: Path) -> dict[str, Any]:
    """What the attention of a server loads in the image: no compiler, and one writable place."""
    environment = {
        "PATH": str(base / "empty"),
        "CUDA_HOME": str(base / "empty"),
        "FLASHINFER_CUDA_ARCH_LIST": "9.0a",  # in the place of the GPU
        "FLASHINFER_DISABLE_JIT": "1",
        "FLASHINFER_WORKSPACE_BASE": str(base),
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, str(TESTS / "support" / "flashinfer_modules.py"), backend, str(head_dim), str(window)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("backend", "head_dim", "window"),
    [("flashinfer", 128, 0), ("flashinfer-fa3", 64, 0), ("flashinfer-xqa", 64, 32), ("flashinfer-fp8", 128, 0)],
)
def test_the_modules_that_a_server_loads_are_those_that_are_built(
    backend: str, head_dim: int, window: int, tmp_path: Path
) -> None:
    """By the names under which FlashInfer's own wrappers look for them, where nothing can be compiled."""
    found = modules(backend, head_dim, window, tmp_path)
    assert found["asked"] == found["built"]
    assert len(found["built"]) == 4 + (backend in ("flashinfer-fa3", "flashinfer-xqa"))
    assert Path(found["kernels"]).parts[-3:] == ("flashinfer", "data", "aot")
    assert found["workspace"].startswith(str(tmp_path))


def test_the_modules_of_several_models_are_listed(tools: dict[str, str]) -> None:
    options = ["--list", "--attention-prefill", "fa3", "--attention-decode", "xqa", "--sliding-window"]
    listed = run("llama-3-70b", "smollm2", *options, **tools)
    assert listed.returncode == 0, listed.stderr
    names = [line.split() for line in listed.stdout.splitlines()]
    assert [name for name, _module in names] == ["silu", "norm", "rope", "fa2", "fa3", "xqa"] * 2
    for (_name, module), head_dim in zip([*names[3:6], *names[9:12]], [128] * 3 + [64] * 3, strict=True):
        assert f"_{head_dim}_" in module
        assert "use_swa_True" in module or "use_sliding_window_True" in module


def test_a_missing_compiler_and_an_unknown_module_end_in_one_line(tools: dict[str, str]) -> None:
    unknown = run("llama-3-70b", "--only", "mla", **tools)
    assert (unknown.returncode, unknown.stderr) == (1, "--only mla: the modules are silu, norm, rope, fa2\n")
    missing = run("llama-3-70b", PATH="", FLASHINFER_WORKSPACE_BASE=tools["FLASHINFER_WORKSPACE_BASE"])
    assert (missing.returncode, missing.stderr) == (1, "nvcc is not in PATH: install the CUDA toolkit\n")


@pytest.mark.nvcc
def test_a_module_compiles_for_hopper_without_a_gpu_and_loads_without_a_compiler(tmp_path: Path) -> None:
    aot = tmp_path / "aot"
    built = run("llama-3-70b", "--only", "silu", "--output", str(aot), FLASHINFER_WORKSPACE_BASE=str(tmp_path))
    assert built.returncode == 0, built.stdout + built.stderr
    (module,) = aot.rglob("*.so")
    assert module.stat().st_size > 10_000
    program = (
        "import pathlib; from flashinfer.jit import env; from flashinfer.jit.activation import gen_act_and_mul_module; "
        f"env.FLASHINFER_AOT_DIR = pathlib.Path({str(aot)!r}); "
        "print(gen_act_and_mul_module('silu').build_and_load().silu_and_mul)"
    )
    environment = {**os.environ, "FLASHINFER_DISABLE_JIT": "1", "FLASHINFER_CUDA_ARCH_LIST": "9.0a"}
    environment |= {"PATH": str(tmp_path), "CUDA_HOME": str(tmp_path), "FLASHINFER_WORKSPACE_BASE": str(tmp_path / "w")}
    toolkit = Path(shutil.which("nvcc") or "").resolve().parent.parent
    libraries = [directory / "lib64" for directory in (toolkit, Path("/usr/local/cuda"))]  # of which torch has its own
    environment["LD_LIBRARY_PATH"] = os.pathsep.join(map(str, libraries))
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment
    )
    assert loaded.returncode == 0, loaded.stderr
