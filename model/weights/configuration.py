"""From a model's files to its ModelConfig, without touching a weight. Imports no torch."""

import json
from dataclasses import replace
from pathlib import Path

from octavo.model.config import MAX_HEAD_DIM, ModelConfig
from octavo.model.kernels.packing import QUANTISED
from octavo.model.weights.errors import CheckpointError
from octavo.model.weights.gguf_file import GGUFFile
from octavo.model.weights.gguf_names import hugging_face_name

MAX_JSON_BYTES = 16 << 20


def read_config(path: Path) -> ModelConfig:
    """The shapes of a GGUF file, or of a directory with a config.json. Raises CheckpointError."""
    if path.is_dir():
        return directory_config(path)
    return gguf_config(GGUFFile(path))


def directory_config(directory: Path) -> ModelConfig:
    """From config.json and, where there is one, generation_config.json."""
    file = directory / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{directory}: no config.json; MODEL is a Hugging Face directory or a .gguf file itself")
    config, generation = read_json(file), read_json_if_any(directory / "generation_config.json")
    try:
        return ModelConfig.from_hugging_face(config, generation)
    except CheckpointError as error:
        raise CheckpointError(f"{directory}/{error}") from error


def gguf_config(file: GGUFFile) -> ModelConfig:
    """From metadata, the names and shapes of the tensors, and the small rope_freqs tensor of Llama 3.1 and later."""
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    factors: list[float] = []
    if "rope_freqs.weight" in file.tensors:
        tensor = file.tensors["rope_freqs.weight"]
        if tensor.type != "F32" or tensor.nbytes > 4 * MAX_HEAD_DIM:
            raise CheckpointError(f"{file.path}: tensor rope_freqs.weight is not a short vector of F32")
        factors = file.rows("rope_freqs.weight").view("float32").ravel().tolist()
    stored = file.tensors["blk.0.attn_q.weight"].type if "blk.0.attn_q.weight" in file.tensors else ""
    dtype = {"F32": "float32", "F16": "float16"}.get(stored, "bfloat16")
    quantised = {
        hugging_face_name(name): tensor.type
        for name, tensor in file.tensors.items()
        if tensor.type in QUANTISED and len(tensor.shape) == 2
    }
    try:
        return replace(ModelConfig.from_gguf(file.metadata, shapes, dtype, factors), quantised=quantised)
    except CheckpointError as error:
        raise CheckpointError(f"{file.path}: {error}") from error


def read_json(path: Path) -> dict[str, object]:
    """An object in a JSON file of bounded size."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: above {MAX_JSON_BYTES:,} bytes")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return value


def read_json_if_any(path: Path) -> dict[str, object]:
    """The same; empty if there is no such file."""
    return read_json(path) if path.is_file() else {}
