"""Compiling the kernels: the cache, parallel builders, damage, and machines without a compiler."""

import ctypes
import logging
import math
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from octavo.model.kernels import cores, load
from octavo.model.kernels.build import (
    SOURCES,
    VARIANTS,
    BuildError,
    build_library,
    cache_directory,
    can_build_library,
)
from octavo.model.kernels.cores import available_cores, cgroup_cores
from octavo.model.kernels.fallback import TorchKernels
from octavo.model.kernels.load import available_paths, load_kernels
from octavo.model.kernels.native import NativeKernels

ANSWER = """// variants: plain avx2
#include "answer.h"
OCTAVO_KERNEL(answer)(int* result) { *result = ANSWER; }
"""


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A small library, for speed."""
    folder = tmp_path / "sources"
    folder.mkdir()
    shutil.copy(SOURCES / "parallel.h", folder)
    (folder / "answer.h").write_text('#include "parallel.h"\n#define ANSWER 42\n')
    (folder / "answer.cpp").write_text(ANSWER)
    return folder


@pytest.fixture
def compilations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh cache, and a file that gets a line for each library that the compiler links."""
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "cache"))
    log, compiler = tmp_path / "compilations", tmp_path / "compiler"
    log.touch()
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *-shared*) echo linked >> {log};; esac\nexec g++ "$@"\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    return log


def answer(library: Path, variant: str = "plain") -> int:
    result = ctypes.c_int()
    ctypes.CDLL(str(library))[f"answer_{variant}"](ctypes.byref(result))
    return result.value


def linked(log: Path) -> int:
    return len(log.read_text().splitlines())


def test_a_library_is_built_once_and_found_again(sources: Path, compilations: Path) -> None:
    library = build_library(sources)
    assert answer(library) == 42
    assert build_library(sources) == library
    assert linked(compilations) == 1
    assert {path.name for path in library.parent.iterdir()} == {library.name, "kernels.lock"}


def test_another_source_or_header_is_another_library(sources: Path, compilations: Path) -> None:
    first = build_library(sources)
    (sources / "answer.h").write_text('#include "parallel.h"\n#define ANSWER 43\n')
    second = build_library(sources)
    assert (answer(first), answer(second)) == (42, 43)


