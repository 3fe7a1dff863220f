"""From files to final tensors: what the architecture needs, what the checkpoint has, and the copy from one to other."""

import hashlib
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from octavo.model.config import ModelConfig
from octavo.model.weights.configuration import read_config
from octavo.model.weights.destination import Destination
from octavo.model.weights.errors import CheckpointError
from octavo.model.weights.gguf_checkpoint import GGUFCheckpoint
from octavo.model.weights.safetensors_checkpoint import SafetensorsCheckpoint

__all__ = ["Checkpoint", "Destination", "RandomCheckpoint", "load_weights", "open_checkpoint", "tensor_shapes"]

LOAD_FORMATS = ("auto", "safetensors", "gguf", "random")

SLICE_BYTES = 32 << 20
"""Upper bound of what is read at once, counted as float32: all that loading holds beside the model."""

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
HARMLESS = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq|rope_freqs\.weight")
"""RoPE's frequencies: old checkpoints store them, and they follow from the configuration."""


class Checkpoint(Protocol):
    """Tensors under Hugging Face's names, whatever the format. Opening one reads headers only."""

    path: Path
    config: ModelConfig

    @property
    def files(self) -> Mapping[str, Path]:
        """The file of each tensor, where that is not `path` itself: for messages."""
        ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of every tensor that is there."""
        ...

    def read(self, name: str, first_row: int = 0, rows: int | None = None) -> Tensor:
        """Rows of a tensor, all unless told otherwise, in float32, float16 or bfloat16. Raises CheckpointError."""
        ...


def open_checkpoint(path: Path, load_format: str = "auto", seed: int = 0) -> Checkpoint:
    """Open a directory or a .gguf file that `locate` found. Raises CheckpointError.

    "random" reads the configuration alone and makes up the numbers, from the seed.
    """
    if load_format not in LOAD_FORMATS:
        raise CheckpointError(f"load format {load_format!r} is unknown; choose one of {', '.join(LOAD_FORMATS)}")
    if load_format == "random":
        return RandomCheckpoint(path, seed)
    if load_format != ("safetensors" if path.is_dir() else "gguf") and load_format != "auto":
        raise CheckpointError(f"{path}: not what load format {load_format!r} reads; choose auto")
    return SafetensorsCheckpoint(path) if path.is_dir() else GGUFCheckpoint(path)


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


class RandomCheckpoint:
    """A model of the right shapes and made-up numbers: matrices and biases normal with deviation 0.02, norms one.

    A number depends on the seed, the tensor's name and its place, never on what was read before.
    """

    BLOCK_ROWS = 64

    def __init__(self, path: Path, seed: int) -> None:
        self.path = path
        self.config = read_config(path)
        self.seed = seed
        self.shapes = tensor_shapes(self.config)
        self.files: dict[str, Path] = {}

    def read(self, name: str, first_row: int = 0, rows: int | None = None) -> Tensor:
        """Rows of a tensor in the configuration's dtype."""
        shape = self.shapes[name]
        end = shape[0] if rows is None else first_row + rows
        dtype = getattr(torch, self.config.dtype)
        if name.endswith("norm.weight"):
            return torch.ones(end - first_row, dtype=dtype)
        first_block, last_block = first_row // self.BLOCK_ROWS, -(-end // self.BLOCK_ROWS)
        blocks = [self._block(name, shape, block).to(dtype) for block in range(first_block, last_block)]
        begin = first_row - first_block * self.BLOCK_ROWS
        return torch.cat(blocks)[begin : begin + end - first_row]

    def _block(self, name: str, shape: tuple[int, ...], block: int) -> Tensor:
        digest = hashlib.blake2b(f"{self.seed}/{name}/{block}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        return 0.02 * torch.randn(self.BLOCK_ROWS, *shape[1:], generator=generator)


def load_weights(
    checkpoint: Checkpoint, destinations: Mapping[str, Destination], progress: Callable[[int, int], None]
) -> None:
    """Copy every destination's tensor into it, slice by slice; `progress` hears bytes done and bytes in all.

    The bytes are those of the model in the checkpoint's own dtype. Raises CheckpointError, before anything is read,
    where a tensor is missing, has another shape or is not expected.
    """
    sources = {name: _source(checkpoint, name) for name in destinations}
    _check(checkpoint, destinations, sources)
    itemsize = getattr(torch, checkpoint.config.dtype).itemsize
    total = itemsize * sum(math.prod(destination.shape) for destination in destinations.values())
    done = 0
    for name, destination in destinations.items():
        rows, row_size = destination.shape[0], math.prod(destination.shape[1:])
        step = max(1, SLICE_BYTES // (4 * row_size))
        for first_row in range(0, rows, step):
            count = min(step, rows - first_row)
            destination.load(first_row, checkpoint.read(sources[name], first_row, count))
            done += itemsize * count * row_size
            progress(done, total)


def _source(checkpoint: Checkpoint, name: str) -> str:
    """The tensor a destination is filled from: a tied head is the embedding, whatever else the file may hold."""
    return EMBEDDING if name == HEAD and checkpoint.config.tied_embeddings else name


def _check(checkpoint: Checkpoint, destinations: Mapping[str, Destination], sources: Mapping[str, str]) -> None:
    for name, destination in destinations.items():
        source = sources[name]
        found = checkpoint.shapes.get(source)
        if found is None:
            raise _error(checkpoint, source, "is missing")
        if found != destination.shape:
            raise _error(checkpoint, source, f"has shape {list(found)}; expected {list(destination.shape)}")
    for name in checkpoint.shapes:
        tied_head = name == HEAD and checkpoint.config.tied_embeddings
        if name not in destinations and not tied_head and not HARMLESS.fullmatch(name):
            raise _error(checkpoint, name, "is not part of the architecture")


def _error(checkpoint: Checkpoint, name: str, problem: str) -> CheckpointError:
    return CheckpointError(f"{checkpoint.files.get(name, checkpoint.path)}: tensor {name[:100]!r} {problem}")
