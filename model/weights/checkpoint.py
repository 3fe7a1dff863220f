"""From files to final tensors: what the architecture needs, what the checkpoint has, and the copy from one to other."""

import hashlib
import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from octavo.model.config import ModelConfig
from octavo.model.kernels.packing import QUANTISED
from octavo.model.weights.configuration import read_config
from octavo.model.weights.destination import STORED_FP8, Destination
from octavo.model.weights.errors import CheckpointError
from octavo.model.weights.gguf_checkpoint import GGUFCheckpoint
from octavo.model.weights.headers import check_format, check_shapes, source_of, tensor_shapes
from octavo.model.weights.safetensors_checkpoint import SafetensorsCheckpoint

SLICE_BYTES = 32 << 20
"""Upper bound of what is read at once, counted as float32. Loading holds a few such slices beside the model."""
SLICES = 32
"""A small model is read in no fewer slices than this, so that these stay a small part of it."""


class Checkpoint(Protocol):
    """Tensors under Hugging Face's names, whatever the format. Opening one reads headers only."""

    path: Path
    config: ModelConfig
    files: dict[str, Path]
    """The file of each tensor, where that is not `path` itself: for messages."""
    shapes: dict[str, tuple[int, ...]]
    """The shape of every tensor that is there."""

    def read(self, name: str, first_row: int = 0, rows: int | None = None, *, widen: bool = True) -> Tensor:
        """Rows of a tensor, all unless told otherwise, in float32, float16 or bfloat16. Raises CheckpointError.

        Without widen, one of config.quantised is left in its blocks: uint8 [rows, bytes of a row].
        """
        ...


def open_checkpoint(path: Path, load_format: str = "auto", seed: int = 0, *, widen: bool = False) -> Checkpoint:
    """Open a directory or a .gguf file that `locate` found. Raises CheckpointError.

    "random" reads the configuration alone and makes up the numbers, from the seed. With widen, a model is made for
    numbers whatever the file holds.
    """
    check_format(path, load_format)
    if load_format == "random":
        return RandomCheckpoint(path, seed)
    checkpoint: Checkpoint = SafetensorsCheckpoint(path) if path.is_dir() else GGUFCheckpoint(path)
    if widen:
        checkpoint.config = checkpoint.config.widened()
    return checkpoint


class RandomCheckpoint:
    """A model of the right shapes and made-up numbers: matrices and biases normal with deviation 0.02, norms one.

    A number depends on the seed, the tensor's name and its place, never on what was read before.
    """

    BLOCK_ROWS = 64

    def __init__(self, path: Path, seed: int) -> None:
        self.path = path
        self.config = replace(read_config(path).widened(), stored_fp8=False, cache_scales=False)
        self.seed = seed
        self.shapes = tensor_shapes(self.config)
        self.files: dict[str, Path] = {}

    def read(self, name: str, first_row: int = 0, rows: int | None = None, *, widen: bool = True) -> Tensor:  # noqa: ARG002
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
) -> str:
    """Copy every destination's tensor into it, slice by slice; `progress` hears bytes done and bytes in all.

    Returns the SHA-256 of all that was read, in hexadecimal; it is made on a thread of its own, beside the reading.

    The bytes are those of the model in the checkpoint's own dtype, or in its blocks where they are kept. Raises
    CheckpointError, before anything is read, where a tensor is missing, has another shape or is not expected; later,
    where a number is not finite.
    """
    tied = checkpoint.config.tied_embeddings
    expected = {name: destination.shape for name, destination in destinations.items()}
    check_shapes(checkpoint.path, checkpoint.files, checkpoint.shapes, expected, tied=tied)
    itemsize = getattr(torch, checkpoint.config.dtype).itemsize
    wanted = {name: destination.rows or (0, destination.shape[0]) for name, destination in destinations.items()}
    sizes = {name: _row_bytes(destination, itemsize) for name, destination in destinations.items()}
    total = sum((end - first) * sizes[name] for name, (first, end) in wanted.items())
    slice_bytes = min(SLICE_BYTES, total // SLICES)
    done, digest = 0, hashlib.sha256()
    with ThreadPoolExecutor(1) as hashing:
        hashed: Future[None] = hashing.submit(digest.update, b"")
        for name, destination in destinations.items():
            first, end = wanted[name]
            step = max(1, slice_bytes // (4 * math.prod(destination.shape[1:])))
            for first_row in range(first, end, step):
                count = min(step, end - first_row)
                source, widen = source_of(name, tied=tied), not destination.quantised
                part = checkpoint.read(source, first_row, count, widen=widen)
                if part.is_floating_point() and not _is_finite(part):
                    file = checkpoint.files.get(source, checkpoint.path)
                    raise CheckpointError(f"{file}: tensor {source!r} holds a value that is not finite")
                hashed.result()  # one slice waits at most
                hashed = hashing.submit(digest.update, part.contiguous().view(torch.uint8).numpy().data)
                destination.load(first_row, part)
                done += count * sizes[name]
                progress(done, total)
    return digest.hexdigest()


def _is_finite(part: Tensor) -> bool:
    """Whether no number is infinite or NaN: with one, every answer would be an error. Such a sum is rare."""
    if part.dtype.itemsize == 1:
        part = part.float()
    return bool(part.sum().isfinite()) or bool(part.isfinite().all())


def _row_bytes(destination: Destination, itemsize: int) -> int:
    row_size = math.prod(destination.shape[1:])
    if not destination.quantised:
        return itemsize * row_size
    elements, block_bytes = (1, 1) if destination.quantised == STORED_FP8 else QUANTISED[destination.quantised]
    return row_size // elements * block_bytes
