"""Which compiled modules Octavo's attention makes FlashInfer load, beside those that deploy/build_kernels.py compiles.

A program of its own, since FlashInfer looks at its environment when it is imported: prints both lists as JSON.
"""

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from support.attention import FLASHINFER, Bench, Row, Shape
from support.flashinfer_emulation import emulated_flashinfer

GETTERS = (
    *(("prefill", "get_batch_prefill_module"), ("decode", "get_batch_prefill_module"), ("xqa", "get_xqa_module")),
    *(("norm", "get_norm_module"), ("rope", "get_rope_module"), ("activation", "get_act_and_mul_module")),
)


class AskedError(Exception):
    """Carries the name of a module that FlashInfer would load now."""


def asked(shape: Shape, backend: str) -> set[str]:
    """The names under which FlashInfer looks for what a step of decodes and prompts needs."""
    real = [getattr(importlib.import_module(f"flashinfer.{module}"), getter) for module, getter in GETTERS]
    calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [(real[3], ()), (real[4], ()), (real[5], ("silu",))]
    with emulated_flashinfer():
        for (name, getter), original in zip(GETTERS[:3], real, strict=False):
            module = importlib.import_module(f"flashinfer.{name}")
            emulated = getattr(module, getter)

            def noted(*arguments: Any, original: Any = original, emulated: Any = emulated) -> Any:
                calls.append((original, arguments))
                return emulated(*arguments)

            setattr(module, getter, noted)
        bench = Bench.of(shape, backend)
        old, new = bench.sequence(40), bench.sequence(20)
        bench.step([Row(old, 0, 39)])
        bench.step([Row(old, 39, 1), Row(new, 0, 20)])
    with mock.patch("flashinfer.jit.core.JitSpec.build_and_load", ask):
        return {name_of(getter, arguments) for getter, arguments in calls}


def ask(spec: Any) -> None:
    raise AskedError(spec.name)


def name_of(getter: Callable[..., Any], arguments: tuple[Any, ...]) -> str:
    try:
        getter(*arguments)
    except AskedError as found:
        return str(found)
    raise AssertionError("nothing was loaded")


def main() -> None:
    backend, head_dim, window = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) or None
    script = Path(__file__).parents[2] / "deploy" / "build_kernels.py"
    spec = importlib.util.spec_from_file_location("build_kernels", script)
    build_kernels = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build_kernels)
    shape = Shape(heads=8, kv_heads=2, head_dim=head_dim, window=window, dtype=torch.bfloat16)
    built = build_kernels.modules(shape.config(), torch.bfloat16, shape.block_size, FLASHINFER[backend])
    from flashinfer.jit import env

    directories = {"kernels": str(env.FLASHINFER_AOT_DIR), "workspace": str(env.FLASHINFER_WORKSPACE_DIR)}
    names = {"asked": sorted(asked(shape, backend)), "built": sorted(make().name for make in built.values())}
    sys.stdout.write(json.dumps({**names, **directories}) + "\n")


if __name__ == "__main__":
    main()
