"""What a checkpoint holds, from its headers alone. Imports no torch: a bad model is refused within a second."""

import math
import re
from collections.abc import Mapping
from pathlib import Path

from octavo.kvcache.layout import SCALES
from octavo.model.config import ModelConfig
from octavo.model.matrices import BlockMatrices, FusedMatrix, block_matrices, vocabulary_matrices
from octavo.model.weights.configuration import gguf_config, read_config
from octavo.model.weights.errors import CheckpointError
from octavo.model.weights.gguf_file import GGUFFile
from octavo.model.weights.gguf_names import hugging_face_name
from octavo.model.weights.safetensors_header import read_headers

LOAD_FORMATS = ("auto", "safetensors", "gguf", "random")

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
HARMLESS = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq|rope_freqs\.weight")
"""RoPE's frequencies: old checkpoints store them, and they follow from the configuration."""


def check_format(path: Path, load_format: str) -> None:
    """Raise CheckpointError where a load format does not fit what `locate` found."""
    if load_format not in LOAD_FORMATS:
        raise CheckpointError(f"load format {load_format!r} is unknown; choose one of {', '.join(LOAD_FORMATS)}")
    if load_format not in ("auto", "random", "safetensors" if path.is_dir() else "gguf"):
        raise CheckpointError(f"{path}: not what load format {load_format!r} reads; choose auto")


def check_headers(path: Path, load_format: str) -> ModelConfig:
    """Return a model's shapes. CheckpointError where it could not be loaded: all but the numbers is checked."""
    check_format(path, load_format)
    if load_format == "random":
        return read_config(path)
    files: Mapping[str, Path] = {}
    if path.is_dir():
        config = read_config(path)
        shapes, files = directory_headers(path, config)
    else:
        file = GGUFFile(path)
        config = gguf_config(file)
        shapes = {hugging_face_name(name): tensor.shape for name, tensor in file.tensors.items()}
    check_shapes(path, files, shapes, stored_shapes(config), tied=config.tied_embeddings)
    return config


def directory_headers(path: Path, config: ModelConfig) -> tuple[dict[str, tuple[int, ...]], dict[str, Path]]:
    """Shapes and files of a directory's tensors. A scale of a whole matrix counts as the same one for each row."""
    scales = scale_shapes(config)
    shapes, files = read_headers(path, {name.removesuffix("_scale") for name in scales})
    for name, (rows,) in scales.items():
        if shapes.get(name) in ((), (1,), (rows, 1)):
            shapes[name] = (rows,)
    return shapes, files


def stored_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint: those of the architecture, and scales where it has them."""
    return tensor_shapes(config) | scale_shapes(config)


def scale_shapes(config: ModelConfig) -> dict[str, tuple[int]]:
    """The scales of 8-bit floats beside a checkpoint's tensors: a number for each row of a matrix, for K and for V."""
    if not config.stored_fp8:
        return {}
    rows_of = {f"{name}.weight_scale": (rows,) for matrix in block_matrices(config) for name, rows in matrix.parts}
    layers = range(config.layers if config.cache_scales else 0)
    return rows_of | {f"model.layers.{layer}.self_attn.{name}": (1,) for layer in layers for name in SCALES}


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the architecture by its Hugging Face name; tied embeddings once, as the embedding."""
    embedding, *head = vocabulary_matrices(config)
    shapes = _matrix_shapes(embedding)
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        norms = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), config.width)
        head_norms = dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), config.head_dim) if config.qk_norm else {}
        shapes |= {f"{prefix}{name}.weight": (width,) for name, width in (norms | head_norms).items()}
        for matrix in BlockMatrices.of(config, layer).all():
            shapes |= _matrix_shapes(matrix)
    shapes["model.norm.weight"] = (config.width,)
    for matrix in head:
        shapes |= _matrix_shapes(matrix)
    return shapes


def _matrix_shapes(matrix: FusedMatrix) -> dict[str, tuple[int, ...]]:
    """The tensors of a matrix: weights, and biases where it has them."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, rows in matrix.parts:
        shapes[f"{name}.weight"] = (rows, matrix.in_features)
        if matrix.bias:
            shapes[f"{name}.bias"] = (rows,)
    return shapes


def parameters(config: ModelConfig) -> int:
    """All numbers of the model; tied embeddings count once."""
    return sum(map(math.prod, tensor_shapes(config).values()))


def source_of(name: str, *, tied: bool) -> str:
    """The tensor that fills another: a tied head is the embedding, whatever else the file may hold."""
    return EMBEDDING if name == HEAD and tied else name


def check_shapes(
    path: Path,
    files: Mapping[str, Path],
    found: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, tuple[int, ...]],
    *,
    tied: bool,
) -> None:
    """Raise CheckpointError where a tensor is missing, has another shape or is not part of the architecture.

    `files` says where a tensor lies that is not in `path` itself.
    """

    def error(name: str, problem: str) -> CheckpointError:
        return CheckpointError(f"{files.get(name, path)}: tensor {name[:100]!r} {problem}")

    for name, shape in expected.items():
        source = source_of(name, tied=tied)
        if source not in found:
            raise error(source, "is missing")
        if found[source] != shape:
            raise error(source, f"has shape {list(found[source])}; expected {list(shape)}")
    for name in found:
        if name not in expected and not (name == HEAD and tied) and not HARMLESS.fullmatch(name):
            raise error(name, "is not part of the architecture")
