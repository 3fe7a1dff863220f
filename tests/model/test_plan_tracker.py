"""The plan against a model without memory, and against a tracker of live tensors, which knows nothing of the plan."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints import tiny_model
from support.live_storage import LiveStorages, peak_of_forward
from support.runners import SMALL, build, cpu_kernels
from support.shape_kernels import ShapeAttention, ShapeKernels

from octavo.model.arena import ActivationArena
from octavo.model.arena_layout import StepShape, arena_layout
from octavo.model.config import ModelConfig
from octavo.model.kernels import Kernels
from octavo.model.kernels.fallback import TorchKernels
from octavo.model.memory import rank_shape
from octavo.model.runner import ModelRunner
from octavo.model.step import Admission, Row, SamplingParams, Step
from octavo.model.transformer import Transformer
from octavo.model.weights.lookup import find_config
from octavo.server.cli import main

LLAMA_70B, SMOLLM2 = find_config("llama-3-70b"), find_config("smollm2")
META = torch.device("meta")


def test_the_tracker_counts_what_lives_together_and_forgets_what_is_freed() -> None:
    outside = torch.ones(64)
    with LiveStorages() as storages:
        one = outside + 1
        view = one[:2]
        one.add_(view.sum())
        assert storages.live == 256
        del one
        assert storages.live == 256, "a view keeps its storage alive"
        del view
        assert storages.live == 0
    assert storages.peak == 256 + 64


def run(config: ModelConfig, kernels: Kernels, tokens: int, rows: int, device: torch.device) -> LiveStorages:
    """The real forward pass and logits, in an arena that is made under the tracker."""
    dtype = torch.bfloat16
    model = Transformer(config, kernels, dtype=dtype, device=device, max_positions=64)
    picks = torch.zeros(rows, dtype=torch.int64, device=device)
    with LiveStorages() as storages:
        arena = ActivationArena(arena_layout(StepShape(config, tokens, rows, 2)), dtype, device)
        for name in ("tokens", "positions"):
            arena.view(name, tokens).zero_()
        model.forward(arena, tokens, ShapeAttention())
        model.logits(arena, picks)
    return storages


CASES = [(8192, 256), (2048, 256), (256, 256), (8192, 8), (64, 64)]


@pytest.mark.parametrize(("tokens", "rows"), CASES)
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_llama_3_70b_peaks_at_exactly_the_planned_bytes(tokens: int, rows: int, ranks: int) -> None:
    config = rank_shape(LLAMA_70B, ranks)
    planned = arena_layout(StepShape(config, tokens, rows, 2)).bytes
    assert peak_of_forward(config, tokens, rows, torch.bfloat16, "meta") == planned
    with META:
        assert run(config, ShapeKernels(torch.bfloat16), tokens, rows, META).peak == planned


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_llama_3_70b_built_without_memory_is_divided_by_shape_and_takes_what_octavo_plan_says(
    ranks: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with META:
        model = Transformer(
            rank_shape(LLAMA_70B, ranks),
            TorchKernels(torch.bfloat16),
            dtype=torch.bfloat16,
            device=META,
            max_positions=64,
        )
    block = [(10_240 // ranks, 8192), (8192, 8192 // ranks), (57_344 // ranks, 8192), (8192, 28_672 // ranks)]
    tables = [(128_256 // ranks, 8192)] * 2
    linears = model.linears()
    assert [tuple(linear._weight.shape) for linear in linears] == tables + block * 80
    norms = [model.final_norm, *(norm for block in model.blocks for norm in block.norms())]
    assert [tuple(norm.weight.shape) for norm in norms] == [(8192,)] * 161
    divided, whole = sum(linear._weight.numel() for linear in linears), 161 * 8192
    assert ranks * divided + whole == 70_553_706_496
    main(["plan", "llama-3-70b", "--devices", str(ranks), "--device", "h200", "--json"])
    assert model.weights_nbytes == 2 * (divided + whole) == json.loads(capsys.readouterr().out)["weights"]


@pytest.mark.parametrize(("ranks", "peak"), [(1, 1_543_503_872), (2, 838_860_800), (4, 503_316_480), (8, 385_875_968)])
def test_the_tracker_finds_the_known_peaks_without_silu_in_place(ranks: int, peak: int) -> None:
    config = rank_shape(LLAMA_70B, ranks)
    assert peak_of_forward(config, 8192, 256, torch.bfloat16, "meta", in_place=False) == peak + 2 * 4 * 8192


@pytest.mark.parametrize(("tokens", "rows"), [(128, 32), (256, 16), (64, 64)])
def test_smollm2_peaks_at_the_planned_bytes_in_real_memory(tokens: int, rows: int) -> None:
    planned = arena_layout(StepShape(SMOLLM2, tokens, rows, 2)).bytes
    peaks = [peak_of_forward(SMOLLM2, tokens, rows, torch.bfloat16, device) for device in ("cpu", "meta")]
    assert peaks == [planned, planned]
    kernels = cpu_kernels(torch.bfloat16)
    if kernels.name == "torch":
        pytest.skip("the operators in torch make temporary tensors, as they say")
    assert run(SMOLLM2, kernels, tokens, rows, torch.device("cpu")).peak == planned


WIDE = replace(LLAMA_70B, layers=1, heads=4, kv_heads=2, head_dim=16, width=64, ffn_width=256, vocabulary=1024)
MOST_TOKENS, MOST_ROWS = 128, 16


@given(tokens=st.integers(1, MOST_TOKENS), rows=st.integers(1, MOST_ROWS))
def test_no_batch_exceeds_the_plan(tokens: int, rows: int) -> None:
    planned = arena_layout(StepShape(WIDE, MOST_TOKENS, MOST_ROWS, 2)).bytes
    assert peak_of_forward(WIDE, tokens, min(rows, tokens), torch.bfloat16, "meta") <= planned


@pytest.mark.parametrize("vocabulary", [64, 1024, 50_000])
def test_the_worst_batch_takes_the_whole_plan(vocabulary: int) -> None:
    config = replace(WIDE, vocabulary=vocabulary)
    planned = arena_layout(StepShape(config, MOST_TOKENS, MOST_ROWS, 2)).bytes
    assert peak_of_forward(config, MOST_TOKENS, MOST_ROWS, torch.bfloat16, "meta") == planned


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelRunner, int]:
    """A runner whose slots all hold a prompt, and the planned bytes of its activations."""
    directory = tmp_path_factory.mktemp("small")
    tiny_model(directory, "llama")
    runner, ledger = build(directory)
    params = SamplingParams(temperature=0, prompt_logprobs=0)
    admitted = tuple(
        Admission(slot, (1,) * 64, 64, tuple(range(4 * slot, 4 * slot + 4)), params) for slot in range(SMALL.max_rows)
    )
    runner.submit(Step((), admitted, (), ()))
    return runner, ledger.plan.planned("activations")


@given(counts=st.lists(st.integers(1, SMALL.max_tokens), min_size=1, max_size=SMALL.max_rows), scored=st.booleans())
def test_no_step_of_a_runner_uses_more_than_the_plan(
    small: tuple[ModelRunner, int], counts: list[int], scored: bool
) -> None:
    runner, planned = small
    counts = [count for index, count in enumerate(counts) if sum(counts[: index + 1]) <= SMALL.max_tokens]
    rows = tuple(Row(slot, 0, count, sample=not scored, score=scored) for slot, count in enumerate(counts))
    assert runner.submit(Step((), (), (), rows)).wait().activations <= planned


def test_the_largest_step_of_a_runner_uses_the_whole_plan(small: tuple[ModelRunner, int]) -> None:
    runner, planned = small
    rows = (Row(0, 0, SMALL.max_tokens, sample=False, score=True),)
    assert runner.submit(Step((), (), (), rows)).wait().activations == planned
