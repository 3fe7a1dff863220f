"""From what the user calls a model to its shapes, with neither weights nor torch: for `plan` and `describe`."""

from pathlib import Path

from octavo.model.config import ModelConfig
from octavo.model.weights.configuration import read_config, read_json
from octavo.model.weights.embedded import SMOLLM2, embedded_file
from octavo.model.weights.errors import CheckpointError
from octavo.model.weights.published import PUBLISHED


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
    if path.suffix != ".json" or path.is_dir():
        return read_config(path)
    values = read_json(path)
    try:
        return ModelConfig.from_hugging_face(values)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {str(error).removeprefix('config.json: ')}") from error


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
