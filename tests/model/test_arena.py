from dataclasses import replace
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo.model.arena import ActivationArena
from octavo.model.arena_layout import (
    BLOCK_POINTS,
    Area,
    ArenaLayout,
    StepShape,
    arena_layout,
    load,
    step_areas,
)
from octavo.model.config import ModelConfig

LLAMA_70B = ModelConfig(
    architecture="LlamaForCausalLM",
    layers=80,
    width=8192,
    heads=64,
    kv_heads=8,
    head_dim=128,
    ffn_width=28672,
    vocabulary=128256,
    max_context=8192,
    norm_epsilon=1e-5,
    rope_theta=500000.0,
)
SMOLLM2 = replace(LLAMA_70B, layers=30, width=576, heads=9, kv_heads=3, head_dim=64, ffn_width=1536, vocabulary=49152)
QWEN3_06B = replace(
    LLAMA_70B, layers=28, width=1024, heads=16, kv_heads=8, head_dim=128, ffn_width=3072, vocabulary=151936
)
MISTRAL_NEMO = replace(LLAMA_70B, layers=40, width=5120, heads=32, ffn_width=14336, vocabulary=131072)
REAL_MODELS = (LLAMA_70B, SMOLLM2, QWEN3_06B, MISTRAL_NEMO)


def block_areas(config: ModelConfig, tokens: int, element_bytes: int) -> list[Area]:
    areas = step_areas(StepShape(config, tokens, 256, element_bytes))
    return [area for area in areas if area.name not in ("tokens", "positions")]


