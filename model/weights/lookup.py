"""From what the user calls a model to its shapes, with neither weights nor torch: for `plan` and `describe`."""

import difflib
from collections.abc import Mapping
from pathlib import Path

from octavo.model.config import ModelConfig
from octavo.model.weights.configuration import read_config, read_json
from octavo.model.weights.embedded import SMOLLM2, embedded_file
from octavo.model.weights.errors import CheckpointError
from octavo.model.weights.published import PUBLISHED

SHAPE_KEYS = (
    *("architectures", "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "vocab_size", "max_position_embeddings", "tie_word_embeddings", "sliding_window"),
    *("attention_bias", "mlp_bias", "rope_scaling", "rope_parameters"),
)
"""What the sizes follow from. Where one is absent a default may stand in, so a misspelt one must not go unnoticed."""
FOREIGN_KEYS = (
    *("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size"),
    *("kv_lora_rank", "q_lora_rank", "vision_config", "text_config", "ssm_cfg", "state_size"),
)
"""Keys of other kinds of models, whose bytes would be counted wrong."""


def find_config(model: str) -> ModelConfig:
    """Shapes of the embedded model, a published name, a directory, config.json or .gguf file, or a Hub id in the cache.

    Nothing is downloaded. Raises CheckpointError.
    """
    embedded = embedded_file() if model == SMOLLM2 else None
    if embedded is not None:
        return read_config(embedded)
    if model in PUBLISHED:
        return ModelConfig.from_hugging_face(PUBLISHED[model])
    path = _existing(model) or _cached(model)
    if path.suffix == ".gguf":
        return read_config(path)
    file = path / "config.json" if path.is_dir() else path
    if path.is_dir() and not file.is_file():
        raise CheckpointError(f"{path}: no config.json; MODEL may be a .gguf file itself")
    values = read_json(file)
    try:
        _refuse_strange_keys(values)
        return read_config(path) if path.is_dir() else ModelConfig.from_hugging_face(values)
    except CheckpointError as error:
        raise error if str(error).startswith(str(path)) else CheckpointError(f"{file.parent}/{error}") from error


def _existing(model: str) -> Path | None:
    try:
        path = Path(model).expanduser()
        found = path.exists()
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{model[:100]!r}: not a usable path") from error
    if not found:
        return None
    if path.is_dir() or path.suffix in {".gguf", ".json"}:
        return path
    raise CheckpointError(f"{model}: neither a directory nor a .json or .gguf file")


def _cached(model: str) -> Path:
    """The directory of a Hub id's files, where they are on this machine already."""
    # Imported late: other models need not wait for it.
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415
    from huggingface_hub.errors import HFValidationError  # noqa: PLC0415

    try:
        file = try_to_load_from_cache(model, "config.json")
    except HFValidationError:
        file = None
    if isinstance(file, str):
        return Path(file).parent
    raise CheckpointError(
        f"{model[:100]}: no such directory, config.json or .gguf file, nor a model in the Hugging Face cache, "
        f"nor one of {', '.join(PUBLISHED)}"
    )


def _refuse_strange_keys(values: Mapping[str, object]) -> None:
    for name in values:
        if name in FOREIGN_KEYS and values[name]:
            raise CheckpointError(f"config.json: {name} belongs to a kind of model that is not supported")
        alike = difflib.get_close_matches(name, SHAPE_KEYS, 1, 0.88)
        if alike and name not in SHAPE_KEYS and alike[0] not in values:
            raise CheckpointError(f"config.json: {name[:80]} is unknown; did you mean {alike[0]}?")
