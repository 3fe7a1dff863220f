"""Sizes from shapes alone, against published figures and against what is really made."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.runners import cpu_kernels, formats_of

from octavo.model.arena_layout import BLOCK_POINTS, Area, StepShape, arena_layout, load, step_areas
from octavo.model.config import ModelConfig
from octavo.model.kernels.fallback import TorchKernels
from octavo.model.memory import (
    Formats,
    RunnerLimits,
    activation_lines,
    block_norms,
    kv_layout,
    plan_memory,
    rank_shape,
    weights_bytes,
)
from octavo.model.roofline import DEVICES, block_parameters, decode_seconds, prefill_rate
from octavo.model.transformer import Transformer
from octavo.model.weights.configuration import read_config
from octavo.model.weights.errors import CheckpointError
from octavo.model.weights.headers import parameters, tensor_shapes
from octavo.model.weights.locate import locate
from octavo.model.weights.lookup import find_config
from octavo.model.workspaces import Workspaces

LLAMA_70B = find_config("llama-3-70b")
HALF = Formats(2, 2, 2)


def test_the_published_figures_of_llama_3_70b_come_out_to_the_unit() -> None:
    assert block_parameters(LLAMA_70B) == 855_638_016
    attention = sum(
        torch.Size(shape).numel()
        for name, shape in tensor_shapes(LLAMA_70B).items()
        if name.startswith("model.layers.0.self_attn.")
    )
    assert (attention, block_parameters(LLAMA_70B) - attention) == (150_994_944, 704_643_072)
    assert round(100 * 704_643_072 / block_parameters(LLAMA_70B), 1) == 82.4
    assert block_norms(LLAMA_70B) == 16_384
    assert 80 * block_parameters(LLAMA_70B) == 68_451_041_280
    assert parameters(LLAMA_70B) == 70_553_706_496
    assert weights_bytes(LLAMA_70B, HALF) == 141_107_412_992


def test_the_cache_of_llama_3_70b_and_of_its_multi_head_version() -> None:
    for kv_heads, layer, whole in ((8, 4096, 327_680), (64, 32_768, 2_621_440)):
        layout = kv_layout(replace(LLAMA_70B, kv_heads=kv_heads), 16, 2)
        assert (layout.token_layer_bytes, layout.token_bytes) == (layer, whole)
    multi_head = replace(LLAMA_70B, kv_heads=64)
    assert block_parameters(multi_head) - block_parameters(LLAMA_70B) == 117_440_512


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("llama-2-70b", 68_976_648_192),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("llama-3.1-405b", 405_853_388_800),
        ("mistral-7b", 7_248_023_552),
        ("qwen2.5-72b", 72_706_203_648),
        ("smollm2", 134_515_008),
    ],
)
def test_the_built_in_shapes_have_the_published_numbers_of_parameters(name: str, count: int) -> None:
    assert parameters(find_config(name)) == count


def test_the_built_in_smollm2_is_the_model_that_is_served_under_that_name() -> None:
    built_in, served = find_config("smollm2"), read_config(locate("smollm2"))
    for field in ("layers", "width", "heads", "kv_heads", "head_dim", "ffn_width", "vocabulary", "max_context"):
        assert getattr(built_in, field) == getattr(served, field), field
    assert built_in.tied_embeddings == served.tied_embeddings is True


def block_peak(config: ModelConfig, tokens: int, *, in_place: bool) -> int:
    areas = {area.name: area for area in step_areas(StepShape(config, tokens, 256, 2))}
    areas = {name: area for name, area in areas.items() if name not in ("tokens", "positions")}
    if not in_place:
        gate, silu, down = BLOCK_POINTS[3:]
        areas["gate_up"] = replace(areas["gate_up"], points=frozenset((gate, silu)))
        areas["product"] = Area("product", tokens, config.ffn_width, 2, frozenset((silu, down)))
    return load(areas.values(), BLOCK_POINTS)


@pytest.mark.parametrize(
    ("ranks", "plain", "in_place"),
    [
        (1, 1_543_503_872, 1_207_959_552),
        (2, 838_860_800, 738_197_504),
        (4, 503_316_480, 503_316_480),
        (8, 385_875_968, 385_875_968),
    ],
)
def test_the_block_peaks_of_8192_tokens_on_every_degree(ranks: int, plain: int, in_place: int) -> None:
    rank = rank_shape(LLAMA_70B, ranks)
    assert block_peak(rank, 8192, in_place=False) == plain
    assert block_peak(rank, 8192, in_place=True) == in_place


dimensions = st.integers(1, 150)


@given(
    outputs=dimensions, inputs=dimensions, dtype=st.sampled_from((torch.float32, torch.bfloat16)), bias=st.booleans()
)
def test_the_planned_size_of_a_matrix_is_the_kernels(outputs: int, inputs: int, dtype: torch.dtype, bias: bool) -> None:
    # A model of one matrix would be no model: the embedding of a tied one stands for any matrix.
    for kernels in (cpu_kernels(dtype), TorchKernels(dtype)):
        linear = kernels.linear(outputs, inputs, bias=bias)
        config = replace(LLAMA_70B, layers=0, vocabulary=outputs, width=inputs, tied_embeddings=True)
        expected = weights_bytes(config, formats_of(kernels, dtype)) - inputs * dtype.itemsize
        assert linear.nbytes == expected + bias * outputs * dtype.itemsize


@given(
    kv_heads=st.integers(1, 4), group=st.integers(1, 3), head_dim=st.integers(1, 20), width=dimensions,
    ffn_width=dimensions, vocabulary=dimensions, flags=st.tuples(*[st.booleans()] * 5),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
)  # fmt: skip
def test_the_planned_weights_are_those_of_any_model(
    kv_heads: int, group: int, head_dim: int, width: int, ffn_width: int, vocabulary: int,
    flags: tuple[bool, ...], dtype: torch.dtype,
) -> None:  # fmt: skip
    tied, qkv_bias, output_bias, ffn_bias, qk_norm = flags
    config = replace(
        LLAMA_70B, layers=2, heads=kv_heads * group, kv_heads=kv_heads, head_dim=2 * head_dim, width=width,
        ffn_width=ffn_width, vocabulary=vocabulary, tied_embeddings=tied, qkv_bias=qkv_bias, output_bias=output_bias,
        ffn_bias=ffn_bias, qk_norm=qk_norm,
    )  # fmt: skip
    for kernels in (cpu_kernels(dtype), TorchKernels(dtype)):
        with torch.device("meta"):
            model = Transformer(config, kernels, dtype=dtype, device=torch.device("meta"), max_positions=4)
        assert weights_bytes(config, formats_of(kernels, dtype)) == model.weights_nbytes


def test_8_bit_matrices_take_a_byte_a_number_and_a_scale_a_row() -> None:
    narrow = Formats(activations=2, matrices=1, cache=1)
    rows = 2 * 80 * (8192 + 2 * 1024 + 8192 + 2 * 28672 + 8192) * 2
    saved = weights_bytes(LLAMA_70B, HALF) - weights_bytes(LLAMA_70B, narrow)
    assert saved == 68_451_041_280 - rows


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_hold_the_whole_model_together_with_the_norms_on_each(ranks: int) -> None:
    each = weights_bytes(LLAMA_70B, replace(HALF, ranks=ranks))
    norms = 2 * (80 * 16_384 + 8192)
    assert ranks * (each - norms) + norms == 141_107_412_992


@pytest.mark.parametrize(
    ("changes", "ranks", "named"),
    [
        ({}, 3, "64 attention heads"),
        ({"heads": 12, "kv_heads": 4}, 6, "4 KV heads"),
        ({"ffn_width": 6}, 4, "FFN width"),
    ],
)
def test_what_cannot_be_divided_among_devices_is_refused(changes: dict[str, int], ranks: int, named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        rank_shape(replace(LLAMA_70B, **changes), ranks)


def test_the_parts_of_the_activations_add_up_to_the_bucket() -> None:
    limits = RunnerLimits(max_model_len=1000, max_rows=8, max_tokens=64, block_size=16, blocks=3)
    for formats in (HALF, replace(HALF, ranks=2, workspaces=Workspaces())):
        lines = activation_lines(LLAMA_70B, formats, limits)
        assert sum(lines.values()) == plan_memory(LLAMA_70B, formats, limits, 0).activations
        rank = rank_shape(LLAMA_70B, formats.ranks)
        assert lines["arena"] == arena_layout(StepShape(rank, 64, 8, 2, formats.ranks)).bytes
    assert lines["RoPE table"] == 4 * 1000 * 128
    assert lines["token masks of all slots"] == limits.mask_bytes(LLAMA_70B.vocabulary)
    assert lines["gathered logits"] == 4 * 8 * 128_256
    table_entries, indices = 8 * 63, 4 * (8 + 1 + 8)
    attention = (128 + 2 * 8) * 2**20 + 4 * 32_768 + 8 * 64 + indices + 4 * table_entries
    padding_block = 80 * 2 * 16 * 4 * 128 * 2
    assert lines["workspaces"] == attention + padding_block + 40 * 2**22 + 32 * 2**20


def test_the_bounds_are_bytes_over_bandwidth_and_operations_over_the_peak() -> None:
    h200 = DEVICES["h200"]
    embedding, context = 2 * 128_256 * 8192, 1000
    read = 141_107_412_992 - embedding + 8 * context * 327_680
    assert decode_seconds(LLAMA_70B, HALF, h200, 8, context) == pytest.approx(read / 4.8e12)
    operations = 10**5 * (2 * (68_451_041_280 + 128_256 * 8192) + 4 * 1 * 80 * 8192)
    assert decode_seconds(LLAMA_70B, HALF, h200, 10**5, 1) == pytest.approx(operations / 989.4e12)
    assert prefill_rate(LLAMA_70B, HALF, h200) == pytest.approx(989.4e12 / (2 * 68_451_041_280))
    assert prefill_rate(LLAMA_70B, replace(HALF, ranks=2), h200) == 2 * prefill_rate(LLAMA_70B, HALF, h200)
    assert (h200.peak(1), h200.peak(4)) == (2 * h200.flops, h200.flops / 2)
    assert DEVICES["a100-80g"].peak(1) == DEVICES["a100-80g"].flops
