"""The FlashInfer package: imported at first use, in a version that was tested, with the kernels that were tested.

Nothing imports it at the top of a module: it takes seconds, and a CPU needs none of it. FlashInfer: Ye et al.,
"FlashInfer: Efficient and Customizable Attention Engine for LLM Inference Serving", 2025.
"""

import importlib
import os
import shutil
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from octavo.model.device import DeviceError

TESTED_VERSIONS = ("0.7.4", "0.7.2.post1")
"""The newest first. Call signatures and the layout of kernels change between minor versions."""


@cache
def load_flashinfer() -> Any:
    """Import the package. Raises DeviceError where it is missing or of another version than those tested."""
    if (problem := flashinfer_problem()) is not None:
        raise DeviceError(problem)
    # Its norms have two implementations that add in different orders; which one it takes would otherwise depend on
    # whether an unrelated package is installed.
    os.environ.setdefault("FLASHINFER_USE_CUDA_NORM", "1")
    return importlib.import_module("flashinfer")


def flashinfer_problem() -> str | None:
    """Say in one line why the package cannot be used, if it cannot, without importing it."""
    try:
        installed = version("flashinfer-python")
    except PackageNotFoundError:
        return f"FlashInfer is not installed: pip install flashinfer-python=={TESTED_VERSIONS[0]}"
    if installed in TESTED_VERSIONS:
        return None
    return f"FlashInfer {installed} was never tested with Octavo: pip install flashinfer-python=={TESTED_VERSIONS[0]}"


def kernels_problem() -> str | None:
    """Say in one line why FlashInfer would have no kernels to run, if so: none compiled ahead, and no compiler."""
    package = find_spec("flashinfer")
    compiled = package is not None and any(Path(package.origin or "").parent.glob("data/aot/*/*.so"))
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "nvcc"
    if compiled:
        return _architecture_problem()
    if shutil.which("nvcc") or toolkit.is_file():
        return None
    return "FlashInfer has no compiled kernels and no nvcc: run deploy/build_kernels.py, or install the CUDA toolkit"


def _architecture_problem() -> str | None:
    """An image says in FlashInfer's own variable, as `8.0` or `9.0a`, for which GPUs it was built.

    A kernel runs on later GPUs of its major version, one with a letter on no other than its own.
    """
    built = os.environ.get("FLASHINFER_CUDA_ARCH_LIST", "").split()
    major, minor = torch.cuda.get_device_capability()
    for arch in built:
        first, _, last = arch.rstrip("af").partition(".")
        if int(first) == major and (int(last) == minor if arch[-1].isalpha() else int(last) <= minor):
            return None
    if not built:
        return None
    return f"FlashInfer's kernels are compiled for {', '.join(built)}, the GPU is {major}.{minor}: build for that"
