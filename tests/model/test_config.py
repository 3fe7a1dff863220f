import json

import pytest
import torch
from support.checkpoints import FAMILIES, LLAMA3_ROPE, edit_config, tiny_model

from octavo.model.config import ModelConfig, RopeScaling
from octavo.model.weights.configuration import read_config
from octavo.model.weights.errors import CheckpointError
from octavo.model.weights.headers import tensor_shapes

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "torch_dtype": "bfloat16",
}
LLAMA_70B = {
    **LLAMA,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
}
LLAMA2_70B = {**LLAMA_70B, "vocab_size": 32000, "bos_token_id": 1, "eos_token_id": 2, "rope_theta": 10000.0}
LLAMA32_1B = {**LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64}
LLAMA32_1B |= {"tie_word_embeddings": True}
MISTRAL_7B = {
    **LLAMA,
    "architectures": ["MistralForCausalLM"],
    "vocab_size": 32000,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN2_HALF_B = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
    "rope_theta": 1e6,
    "use_sliding_window": False,
    "sliding_window": 32768,
    "max_window_layers": 21,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
QWEN3_HALF_B = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "attention_bias": False,
}


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (LLAMA_70B, 70_553_706_496),
        (LLAMA2_70B, 68_976_648_192),
        (LLAMA, 8_030_261_248),
        (LLAMA32_1B, 1_235_814_400),
        (MISTRAL_7B, 7_241_732_096),
        (QWEN2_HALF_B, 494_032_768),
        (QWEN3_HALF_B, 596_049_920),
    ],
)
def test_parameter_counts_are_the_published_ones(config, parameters):
    shapes = tensor_shapes(ModelConfig.from_hugging_face(config))
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == parameters


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_what_transformers_saves_is_read_back_with_its_tensors(tmp_path, family, tied):
    extra = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    extra |= {"attention_bias": True} if family == "qwen3" else {}
    model = tiny_model(tmp_path, family, heads=6, kv_heads=3, head_dim=8, width=72, tied=tied, **extra)
    config = read_config(tmp_path)
    theirs = model.config
    assert config.architecture == theirs.architectures[0]
    assert (config.layers, config.width, config.heads, config.kv_heads) == (2, 72, 6, 3)
    assert (config.head_dim, config.ffn_width, config.vocabulary, config.max_context) == (8, 96, 128, 256)
    assert (config.norm_epsilon, config.rope_theta) == (theirs.rms_norm_eps, theirs.rope_parameters["rope_theta"])
    assert (config.dtype, config.bos_id, config.eos_ids, config.tied_embeddings) == ("float32", 1, (2,), tied)
    assert config.rope_scaling is None
    assert tensor_shapes(config) == {name: tuple(value.shape) for name, value in model.named_parameters()}


def test_absent_fields_take_the_defaults_of_transformers():
    needed = ("architectures", "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
    needed += ("vocab_size", "max_position_embeddings")
    config = ModelConfig.from_hugging_face({name: LLAMA[name] for name in needed})
    assert (config.kv_heads, config.head_dim, config.norm_epsilon, config.rope_theta) == (32, 128, 1e-6, 10000.0)
    assert (config.tied_embeddings, config.eos_ids, config.bos_id) == (False, (), None)
    assert ModelConfig.from_hugging_face({**QWEN3_HALF_B, "head_dim": None}).head_dim == 128


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        (None, None),
        ({}, None),
        ({"rope_type": "default"}, None),
        ({"type": "linear", "factor": 4}, RopeScaling("linear", 4.0)),
        (LLAMA3_ROPE, RopeScaling("llama3", 8.0, 1.0, 4.0, 64)),
        (
            {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            RopeScaling("llama3", 32.0, 1.0, 4.0, 131072),
        ),
    ],
)
def test_both_spellings_of_rope_scaling_mean_the_same(rope, expected):
    old = ModelConfig.from_hugging_face({**LLAMA, "rope_scaling": rope})
    new = {name: value for name, value in LLAMA.items() if name != "rope_theta"}
    new["rope_parameters"] = {"rope_theta": 500000.0, **(rope or {})}
    assert old.rope_scaling == expected
    assert ModelConfig.from_hugging_face(new) == old
    assert old.rope_theta == 500000.0


def test_c19_end_ids_of_both_files_are_united_the_generation_config_first(tmp_path):
    generation = {"eos_token_id": [128009, 128001, 128008]}
    assert ModelConfig.from_hugging_face(LLAMA, generation).eos_ids == (128009, 128001, 128008)
    assert ModelConfig.from_hugging_face({**LLAMA, "eos_token_id": [5, 6]}, {"eos_token_id": 7}).eos_ids == (7, 5, 6)
    assert ModelConfig.from_hugging_face({**LLAMA, "eos_token_id": None}, {"eos_token_id": None}).eos_ids == ()
    tiny_model(tmp_path, "llama")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 2]}))
    assert read_config(tmp_path).eos_ids == (9, 2)


@pytest.mark.parametrize(
    ("config", "window"),
    [
        ({**LLAMA, "sliding_window": 64}, None),
        ({**MISTRAL_7B, "sliding_window": 64}, 64),
        ({**MISTRAL_7B, "sliding_window": None}, None),
        (MISTRAL_7B, 4096),
        (QWEN2_HALF_B, None),
        ({**QWEN2_HALF_B, "use_sliding_window": True, "max_window_layers": 24}, None),
        ({**QWEN2_HALF_B, "use_sliding_window": True, "max_window_layers": 0}, 32768),
        ({**QWEN2_HALF_B, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 24}, 32768),
        ({**QWEN2_HALF_B, "use_sliding_window": True, "layer_types": ["full_attention"] * 24}, None),
    ],
)
def test_a_sliding_window_counts_where_the_architecture_uses_it_in_every_layer(config, window):
    assert ModelConfig.from_hugging_face(config).sliding_window == window


