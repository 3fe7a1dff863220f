"""What a checkpoint holds, from its headers alone. Imports no torch: a bad model is refused within a second."""

import re
from collections.abc import Mapping
from pathlib import Path

from octavo.model.config import ModelConfig
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


def check_headers(path: Path, load_format: str) -> None:
    """Raise CheckpointError where a model could not be loaded: everything but the numbers is checked."""
    check_format(path, load_format)
    config = read_config(path)
    if load_format == "random":
        return
    files: Mapping[str, Path] = {}
    if path.is_dir():
        shapes, files = read_headers(path)
    else:
        file = GGUFFile(path)
        config = gguf_config(file)
        shapes = {hugging_face_name(name): tensor.shape for name, tensor in file.tensors.items()}
    check_shapes(path, files, shapes, tensor_shapes(config), tied=config.tied_embeddings)


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the architecture by its Hugging Face name; tied embeddings once, as the embedding."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocabulary, config.width)}
    for layer in range(config.layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _block_shapes(config).items()}
    shapes["model.norm.weight"] = (config.width,)
    if not config.tied_embeddings:
        shapes[HEAD] = (config.vocabulary, config.width)
    return shapes


def _block_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    width, q_width, kv_width, ffn_width = config.width, config.q_width, config.kv_width, config.ffn_width
    matrices = {
        "self_attn.q_proj": (q_width, width, config.qkv_bias),
        "self_attn.k_proj": (kv_width, width, config.qkv_bias),
        "self_attn.v_proj": (kv_width, width, config.qkv_bias),
        "self_attn.o_proj": (width, q_width, config.output_bias),
        "mlp.gate_proj": (ffn_width, width, config.ffn_bias),
        "mlp.up_proj": (ffn_width, width, config.ffn_bias),
        "mlp.down_proj": (width, ffn_width, config.ffn_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {}
    shapes["input_layernorm.weight"] = shapes["post_attention_layernorm.weight"] = (width,)
    for name, (outputs, inputs, has_bias) in matrices.items():
        shapes[f"{name}.weight"] = (outputs, inputs)
        if has_bias:
            shapes[f"{name}.bias"] = (outputs,)
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes


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
