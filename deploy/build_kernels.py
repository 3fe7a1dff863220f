"""Compile the FlashInfer kernels that a model needs, ahead of time: with nvcc, without a GPU.

    python deploy/build_kernels.py llama-3-70b smollm2
    python deploy/build_kernels.py path/to/model --arch 9.0a --attention-decode xqa

They are put where FlashInfer looks first, in its own package, so that a server with FLASHINFER_DISABLE_JIT=1 compiles
nothing, and refuses to start where one is missing. They belong to the installed version of FlashInfer. Needed: nvcc,
ninja and a host compiler; for the norms also the headers of cuBLAS and cuRAND, which a full CUDA toolkit has (else name
them with --include).
"""

import argparse
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from octavo.model.attention.flashinfer import validate
from octavo.model.config import ModelConfig
from octavo.model.flashinfer_library import load_flashinfer
from octavo.model.kernels.fp8 import FP8
from octavo.model.weights.lookup import find_config
from octavo.model.workspaces import Workspaces

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="+", help="directories, .gguf files, Hub ids or built-in shapes")
    parser.add_argument("--sliding-window", action="store_true", help="as if each model had a sliding window")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8_e4m3"), default="auto")
    parser.add_argument("--attention-prefill", choices=("fa2", "fa3"), default="fa2")
    parser.add_argument("--attention-decode", choices=("fa2", "xqa"), default="fa2")
    parser.add_argument("--arch", default="9.0a", help="compute capability, as FLASHINFER_CUDA_ARCH_LIST spells it")
    parser.add_argument(
        "--include", action="append", default=[], help="a directory of headers nvcc does not find itself"
    )
    parser.add_argument("--only", action="append", default=[], help="build only these modules; repeat it")
    parser.add_argument("--output", type=Path, help="where to put them instead, as <module>/<module>.so")
    parser.add_argument("--list", action="store_true", help="name the modules and build nothing")
    options = parser.parse_args()
    fp8_cache = options.kv_cache_dtype == "fp8_e4m3"
    workspaces = Workspaces(options.attention_prefill, options.attention_decode, fp8_cache=fp8_cache)
    dtype = DTYPES[options.dtype]
    configs = [find_config(model) for model in options.model]
    if options.sliding_window:
        configs = [replace(config, sliding_window=config.max_context) for config in configs]
    with tempfile.TemporaryDirectory() as stubs:
        prepare_environment(options.arch, options.include, Path(stubs))
        for config in configs:
            validate(config.head_dim, options.block_size, dtype, workspaces)
            build_all(modules(config, dtype, options.block_size, workspaces), options)
    return 0


def build_all(wanted: dict[str, Callable[[], Any]], options: argparse.Namespace) -> None:
    """Build one model's modules, those that are there already excepted, or list them."""
    unknown = set(options.only) - set(wanted)
    if unknown:
        sys.exit(f"--only {', '.join(sorted(unknown))}: the modules are {', '.join(wanted)}")
    for name, make in wanted.items():
        if options.list:
            print(name, make().name)
        elif not options.only or name in options.only:
            print(f"{name}: {build(make(), options.output)}", flush=True)


def prepare_environment(arch: str, includes: list[str], stubs: Path) -> None:
    """Tell FlashInfer what to compile for. To be called before it is imported."""
    compiler = shutil.which("nvcc")
    if compiler is None:
        sys.exit("nvcc is not in PATH: install the CUDA toolkit")
    homes = (Path(compiler).resolve().parent.parent, Path("/usr/local/cuda"))  # nvcc may be a script of its own
    home = next((home for home in homes if (home / "include" / "cuda_runtime.h").is_file()), homes[0])
    os.environ.setdefault("CUDA_HOME", str(home))
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = arch
    os.environ["FLASHINFER_EXTRA_CUDAFLAGS"] = " ".join(f"-isystem {directory}" for directory in includes)
    # The link line names the driver's library, of which nothing is used; a machine without a GPU need not have it.
    empty = stubs / "empty.c"
    empty.touch()
    subprocess.run(["cc", "-shared", "-o", str(stubs / "libcuda.so"), str(empty)], check=True)  # noqa: S607
    os.environ["FLASHINFER_EXTRA_LDFLAGS"] = f"-L{stubs}"


def modules(
    config: ModelConfig, dtype: torch.dtype, block_size: int, workspaces: Workspaces
) -> dict[str, Callable[[], Any]]:
    """What a server with these options loads: names, and how to describe each to FlashInfer's compiler."""
    load_flashinfer()
    jit = {name: importlib.import_module(f"flashinfer.jit.{name}") for name in ("activation", "norm", "rope", "xqa")}
    attention = importlib.import_module("flashinfer.jit.attention.modules")
    window, head_dim = config.sliding_window is not None, config.head_dim
    cache = FP8 if workspaces.fp8_cache else dtype
    shape = (dtype, cache, dtype, torch.int32, head_dim, head_dim, 0, window, False, False)
    group = config.heads // config.kv_heads
    # Decode with tensor cores runs fa2's prefill kernels; the wrapper loads them under the name of this generator.
    found: dict[str, Callable[[], Any]] = {
        "silu": lambda: jit["activation"].gen_act_and_mul_module("silu"),
        "norm": jit["norm"].gen_norm_module,
        "rope": jit["rope"].gen_rope_module,
        "fa2": lambda: attention._gen_batch_prefill_primary_module("fa2", *shape),
    }
    if workspaces.prefill == "fa3":
        found["fa3"] = lambda: attention.gen_batch_prefill_module("fa3", *shape)
    if workspaces.decode == "xqa":
        found["xqa"] = lambda: jit["xqa"].gen_xqa_module(dtype, dtype, block_size, head_dim, group, window, dtype)
    return found


def build(spec: Any, output: Path | None) -> Path:
    """Compile one module and put it where FlashInfer looks for those that need no compiler, or into `output`."""
    directory = output or importlib.import_module("flashinfer.jit.env").FLASHINFER_AOT_DIR
    target = Path(directory) / spec.name / f"{spec.name}.so"
    if not target.exists():
        spec.build()
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(spec.jit_library_path, target)
    return target


if __name__ == "__main__":
    sys.exit(main())
