import numpy as np
import pytest
from support.checkpoints import tiny_model, write_gguf

from octavo.model.config import ModelConfig, RopeScaling
from octavo.model.weights.configuration import read_config
from octavo.model.weights.errors import CheckpointError
from octavo.model.weights.locate import locate

METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 256,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.rope.dimension_count": 16,
    "llama.rope.freq_base": 500000.0,
    "llama.attention.layer_norm_rms_epsilon": float(np.float32(1e-5)),
}
SHAPES = {"token_embd.weight": (128, 64), "blk.0.attn_q.weight": (64, 64)}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_file_describes_the_model_that_its_directory_describes(tmp_path, family, tied):
    extra = {"attention_bias": True} if family == "llama" else {}
    model = tiny_model(tmp_path, family, heads=8, kv_heads=2, head_dim=8, tied=tied, rms_norm_eps=1e-5, **extra)
    write_gguf(tmp_path / "model.gguf", model)
    assert read_config(tmp_path / "model.gguf") == read_config(tmp_path)


def test_mistral_is_a_llama_in_gguf(tmp_path):
    write_gguf(tmp_path / "model.gguf", tiny_model(tmp_path, "mistral", sliding_window=None))
    config = read_config(tmp_path / "model.gguf")
    assert (config.architecture, config.sliding_window) == ("LlamaForCausalLM", None)
    window = {"llama.attention.sliding_window": 32}
    assert ModelConfig.from_gguf({**METADATA, **window}, SHAPES).sliding_window == 32


def test_every_end_id_of_the_file_counts(tmp_path):
    ends = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 5}
    write_gguf(tmp_path / "model.gguf", tiny_model(tmp_path, "llama"), metadata=ends)
    assert read_config(tmp_path / "model.gguf").eos_ids == (2, 7, 5)


@pytest.mark.parametrize(("kind", "dtype"), [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16")])
def test_the_dtype_is_that_of_the_matrices(tmp_path, kind, dtype):
    model = tiny_model(tmp_path, "qwen2")
    write_gguf(tmp_path / "model.gguf", model, kind)
    assert read_config(tmp_path / "model.gguf").dtype == dtype
    write_gguf(tmp_path / "quantised.gguf", model, "Q8_0")
    assert read_config(tmp_path / "quantised.gguf").dtype == "bfloat16"


def test_the_rope_factors_of_llama_3_1_become_part_of_the_configuration(tmp_path):
    factors = [1.0, 1.0, 1.0, 1.5, 2.0, 4.0, 8.0, 8.0]
    write_gguf(tmp_path / "model.gguf", tiny_model(tmp_path, "llama"), rope_factors=factors)
    assert read_config(tmp_path / "model.gguf").rope_scaling == RopeScaling("factors", factors=tuple(factors))
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    assert ModelConfig.from_gguf({**METADATA, **linear}, SHAPES).rope_scaling == RopeScaling("linear", 2.0)
    both = ModelConfig.from_gguf({**METADATA, **linear}, SHAPES, rope_factors=factors).rope_scaling
    assert both == RopeScaling("factors", factors=tuple(2 * factor for factor in factors))


def test_smollm2_is_what_its_authors_published():
    assert read_config(locate("smollm2")).widened() == ModelConfig(
        architecture="LlamaForCausalLM",
        layers=30,
        width=576,
        heads=9,
        kv_heads=3,
        head_dim=64,
        ffn_width=1536,
        vocabulary=49152,
        max_context=8192,
        norm_epsilon=1e-5,
        rope_theta=100000.0,
        tied_embeddings=True,
        eos_ids=(2,),
        bos_id=1,
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general.architecture": "gemma3"}, "general.architecture is 'gemma3'; supported: llama, qwen2, qwen3"),
        ({"general.architecture": None}, "general.architecture is missing"),
        ({"general.architecture": 3}, "general.architecture"),
        ({"llama.expert_count": 8}, "mixtures of experts"),
        ({"split.count": 3}, "llama-gguf-split --merge"),
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.block_count": 1 << 40}, "llama.block_count"),
        ({"llama.attention.head_count": [4, 4]}, "llama.attention.head_count"),
        ({"llama.attention.head_count": 0}, "llama.attention.head_count"),
        ({"llama.attention.head_count_kv": 3}, "llama.attention.head_count_kv is 3"),
        ({"llama.attention.key_length": 32}, "llama.rope.dimension_count"),
        ({"llama.attention.value_length": 8}, "llama.attention.value_length"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count"),
        ({"llama.rope.scaling.type": "yarn"}, "'yarn'; supported: none, linear"),
        ({"llama.rope.scaling.type": "linear"}, "llama.rope.scaling.factor is missing"),
        ({"llama.rope.freq_base": float("nan")}, "llama.rope.freq_base"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon is missing"),
        ({"tokenizer.ggml.eos_token_id": 128}, "eos_token_id holds 128; expected token ids below 128"),
    ],
)
def test_metadata_that_cannot_be_served_is_refused_in_one_line(change, message):
    with pytest.raises(CheckpointError) as caught:
        ModelConfig.from_gguf({**METADATA, **change}, SHAPES)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("factors", [[1.0] * 7, [1.0] * 7 + [0.0], [1.0] * 7 + [float("nan")]])
def test_rope_factors_of_wrong_number_or_value_are_refused(factors):
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight must hold 8 positive numbers"):
        ModelConfig.from_gguf(METADATA, SHAPES, rope_factors=factors)


def test_a_file_without_an_embedding_is_refused():
    with pytest.raises(CheckpointError, match=r"token_embd\.weight is missing"):
        ModelConfig.from_gguf(METADATA, {})
