from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import tiny_model
from support.runners import build, cpu_kernels, formats_of, logits_of
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.model.arena import ActivationArena
from octavo.model.arena_layout import StepShape, arena_layout
from octavo.model.config import ModelConfig
from octavo.model.memory import weights_bytes
from octavo.model.transformer import Transformer
from octavo.model.weights.headers import tensor_shapes

CPU = torch.device("cpu")
LLAMA = ModelConfig(
    architecture="LlamaForCausalLM",
    layers=2,
    width=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    ffn_width=128,
    vocabulary=128,
    max_context=64,
    norm_epsilon=1e-5,
    rope_theta=10000.0,
)
LLAMA_70B = replace(
    LLAMA, layers=80, width=8192, heads=64, kv_heads=8, head_dim=128, ffn_width=28672, vocabulary=128256
)
VARIANTS = {
    "llama": LLAMA,
    "tied": replace(LLAMA, tied_embeddings=True),
    "qwen 2": replace(LLAMA, qkv_bias=True),
    "qwen 3": replace(LLAMA, qk_norm=True),
    "all biases": replace(LLAMA, qkv_bias=True, output_bias=True, ffn_bias=True),
    "odd widths": replace(LLAMA, width=72, ffn_width=100, vocabulary=131),
}


def make(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Transformer:
    return Transformer(config, cpu_kernels(dtype), dtype=dtype, device=CPU, max_positions=64)


@pytest.mark.parametrize("variant", VARIANTS)
def test_destinations_are_the_architectures_tensors(variant: str) -> None:
    destinations = make(VARIANTS[variant]).destinations()
    assert {name: destination.shape for name, destination in destinations.items()} == tensor_shapes(VARIANTS[variant])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_planned_bytes_are_those_of_the_model(variant: str, dtype: torch.dtype) -> None:
    config = VARIANTS[variant]
    assert weights_bytes(config, formats_of(cpu_kernels(dtype), dtype)) == make(config, dtype).weights_nbytes


def test_a_tied_model_stores_its_embedding_once() -> None:
    untied, tied = make(LLAMA), make(replace(LLAMA, tied_embeddings=True))
    assert untied.weights_nbytes - tied.weights_nbytes == 4 * 128 * 64


def test_llama_3_70b_takes_two_bytes_for_each_of_its_parameters() -> None:
    formats = formats_of(cpu_kernels(torch.bfloat16), torch.bfloat16)
    assert weights_bytes(LLAMA_70B, formats) == 2 * 70_553_706_496


class Watch(TorchDispatchMode):
    """Notes every storage that an operation makes: those that none of its arguments had."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, int]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {t.untyped_storage().data_ptr() for t in tensors_in((args, kwargs))}
        result = function(*args, **kwargs)
        for tensor in tensors_in(result):
            if tensor.untyped_storage().data_ptr() not in given:
                self.made.append((str(function), tensor.untyped_storage().nbytes()))
        return result


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = tuple(value.values())
    return [tensor for part in value for tensor in tensors_in(part)] if isinstance(value, list | tuple) else []


def test_the_watch_notices_an_allocation() -> None:
    x = torch.ones(4)
    with Watch() as watch:
        x.add_(1).view(2, 2)
        assert watch.made == []
        x + 1
    assert watch.made == [("aten.add.Tensor", 16)]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_forward_allocates_nothing(family: str, tmp_path: Path) -> None:
    tiny_model(tmp_path, family, width=256, ffn_width=512, vocabulary=512)
    runner, _ = build(tmp_path)
    if runner.model.kernels.name == "torch":
        pytest.skip("the operators in torch make temporary tensors, as they say")
    logits_of(runner, list(range(40)))
    attention, arena = runner._attention, runner.arena
    picked = torch.tensor([0, 39])
    with Watch() as watch:
        runner.model.forward(arena, 40, attention)
        runner.model.logits(arena, picked)
    # The smallest activation of this step has 40 x 64 floats.
    assert [made for made in watch.made if made[1] > 4096] == []


def test_what_lies_in_the_arena_before_a_step_does_not_matter(tmp_path: Path) -> None:
    tiny_model(tmp_path, "qwen3")
    runner, _ = build(tmp_path)
    arena: ActivationArena = runner.arena
    results = []
    for garbage in (0, 255):
        arena._slab.fill_(garbage)
        results.append(logits_of(runner, [5, 9, 3]))
    assert torch.equal(*results)
    assert results[0].isfinite().all()


def test_rows_of_logits_are_those_asked_for_in_their_order(tmp_path: Path) -> None:
    tiny_model(tmp_path, "llama")
    runner, _ = build(tmp_path)
    every = logits_of(runner, list(range(20)))
    picked = runner.model.logits(runner.arena, torch.tensor([19, 0, 7], dtype=torch.int32))
    assert torch.equal(picked, every[[19, 0, 7]])


def test_more_rows_of_logits_than_the_arena_has_are_refused(tmp_path: Path) -> None:
    tiny_model(tmp_path, "llama")
    runner, _ = build(tmp_path)
    layout = arena_layout(StepShape(runner.model.config, 64, 8, 4))
    arena = ActivationArena(layout, torch.float32, CPU)
    with pytest.raises(IndexError, match="holds 8 rows"):
        runner.model.logits(arena, torch.zeros(9, dtype=torch.int32))
