"""Which kernels serve on this machine: the best that its CPU runs, or those that OCTAVO_KERNELS names."""

import ctypes
import logging
import os
import platform
from pathlib import Path

import torch

from octavo.model.kernels import Kernels
from octavo.model.kernels.build import BuildError, build_library
from octavo.model.kernels.cores import available_cores
from octavo.model.kernels.fallback import TorchKernels
from octavo.model.kernels.library import Library
from octavo.model.kernels.native import NativeKernels

logger = logging.getLogger(__name__)

_AVX512 = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx2", "fma"})
CPU_FLAGS = {
    "amx_bf16": _AVX512 | {"avx512_bf16", "amx_tile", "amx_bf16"},
    "avx512_bf16": _AVX512 | {"avx512_bf16"},
    "avx512": _AVX512,
    "avx2": frozenset({"avx2", "fma", "f16c"}),
    "plain": frozenset[str](),
}
"""The code paths, best first, and what each needs, as Linux spells it."""
BFLOAT16_ONLY = {"amx_bf16", "avx512_bf16"}

ARCH_PRCTL = 158
ARCH_REQ_XCOMP_PERM = 0x1023
XFEATURE_XTILEDATA = 18


def load_kernels(dtype: torch.dtype, threads: int | None = None) -> Kernels:
    """Load the kernels for weights and activations of this dtype, compiling them at the first use.

    threads: how many to compute with; None takes all cores this process may use. Where the library cannot be built,
    the kernels are torch's, with one warning.

    Raises:
        ValueError: a dtype without kernels, or an OCTAVO_KERNELS that this CPU or dtype does not allow.
        PermissionError: the cache directory could be written by other users.
    """
    if dtype not in {torch.bfloat16, torch.float32}:
        raise ValueError(f"the CPU kernels compute in bfloat16 or float32, not in {dtype}")
    threads = available_cores() if threads is None else threads
    if threads < 1:
        raise ValueError(f"the number of threads must be at least 1, got {threads}")
    wanted = os.environ.get("OCTAVO_KERNELS") or None
    paths = available_paths(dtype)
    if wanted == "torch":
        return _torch_kernels(dtype, threads)
    if wanted is not None and wanted not in paths:
        raise ValueError(
            f"OCTAVO_KERNELS={wanted}: not possible with this CPU and {dtype}; possible are {', '.join(paths)}, torch"
        )
    try:
        library = open_library(threads)
    except BuildError as error:
        if wanted is not None:
            raise
        logger.warning("%s; computing with torch, which is slower", error)
        return _torch_kernels(dtype, threads)
    kernels = NativeKernels(library, wanted or paths[0], dtype)
    logger.info("CPU kernels: %s, %d threads", kernels.name, threads)
    return kernels


def open_library(threads: int) -> Library:
    """Load the compiled library and set the number of threads of its pool, which all its kernels share.

    Raises:
        BuildError: no compiler, or it failed, or its product does not load.
    """
    path = build_library()
    try:
        library = Library(str(path))
    except OSError as error:
        raise BuildError(f"{path} does not load: {error}") from None
    library.octavo_set_threads(threads)
    return library


def available_paths(dtype: torch.dtype) -> list[str]:
    """The code paths of this dtype that the CPU runs, best first; "plain" is always one."""
    flags = _cpu_flags()
    paths = [path for path, needed in CPU_FLAGS.items() if needed <= flags]
    if dtype == torch.float32:
        return [path for path in paths if path not in BFLOAT16_ONLY]
    return [path for path in paths if path != "amx_bf16" or _amx_permitted()]


def _cpu_flags() -> frozenset[str]:
    """The instruction sets that CPU and kernel offer; empty where that is no Linux on x86-64."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())


def _amx_permitted() -> bool:
    """Ask Linux for the tile registers; the answer holds for all threads of the process."""
    if platform.machine() != "x86_64":
        return False
    return bool(ctypes.CDLL(None).syscall(ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0)


def _torch_kernels(dtype: torch.dtype, threads: int) -> TorchKernels:
    torch.set_num_threads(threads)
    return TorchKernels(dtype)