REFUSED = [
    (LLAMA, {"architectures": ["MixtralForCausalLM"]}, "supported: LlamaForCausalLM, MistralForCausalLM, Qwen2"),
    (LLAMA, {"architectures": None}, "architectures is missing"),
    (LLAMA, {"architectures": "LlamaForCausalLM"}, "list of strings"),
    (LLAMA, {"architectures": [["LlamaForCausalLM"]]}, "list of strings"),
    (LLAMA, {"quantization_config": {"quant_method": "gptq"}}, "quantization_config: quant_method is 'gptq'"),
    (LLAMA, {"hidden_act": "gelu"}, "hidden_act"),
    (LLAMA, {"hidden_size": None}, "hidden_size is missing"),
    (LLAMA, {"hidden_size": "4096"}, "hidden_size is '4096'; expected a whole number"),
    (LLAMA, {"hidden_size": 4096.0}, "hidden_size"),
    (LLAMA, {"hidden_size": True}, "hidden_size"),
    (LLAMA, {"hidden_size": 1 << 40}, "hidden_size"),
    (LLAMA, {"hidden_size": 4095}, "32 heads do not divide"),
    (LLAMA, {"num_hidden_layers": 0}, "num_hidden_layers"),
    (LLAMA, {"num_hidden_layers": 10**9}, "num_hidden_layers"),
    (LLAMA, {"num_attention_heads": -1}, "num_attention_heads"),
    (LLAMA, {"num_key_value_heads": 5}, "num_key_value_heads is 5"),
    (LLAMA, {"num_key_value_heads": 64}, "num_key_value_heads is 64"),
    (LLAMA, {"head_dim": 127}, "head_dim is 127; RoPE needs an even number"),
    (LLAMA, {"head_dim": 1 << 20}, "head_dim"),
    (LLAMA, {"intermediate_size": [14336]}, "intermediate_size"),
    (LLAMA, {"vocab_size": 10**12}, "vocab_size"),
    (LLAMA, {"max_position_embeddings": 0}, "max_position_embeddings"),
    (LLAMA, {"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
    (LLAMA, {"rms_norm_eps": -1e-5}, "rms_norm_eps"),
    (LLAMA, {"rope_theta": 0}, "rope_theta"),
    (LLAMA, {"rope_theta": float("inf")}, "rope_theta"),
    (LLAMA, {"rope_scaling": "linear"}, "rope_scaling is 'linear'; expected an object"),
    (LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'; supported: default, linear, llama3"),
    (LLAMA, {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "'yarn'; supported: default, linear, llama3"),
    (LLAMA, {"rope_scaling": {"rope_type": "longrope"}}, "'longrope'; supported: default, linear, llama3"),
    (LLAMA, {"rope_scaling": {"rope_type": "linear"}}, "rope_scaling: factor is missing"),
    (LLAMA, {"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor"),
    (LLAMA, {"rope_scaling": {**LLAMA3_ROPE, "low_freq_factor": 4.0}}, "low_freq_factor"),
    (LLAMA, {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "differs between layers"),
    (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    (LLAMA, {"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
    (LLAMA, {"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    (LLAMA, {"eos_token_id": -1}, "eos_token_id holds -1"),
    (LLAMA, {"eos_token_id": [1, 128256]}, "eos_token_id holds 128256"),
    (LLAMA, {"eos_token_id": "</s>"}, "eos_token_id"),
    (LLAMA, {"bos_token_id": 1.5}, "bos_token_id"),
    (MISTRAL_7B, {"sliding_window": 0}, "sliding_window"),
    (QWEN2_HALF_B, {"use_sliding_window": True}, "sliding_window differs between layers"),
]


@pytest.mark.parametrize(("base", "change", "message"), REFUSED)
def test_a_config_that_cannot_be_served_is_refused_in_one_line(base, change, message):
    with pytest.raises(CheckpointError) as caught:
        ModelConfig.from_hugging_face({**base, **change})
    assert message in str(caught.value)
    assert str(caught.value).startswith("config.json: ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
    assert caught.value.exit_code == 65


def test_code_named_by_a_config_is_neither_run_nor_needed(tmp_path):
    tiny_model(tmp_path, "llama")
    plain = read_config(tmp_path)
    (tmp_path / "modeling.py").write_text("raise SystemExit('this code ran')")
    edit_config(tmp_path, auto_map={"AutoConfig": "modeling.Config", "AutoModelForCausalLM": "modeling.Model"})
    assert read_config(tmp_path) == plain


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, '"x"', "\xff", "1" * 5000, '{"architectures": NaN}'])
def test_a_config_file_that_is_no_json_object_is_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"config\.json") as caught:
        read_config(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_directory_without_a_config_is_told_what_a_model_is(tmp_path):
    with pytest.raises(CheckpointError, match=r"no config\.json; MODEL is a Hugging Face directory"):
        read_config(tmp_path)
    with pytest.raises(CheckpointError, match="No such file"):
        read_config(tmp_path / "absent")
