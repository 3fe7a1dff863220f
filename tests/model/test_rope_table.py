import math
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from octavo.model.config import ModelConfig, RopeScaling
from octavo.model.layers import inverse_frequencies, rope_table

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    layers=1,
    width=256,
    heads=2,
    kv_heads=1,
    head_dim=128,
    ffn_width=8,
    vocabulary=8,
    max_context=131072,
    norm_epsilon=1e-5,
    rope_theta=500000.0,
)
LLAMA3 = RopeScaling("llama3", 8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_context=8192)
VARIANTS = {
    "plain": (CONFIG, {"rope_type": "default"}),
    "theta of SmolLM2": (replace(CONFIG, rope_theta=100000.0, head_dim=64), {"rope_type": "default"}),
    "linear": (replace(CONFIG, rope_scaling=RopeScaling("linear", 4.0)), {"rope_type": "linear", "factor": 4.0}),
    "llama3": (
        replace(CONFIG, rope_scaling=LLAMA3),
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
}


def reference(config: ModelConfig, parameters: dict[str, object]) -> LlamaRotaryEmbedding:
    return LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=config.width,
            num_attention_heads=config.heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_context,
            rope_parameters={"rope_theta": config.rope_theta, **parameters},
        )
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_frequencies_are_the_references_bit_for_bit(variant: str) -> None:
    config, parameters = VARIANTS[variant]
    assert torch.equal(inverse_frequencies(config), reference(config, parameters).inv_freq)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_table_holds_the_references_cosines_then_sines(variant: str) -> None:
    config, parameters = VARIANTS[variant]
    positions = 20000
    cosines, sines = reference(config, parameters)(torch.zeros(1), torch.arange(positions)[None])
    half = config.head_dim // 2
    table = rope_table(config, positions)
    assert table.shape == (positions, config.head_dim)
    assert table.dtype == torch.float32
    # A vectorised cosine and a scalar one may round the last bit differently; angles that differ would show far above.
    ulp = 2.0**-24
    assert float((table[:, :half] - cosines[0, :, :half]).abs().max()) <= 2 * ulp
    assert float((table[:, half:] - sines[0, :, :half]).abs().max()) <= 2 * ulp


def test_the_table_is_that_of_the_formula() -> None:
    config = replace(CONFIG, head_dim=8)
    table = rope_table(config, 50).double()
    for position in (0, 1, 7, 49):
        for pair in range(4):
            angle = position / 500000.0 ** (2 * pair / 8)
            assert table[position, pair] == pytest.approx(math.cos(angle), abs=2e-6)
            assert table[position, 4 + pair] == pytest.approx(math.sin(angle), abs=2e-6)


def test_factors_divide_each_frequency_by_its_own_entry() -> None:
    factors = tuple(1.0 + pair / 3 for pair in range(64))
    plain = inverse_frequencies(CONFIG)
    scaled = inverse_frequencies(replace(CONFIG, rope_scaling=RopeScaling("factors", factors=factors)))
    assert torch.equal(scaled, plain / torch.tensor(factors))


def test_an_unknown_scaling_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'yarn'"):
        rope_table(replace(CONFIG, rope_scaling=RopeScaling("yarn")), 4)
