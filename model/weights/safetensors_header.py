"""The headers of safetensors files, checked so that an error can name the tensor. Imports no torch.

Format: https://github.com/huggingface/safetensors#format. The safetensors library checks each header once more.
"""

import json
import math
import re
import struct
from collections.abc import Collection, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from octavo.model.weights.configuration import read_json
from octavo.model.weights.errors import CheckpointError

MAX_HEADER_BYTES = 16 << 20
"""A hundred times the header of a shard of a large model."""
ELEMENT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
FP8_BYTES = {"F8_E4M3": 1}
"""Of the matrices that the configuration says are in 8 bits, and of no other tensor."""
MAX_DIMENSIONS = 8
INDEX = "model.safetensors.index.json"
SHARD = re.compile(r"\w[\w. -]{0,200}\.safetensors", re.ASCII)


def read_headers(directory: Path, fp8: Collection[str] = ()) -> tuple[dict[str, tuple[int, ...]], dict[str, Path]]:
    """Shapes of all tensors of a directory's checkpoint, and the file each lies in. Raises CheckpointError.

    fp8: the tensors that must hold 8-bit floats; no other may.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    files: dict[str, Path] = {}
    for file in _shards(directory):
        for name, shape in read_header(file, fp8).items():
            if name in shapes:
                raise CheckpointError(f"{file}: tensor {name[:100]!r} is also in {files[name].name}")
            shapes[name] = shape
            files[name] = file
    return shapes, files


def _shards(directory: Path) -> list[Path]:
    """The files that make up the checkpoint, each of them there."""
    index = directory / INDEX
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index}: weight_map is missing")
        names = sorted({_shard_name(index, name) for name in weight_map.values()})
    elif (directory / "model.safetensors").is_file():
        names = ["model.safetensors"]
    else:
        raise CheckpointError(f"{directory}: {_without_safetensors(directory)}")
    for name in names:
        if not (directory / name).is_file():
            raise CheckpointError(f"{directory / name}: missing, though {INDEX} names it")
    return [directory / name for name in names]


def _shard_name(index: Path, name: object) -> str:
    if not isinstance(name, str) or SHARD.fullmatch(name) is None:
        raise CheckpointError(f"{index}: {str(name)[:100]!r} is not the plain name of a .safetensors file")
    return name


def _without_safetensors(directory: Path) -> str:
    """Why a directory without safetensors cannot be loaded, and what to do."""
    suffixes = {file.suffix for file in directory.iterdir()}
    if suffixes & {".bin", ".pt", ".pth"}:
        return (
            "only pickled weights (.bin, .pt, .pth), which may run code when read and are not supported; "
            "convert them with transformers: model.save_pretrained(directory)"
        )
    if ".gguf" in suffixes:
        return "no model.safetensors; to load a GGUF file, give the path of the file itself"
    return f"neither model.safetensors nor {INDEX}"


def read_header(file: Path, fp8: Collection[str] = ()) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a file's tensors, each checked to be loadable and to lie within the file."""
    try:
        with file.open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(0)
            prefix = stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
            if length > min(size - 8, MAX_HEADER_BYTES):
                raise CheckpointError(f"{file}: truncated or damaged: the header does not fit into {size:,} bytes")
            header = json.loads(stream.read(length))
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: damaged: the header is not JSON") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: damaged: the header is not an object")
    header.pop("__metadata__", None)
    sizes = {name: FP8_BYTES if name in fp8 else ELEMENT_BYTES for name in header}
    ends = {name: _checked_end(file, name, info, sizes[name]) for name, info in header.items()}
    for name, end in ends.items():
        if 8 + length + end > size:
            raise CheckpointError(
                f"{file}: truncated: tensor {name[:100]!r} ends at byte {8 + length + end:,}, the file at {size:,}"
            )
    try:
        with safe_open(file, framework="numpy"):
            return {name: tuple(info["shape"]) for name, info in header.items()}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: damaged: {error}") from error


def _checked_end(file: Path, name: str, info: object, sizes: Mapping[str, int]) -> int:
    """The end of one tensor's bytes in the data section, once its entry is known to be sound."""
    problem = CheckpointError(f"{file}: damaged: the entry of tensor {name[:100]!r} is not sound")
    if not isinstance(info, Mapping):
        raise problem
    dtype = str(info.get("dtype"))
    shape, offsets = _whole_numbers(info.get("shape")), _whole_numbers(info.get("data_offsets"))
    if shape is None or len(shape) > MAX_DIMENSIONS or offsets is None or len(offsets) != 2:
        raise problem
    if dtype not in sizes:
        raise CheckpointError(f"{file}: tensor {name[:100]!r} has dtype {dtype[:20]}; supported: {', '.join(sizes)}")
    begin, end = offsets
    if end - begin != math.prod(shape) * sizes[dtype]:
        raise problem
    return end


def _whole_numbers(value: object) -> list[int] | None:
    """The value, if it is a list of whole numbers."""
    return value if isinstance(value, list) and all(type(entry) is int and entry >= 0 for entry in value) else None