@pytest.mark.parametrize("damage", ["truncated", "one byte", "empty"])
def test_a_damaged_library_is_built_again(sources: Path, compilations: Path, damage: str) -> None:
    library = build_library(sources)
    content = bytearray(library.read_bytes())
    content[len(content) // 2] ^= 1
    library.write_bytes({"truncated": content[: len(content) // 2], "one byte": content, "empty": b""}[damage])
    assert answer(build_library(sources)) == 42
    assert linked(compilations) == 2


def test_of_two_processes_one_builds_and_the_other_waits(sources: Path, compilations: Path) -> None:
    code = (
        "import sys, pathlib; from octavo.model.kernels.build import build_library as b; b(pathlib.Path(sys.argv[1]))"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code, str(sources)]) for _ in range(2)]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    assert linked(compilations) == 1
    assert answer(build_library(sources)) == 42


def test_a_compiler_error_is_reported_in_one_line(sources: Path, compilations: Path) -> None:
    (sources / "broken.cpp").write_text("int f() { return missing; }\n")
    with pytest.raises(BuildError, match=r"broken\.cpp:1.*missing") as error:
        build_library(sources)
    assert "\n" not in str(error.value)
    assert {path.name for path in cache_directory().iterdir()} == {"kernels.lock"}, "nothing half-made stays"


def test_an_unknown_variant_is_an_error(sources: Path, compilations: Path) -> None:
    (sources / "answer.cpp").write_text(ANSWER.replace("avx2", "avx3"))
    with pytest.raises(BuildError, match="avx3"):
        build_library(sources)


def test_without_a_compiler_an_earlier_library_serves(
    sources: Path, compilations: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = build_library(sources)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build_library(sources) == library
    assert can_build_library(sources)
    library.write_bytes(b"damaged")
    assert not can_build_library(sources)
    with pytest.raises(BuildError, match="no-such-compiler was not found"):
        build_library(sources)


def test_without_compiler_and_library_torch_computes_and_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.delenv("OCTAVO_KERNELS", raising=False)
    with caplog.at_level(logging.INFO):
        kernels = load_kernels(torch.bfloat16, threads=2)
    assert isinstance(kernels, TorchKernels)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no-such-compiler" in caplog.text
    monkeypatch.setenv("OCTAVO_KERNELS", "plain")
    with pytest.raises(BuildError, match="no-such-compiler"):
        load_kernels(torch.bfloat16, threads=2)


def test_a_cache_that_others_may_write_is_refused(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(shared))
    with pytest.raises(PermissionError, match="OCTAVO_CACHE_DIR"):
        build_library(sources)


def test_a_cache_that_cannot_be_written_is_replaced_by_a_private_one(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.delenv("OCTAVO_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    library = build_library(sources)
    assert library.parent.parent == tmp_path
    assert library.parent.stat().st_mode & 0o077 == 0
    assert answer(library) == 42


def test_a_chosen_cache_that_cannot_be_written_is_an_error(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(PermissionError, match=r"OCTAVO_CACHE_DIR: .*file/cache cannot be written to"):
        build_library(sources)


def test_nothing_is_written_beside_an_earlier_library_with_a_compiler_or_without(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "image"))
    library = build_library(sources)
    (library.parent / "kernels.lock").unlink()
    assert build_library(sources) == library
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build_library(sources) == library
    assert list(library.parent.iterdir()) == [library]
    library.parent.chmod(0o777)
    with pytest.raises(PermissionError, match="OCTAVO_CACHE_DIR"):
        build_library(sources)


def test_the_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OCTAVO_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_directory() == Path.home() / ".cache" / "octavo"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_directory() == Path("/xdg/octavo")
    monkeypatch.setenv("OCTAVO_CACHE_DIR", "/own")
    assert cache_directory() == Path("/own")


def test_the_kernels_of_this_machine_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OCTAVO_KERNELS", raising=False)
    for dtype in (torch.bfloat16, torch.float32):
        paths = available_paths(dtype)
        assert paths[-1] == "plain"
        assert load_kernels(dtype, threads=2).name == paths[0]
        for path in (*paths, "torch"):
            monkeypatch.setenv("OCTAVO_KERNELS", path)
            kernels = load_kernels(dtype, threads=2)
            assert isinstance(kernels, TorchKernels if path == "torch" else NativeKernels)
            assert kernels.name == path
        monkeypatch.delenv("OCTAVO_KERNELS")


def test_kernels_that_cannot_run_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for flags, name in ((frozenset[str](), "avx2"), (load.CPU_FLAGS["avx512"], "amx_bf16"), (None, "avx1024")):
        with monkeypatch.context() as patch:
            patch.setenv("OCTAVO_KERNELS", name)
            if flags is not None:
                patch.setattr(load, "_cpu_flags", lambda flags=flags: flags)
            with pytest.raises(ValueError, match=rf"OCTAVO_KERNELS={name}.*plain, torch"):
                load_kernels(torch.bfloat16, threads=2)
    monkeypatch.setenv("OCTAVO_KERNELS", "avx512_bf16")
    with pytest.raises(ValueError, match="OCTAVO_KERNELS=avx512_bf16"):
        load_kernels(torch.float32, threads=2)
    monkeypatch.delenv("OCTAVO_KERNELS")
    with pytest.raises(ValueError, match="float16"):
        load_kernels(torch.float16)
    with pytest.raises(ValueError, match="threads"):
        load_kernels(torch.float32, threads=0)


def test_every_path_is_compiled_and_every_variant_used() -> None:
    assert set(load.CPU_FLAGS) == set(VARIANTS)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, math.inf),
        ({"cpu.max": "max 100000\n"}, math.inf),
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, math.inf),
        ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 0.5),
    ],
)
def test_the_quota_of_a_container_counts(tmp_path: Path, files: dict[str, str], expected: float) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert cgroup_cores(tmp_path) == expected


def test_the_affinity_of_the_process_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 <= available_cores() <= len(os.sched_getaffinity(0))
    monkeypatch.setattr(cores, "cgroup_cores", lambda root: 1.5)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)))
    assert available_cores() == 2
