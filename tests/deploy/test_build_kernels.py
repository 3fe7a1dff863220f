"""Kernels compiled ahead of time. What needs nvcc runs with `pytest -m nvcc`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "deploy" / "build_kernels.py"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})


@pytest.fixture
def tools(tmp_path: Path) -> dict[str, str]:
    """A PATH with something called nvcc in it, and a place for what FlashInfer writes when it is imported."""
    (tmp_path / "nvcc").touch(mode=0o755)
    return {"PATH": f"{tmp_path}:{os.environ['PATH']}", "FLASHINFER_WORKSPACE_BASE": str(tmp_path)}


def test_the_modules_that_a_server_loads_are_named(tools: dict[str, str]) -> None:
    listed = run("llama-3-70b", "--list", **tools)
    assert (listed.returncode, listed.stdout.split()) == (0, ["silu", "norm", "rope", "fa2"])
    listed = run("llama-3-70b", "--list", "--attention-prefill", "fa3", "--attention-decode", "xqa", **tools)
    assert listed.stdout.split() == ["silu", "norm", "rope", "fa2", "fa3", "xqa"]


def test_a_missing_compiler_and_an_unknown_module_end_in_one_line(tools: dict[str, str]) -> None:
    unknown = run("llama-3-70b", "--only", "mla", **tools)
    assert (unknown.returncode, unknown.stderr) == (1, "--only mla: the modules are silu, norm, rope, fa2\n")
    missing = run("llama-3-70b", PATH="", FLASHINFER_WORKSPACE_BASE=tools["FLASHINFER_WORKSPACE_BASE"])
    assert (missing.returncode, missing.stderr) == (1, "nvcc is not in PATH: install the CUDA toolkit\n")


@pytest.mark.nvcc
def test_a_module_compiles_for_hopper_without_a_gpu(tmp_path: Path) -> None:
    built = run(
        "llama-3-70b", "--only", "silu", "--output", str(tmp_path / "aot"), FLASHINFER_WORKSPACE_BASE=str(tmp_path)
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (module,) = (tmp_path / "aot").rglob("*.so")
    assert module.stat().st_size > 10_000
