"""MODEL without weights: where shapes come from, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import tiny_model

from octavo.model.weights.configuration import read_config
from octavo.model.weights.errors import CheckpointError
from octavo.model.weights.locate import locate
from octavo.model.weights.lookup import find_config
from octavo.model.weights.published import PUBLISHED


def write(path: Path, **changes: Any) -> Path:
    config = {**PUBLISHED["llama-3-70b"], **changes}
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))
    return path


def test_a_directory_a_bare_config_and_a_gguf_file_tell_the_same_as_the_server_reads(tmp_path: Path) -> None:
    tiny_model(tmp_path, "qwen3")
    assert find_config(str(tmp_path)) == read_config(tmp_path)
    bare = tmp_path / "other.json"
    bare.write_text((tmp_path / "config.json").read_text())
    assert find_config(str(bare)).width == read_config(tmp_path).width
    gguf = locate("smollm2")
    assert find_config(str(gguf)) == read_config(gguf)


def test_a_hub_id_is_found_in_the_cache_and_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match="nor a model in the Hugging Face cache"):
        find_config("someone/model")
    revision = "0" * 40
    files = tmp_path / "models--someone--model"
    (files / "refs").mkdir(parents=True)
    (files / "refs" / "main").write_text(revision)
    (files / "snapshots" / revision).mkdir(parents=True)
    write(files / "snapshots" / revision / "config.json")
    assert find_config("someone/model") == find_config("llama-3-70b")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"hidden_size": -8192}, "hidden_size is -8192"),
        ({"intermediate_size": 10**15}, "intermediate_size is 1000000000000000"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"num_key_value_heads": 7}, "num_key_value_heads is 7"),
        ({"num_key_value_heads": 128}, "num_key_value_heads is 128"),
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"architectures": ...}, "architectures is missing"),
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"num_key_value_heads": ..., "num_key_value_head": 8}, "did you mean num_key_value_heads"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"kv_lora_rank": 512}, "kv_lora_rank"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_a_wrong_configuration_is_one_line_that_names_file_and_field(
    changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    for model in (write(tmp_path / "config.json", **changes), tmp_path):
        with pytest.raises(CheckpointError) as raised:
            find_config(str(model))
        message = str(raised.value)
        assert named in message
        assert str(tmp_path) in message
        assert message.count("config.json") == 1
        assert "\n" not in message
        assert raised.value.exit_code == 65


def test_keys_that_real_configurations_carry_are_no_mistake(tmp_path: Path) -> None:
    file = write(tmp_path / "config.json", pretraining_tp=1, transformers_version="5.0", use_cache=True, head_dim=128)
    assert find_config(str(file)) == find_config("llama-3-70b")


@pytest.mark.parametrize("content", ["", "[]", "{", "null", "[" * 100_000])
def test_a_file_that_is_no_json_object_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        find_config(str(tmp_path / "config.json"))


@pytest.mark.parametrize("model", ["nothing/here/at/all", "weights.bin", "", "\0", "x" * 5000, "llama-3-71b"])
def test_a_model_that_is_nowhere_is_refused_in_one_short_line(model: str) -> None:
    with pytest.raises(CheckpointError) as raised:
        find_config(model)
    assert len(str(raised.value)) < 500
