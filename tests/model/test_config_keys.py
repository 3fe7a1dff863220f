"""Every key of a config.json is read, known to change nothing, or a reason to refuse."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import FAMILIES, LLAMA3_ROPE
from transformers import PreTrainedConfig

from octavo.model import config_keys
from octavo.model.config import ModelConfig
from octavo.model.weights.errors import CheckpointError
from octavo.model.weights.published import PUBLISHED
from octavo.server.cli import main

Json = dict[str, Any]
LLAMA: Json = {**PUBLISHED["llama-3-8b"], "model_type": "llama"}
QWEN: Json = {**PUBLISHED["qwen2.5-72b"], "model_type": "qwen2"}
MISTRAL: Json = {**PUBLISHED["mistral-7b"], "model_type": "mistral"}


class Noted(dict[str, object]):
    """Remembers what was looked up."""

    def __init__(self, values: Json) -> None:
        super().__init__(values)
        self.asked: set[str] = set()

    def get(self, key: str, default: object = None) -> object:  # type: ignore[override]
        self.asked.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)


def test_the_keys_called_read_are_exactly_those_that_are_looked_up() -> None:
    llama, qwen = (
        Noted({**LLAMA, "rope_theta": 1e4}),
        Noted({**QWEN, "use_sliding_window": True, "max_window_layers": 0}),
    )
    llama["rope_scaling"] = rope = Noted(LLAMA3_ROPE)
    for values in (llama, qwen, Noted(MISTRAL)):
        ModelConfig.from_hugging_face(values)
        assert values.asked <= config_keys.READ | config_keys.ONLY.keys()
        llama.asked |= values.asked
    assert llama.asked - config_keys.ONLY.keys() == config_keys.READ
    assert rope.asked == config_keys.ROPE


def test_what_transformers_writes_into_these_configurations_is_all_known() -> None:
    """A new attribute in a new version of transformers fails here, for somebody to decide what it changes."""
    classes = [PreTrainedConfig, *(config for config, _model in FAMILIES.values())]
    written = {name for config in classes for name in config().to_dict() if not name.startswith("_")}
    assert written - config_keys.READ - config_keys.ONLY.keys() == config_keys.UNUSED


def test_every_key_has_one_meaning() -> None:
    sets = (config_keys.READ, config_keys.UNUSED, config_keys.REMARKS, frozenset(config_keys.ONLY))
    assert sum(map(len, sets)) == len(frozenset().union(*sets))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_configuration_written_by_transformers_with_all_its_defaults_is_read(family: str) -> None:
    config_class, model_class = FAMILIES[family]
    written = json.loads(config_class(architectures=[model_class.__name__]).to_json_string(use_diff=False))
    assert ModelConfig.from_hugging_face(written).architecture == model_class.__name__


@pytest.mark.parametrize(
    ("base", "more"),
    [
        (LLAMA, {"_name_or_path": "x", "pretraining_tp": 1, "mlp_bias": False, "transformers_version": "4.45.0.dev0"}),
        (LLAMA, {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"dtype": "q4f16"}}),
        (LLAMA, {"activation": "swiglu", "max_sequence_length": 2048, "pad_token_id": 0}),
        (LLAMA, {"unsloth_fixed": True, "unsloth_version": "2025.1.8", "_attn_implementation_autoset": True}),
        (LLAMA, {"max_length": 4096, "quantization_config": None, "num_experts": None}),
        (QWEN, {"use_mrope": False, "use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 21}),
        (QWEN, {"layer_types": ["full_attention"] * 80, "attention_dropout": 0.0, "auto_map": {"AutoModel": "a.B"}}),
        (MISTRAL, {"attention_dropout": 0.0, "initializer_range": 0.02, "use_cache": True, "torch_dtype": "bfloat16"}),
    ],
)
def test_keys_of_published_files_that_change_nothing_change_nothing(base: Json, more: Json) -> None:
    assert ModelConfig.from_hugging_face({**base, **more}) == ModelConfig.from_hugging_face(base)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"logit_scale": 0.0625}, "unknown key 'logit_scale'; remove what does not change the model's results"),
        ({"use_rope": False}, "unknown key 'use_rope'"),
        ({"num_local_experts": 8, "num_experts_per_tok": 2}, "unknown keys 'num_local_experts', 'num_experts_per_tok'"),
        (
            {f"scale_{number}": number for number in range(9)},
            "unknown keys 'scale_0', 'scale_1', 'scale_2' and 6 more;",
        ),
        ({"num_key_value_head": 8}, "unknown key 'num_key_value_head'; did you mean num_key_value_heads?"),
        ({"x" * 5000: 1}, "unknown key '" + "x" * 40 + "'"),
        ({"two\nlines": 1}, r"unknown key 'two\nlines'"),
        ({"": 1}, "unknown key ''"),
        ({"quantization": {"bits": 4}}, "unknown key 'quantization'"),
        ({"text_config": {"hidden_size": 64}}, "unknown key 'text_config'"),
        ({"dual_chunk_attention_config": {"chunk_size": 262144}}, "unknown key 'dual_chunk_attention_config'"),
        ({"rope_interleaved": True}, "rope_interleaved is 'True'; only false is supported"),
        ({"use_mrope": [1, 2]}, "use_mrope is '[1, 2]'; only false is supported"),
        ({"activation": "gelu"}, "activation is 'gelu'; only swiglu is supported"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        (
            {"rope_scaling": {**LLAMA3_ROPE, "attention_factor": 2.0}},
            "rope_scaling: unknown key 'attention_factor'",
        ),
        (
            {"rope_scaling": {"rope_type": "default", "mrope_section": [16, 24, 24]}},
            "rope_scaling: unknown key 'mrope_section'",
        ),
    ],
)
@pytest.mark.parametrize("command", ["plan", "describe", "check"])
def test_an_unknown_key_is_one_line_and_exit_code_65(
    command: str, change: Json, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **change}))
    (tmp_path / "model.safetensors").touch()
    assert main([command, str(tmp_path)]) == 65
    output = capsys.readouterr()
    assert not output.out
    assert output.err.count("\n") == 1
    assert f"{tmp_path}/config.json: {said}" in output.err
    assert len(output.err) < 400


def test_the_server_refuses_it_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "embedding_multiplier": 12.0}))
    (tmp_path / "model.safetensors").touch()
    assert main(["serve", str(tmp_path)]) == 65
    assert "config.json: unknown key 'embedding_multiplier'" in capsys.readouterr().err


def test_a_file_of_another_name_is_named(tmp_path: Path) -> None:
    from octavo.model.weights.lookup import find_config

    file = tmp_path / "shapes.json"
    file.write_text(json.dumps({**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta": 1}}))
    with pytest.raises(CheckpointError, match=r"shapes\.json: rope_scaling: unknown key 'beta'"):
        find_config(str(file))