def test_the_block_of_llama_3_70b_peaks_at_the_gate_and_up_product() -> None:
    areas = block_areas(LLAMA_70B, 8192, 2)
    assert load(areas, BLOCK_POINTS) == 1_207_959_552
    per_token = [load(areas, (point,)) // 8192 for point in BLOCK_POINTS]
    assert per_token[:4] == [53_248, 53_248, 49_152, 147_456]


def test_a_separate_output_of_silu_mul_costs_a_quarter_more() -> None:
    areas = step_areas(StepShape(LLAMA_70B, 8192, 256, 2, gate_in_place=False))
    block = [area for area in areas if area.name not in ("tokens", "positions")]
    assert load(block, BLOCK_POINTS) == 1_543_503_872


@pytest.mark.parametrize("config", REAL_MODELS)
@pytest.mark.parametrize("tokens", [8, 128, 8192])
@pytest.mark.parametrize("element_bytes", [2, 4])
def test_the_layout_of_real_models_is_as_small_as_their_fullest_point(
    config: ModelConfig, tokens: int, element_bytes: int
) -> None:
    layout = arena_layout(StepShape(config, tokens, 32, element_bytes))
    assert layout.bytes == load(layout.areas.values(), range(9))


@pytest.mark.parametrize("config", REAL_MODELS)
@pytest.mark.parametrize("tokens", [2048, 8192])
def test_the_layout_with_a_separate_output_is_as_small_as_its_fullest_point(config: ModelConfig, tokens: int) -> None:
    layout = arena_layout(StepShape(config, tokens, 32, 2, gate_in_place=False))
    assert layout.bytes == load(layout.areas.values(), range(9))


def test_head_and_sampling_are_charged_for_all_tokens_and_the_rows_that_meet_them() -> None:
    tokens, rows = 128, 32
    layout = arena_layout(StepShape(SMOLLM2, tokens, rows, 2))
    kept = 2 * 4 * tokens + 2 * 576 * tokens + 4 * 49152 * rows
    head, sampling = kept + 2 * 576 * rows, kept + 29 * 49152
    assert [load(layout.areas.values(), (point,)) for point in (7, 8)] == [head, sampling]
    assert layout.bytes == max(head, sampling)


def test_ranks_that_share_a_vocabulary_sample_from_the_whole() -> None:
    areas = {area.name: area for area in step_areas(StepShape(replace(SMOLLM2, vocabulary=100), 8, 8, 2, ranks=4))}
    assert (areas["logits"].columns, areas["keys"].columns) == (100, 400)


def assert_no_area_overwrites_another(layout: ArenaLayout) -> None:
    for one, other in combinations(layout.areas.values(), 2):
        if one.points & other.points:
            first, second = layout.offsets[one.name], layout.offsets[other.name]
            assert first + one.nbytes <= second or second + other.nbytes <= first, (one, other)
    for area in layout.areas.values():
        assert layout.offsets[area.name] % 64 == 0
        assert 0 <= layout.offsets[area.name] <= layout.bytes - area.nbytes


sizes = st.integers(1, 40)


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    kv_heads = draw(sizes)
    return replace(
        LLAMA_70B,
        heads=kv_heads * draw(st.integers(1, 9)),
        kv_heads=kv_heads,
        head_dim=2 * draw(sizes),
        width=draw(sizes),
        ffn_width=draw(st.integers(1, 400)),
        vocabulary=draw(sizes),
    )


@given(
    config=configs(), tokens=st.integers(1, 100), rows=sizes, element_bytes=st.sampled_from((2, 4)),
    gate_in_place=st.booleans(),
)  # fmt: skip
def test_areas_alive_together_never_overlap(
    config: ModelConfig, tokens: int, rows: int, element_bytes: int, gate_in_place: bool
) -> None:
    layout = arena_layout(StepShape(config, tokens, rows, element_bytes, gate_in_place=gate_in_place))
    assert_no_area_overwrites_another(layout)
    assert layout.bytes >= load(layout.areas.values(), range(9))


@given(
    kv_heads=st.integers(1, 8), ratio=st.integers(1, 9), width=st.integers(1, 200), surplus=st.integers(0, 900),
    tokens=st.integers(1, 12),
)  # fmt: skip
def test_the_layout_is_optimal_where_the_feed_forward_is_at_least_as_wide_as_q_and_k(
    kv_heads: int, ratio: int, width: int, surplus: int, tokens: int
) -> None:
    config = replace(LLAMA_70B, heads=kv_heads * ratio, kv_heads=kv_heads, head_dim=16, width=width, vocabulary=999)
    config = replace(config, ffn_width=config.q_width + config.kv_width + surplus)
    layout = arena_layout(StepShape(config, 8 * tokens, 8, 4))
    assert layout.bytes == load(layout.areas.values(), range(9))


def test_an_arena_is_one_allocation_of_the_planned_size() -> None:
    layout = arena_layout(StepShape(SMOLLM2, 50, 5, 2))
    arena = ActivationArena(layout, torch.bfloat16, torch.device("cpu"))
    assert arena.nbytes == layout.bytes
    assert (arena.max_tokens, arena.max_rows) == (56, 8)
    storages = {arena.view(name, 1).untyped_storage().data_ptr() for name in layout.areas}
    assert len(storages) == 1


def test_views_have_the_areas_shape_type_and_place() -> None:
    layout = arena_layout(StepShape(SMOLLM2, 48, 5, 2))
    arena = ActivationArena(layout, torch.bfloat16, torch.device("cpu"))
    expected = {"tokens": torch.int32, "positions": torch.int32, "logits": torch.float32, "logprobs": torch.float32}
    expected |= {"probabilities": torch.float64, "ranked": torch.float64, "keys": torch.int64, "flags": torch.bool}
    for name, area in layout.areas.items():
        rows = min(3, area.rows)
        view = arena.view(name, rows)
        assert view.shape == (rows, area.columns)
        assert view.dtype == expected.get(name, torch.bfloat16)
        assert view.is_contiguous()
        assert view.storage_offset() * view.element_size() == layout.offsets[name]


def test_writing_one_area_leaves_those_alive_with_it_alone() -> None:
    layout = arena_layout(StepShape(SMOLLM2, 16, 8, 4))
    arena = ActivationArena(layout, torch.float32, torch.device("cpu"))
    for point in range(9):
        alive = [area for area in layout.areas.values() if point in area.points]
        for value, area in enumerate(alive):
            arena.view(area.name, area.rows).fill_(value)
        for value, area in enumerate(alive):
            view = arena.view(area.name, area.rows)
            assert torch.equal(view, torch.full_like(view, value)), (point, area.name)


def test_a_view_longer_than_its_area_is_refused() -> None:
    arena = ActivationArena(arena_layout(StepShape(SMOLLM2, 16, 8, 2)), torch.bfloat16, torch.device("cpu"))
    with pytest.raises(IndexError, match="logits area holds 8 rows, not 9"):
        arena.view("logits", 9)
