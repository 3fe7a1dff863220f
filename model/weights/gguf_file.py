"""The header of a GGUF file, read with suspicion, and raw views of its tensors. Imports no torch.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. A length or count is compared with what the file can
hold before anything of that size is read, so a damaged or hostile file costs an error and no memory.
"""

import contextlib
import math
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from octavo.model.kernels.packing import QUANTISED
from octavo.model.weights.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MAX_COUNT = 65_536
"""Metadata entries, and tensors."""
MAX_STRING = 16 << 20
CHUNK = 256 << 10
"""Bytes of an array of strings that are read at once."""
MAX_ARRAY = 1 << 22
"""Elements: sixteen times the largest vocabulary in use."""
MAX_DIMENSIONS = 4

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""GGUF's metadata value types in the letters of struct."""
STRING, ARRAY = 8, 9

BLOCKS = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    **QUANTISED,
    "Q6_K": (256, 210),
}
"""The supported tensor types: elements and bytes of one block."""
TYPE_NAMES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    30: "BF16",
}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where one tensor lies."""

    shape: tuple[int, ...]
    """In torch's order: rows first. GGUF writes it reversed."""
    type: str
    """A key of BLOCKS."""
    offset: int
    """Bytes from the beginning of the file."""
    nbytes: int


class GGUFFile:
    """Metadata and tensors of one file. Raises CheckpointError for anything that is not a well-formed GGUF file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, object] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        try:
            with path.open("rb") as file:
                self._read_header(_Reader(file, path))
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}") from error

    def rows(self, name: str) -> "npt.NDArray[np.uint8]":
        """A read-only view of a tensor's bytes, [rows, bytes of a row]; a vector is one row.

        The file is mapped anew by each call: what was read leaves the process's memory with the view.
        """
        import numpy as np  # noqa: PLC0415 - a header is read sooner without it

        tensor = self.tensors[name]
        rows = math.prod(tensor.shape[:-1])
        return np.memmap(self.path, np.uint8, "r", tensor.offset, (rows, tensor.nbytes // rows))

    def _read_header(self, reader: "_Reader") -> None:
        if reader.take(4) != b"GGUF":
            raise reader.error("this is not a GGUF file")
        version = reader.scalar("I")
        if version not in {2, 3}:
            byte_swapped = version in {2 << 24, 3 << 24}
            raise reader.error("big-endian files are not supported" if byte_swapped else f"unknown version {version}")
        tensor_count = reader.count("tensors", MAX_COUNT)
        for _ in range(reader.count("metadata entries", MAX_COUNT)):
            key = reader.string()
            if key in self.metadata:
                raise reader.error(f"metadata key {_shown(key)} appears twice")
            self.metadata[key] = reader.value(int(reader.scalar("I")), key)
        self._place(reader, self._read_tensor_infos(reader, tensor_count))

    def _place(self, reader: "_Reader", relative: dict[str, GGUFTensor]) -> None:
        """Turn offsets within the data, which begins behind the header, into offsets within the file."""
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise reader.error("general.alignment is not a power of two up to 1 MiB")
        data_start = -(-reader.position // alignment) * alignment
        for name, tensor in relative.items():
            end = data_start + tensor.offset + tensor.nbytes
            if tensor.offset % alignment:
                raise reader.error(f"tensor {_shown(name)} is not aligned to {alignment} bytes")
            if end > reader.size:
                raise reader.error(
                    f"truncated or damaged: tensor {_shown(name)} ends at byte {end:,}, the file at {reader.size:,}"
                )
            self.tensors[name] = GGUFTensor(tensor.shape, tensor.type, data_start + tensor.offset, tensor.nbytes)
        in_order = sorted(self.tensors.items(), key=lambda item: item[1].offset)
        for (name, tensor), (following, after) in pairwise(in_order):
            if tensor.offset + tensor.nbytes > after.offset:
                raise reader.error(f"tensors {_shown(name)} and {_shown(following)} overlap")

    def _read_tensor_infos(self, reader: "_Reader", count: int) -> dict[str, GGUFTensor]:
        """Tensors whose offsets still count from the beginning of the data."""
        infos: dict[str, GGUFTensor] = {}
        for _ in range(count):
            name = reader.string()
            if name in infos:
                raise reader.error(f"tensor {_shown(name)} appears twice")
            dimensions = int(reader.scalar("I"))
            if not 1 <= dimensions <= MAX_DIMENSIONS:
                raise reader.error(
                    f"tensor {_shown(name)} has {dimensions} dimensions; 1 to {MAX_DIMENSIONS} are possible"
                )
            shape = tuple(int(reader.scalar("Q")) for _ in range(dimensions))[::-1]
            number = int(reader.scalar("I"))
            kind = TYPE_NAMES.get(number, f"number {number}")
            if kind not in BLOCKS:
                raise reader.error(f"tensor {_shown(name)} has type {kind}; supported: {', '.join(BLOCKS)}")
            elements, block_bytes = BLOCKS[kind]
            if min(shape) < 1 or shape[-1] % elements:
                raise reader.error(
                    f"tensor {_shown(name)} of shape {list(shape)} cannot hold blocks of {elements} ({kind})"
                )
            nbytes = math.prod(shape) // elements * block_bytes
            infos[name] = GGUFTensor(shape, kind, int(reader.scalar("Q")), nbytes)
        return infos


class _Reader:
    """A position in a file of known size."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.file = file
        self.path = path
        self.size = file.seek(0, 2)
        self.position = file.seek(0)

    def error(self, problem: str) -> CheckpointError:
        """An error about this file, to be raised by the caller."""
        return CheckpointError(f"{self.path}: {problem}")

    def take(self, size: int) -> bytes:
        """The next bytes; never asks for more than the file has left."""
        if size > self.size - self.position:
            raise self.error(f"truncated or damaged: the header needs {size:,} bytes at byte {self.position:,}")
        self.position += size
        return self.file.read(size)

    def scalar(self, letter: str) -> int | float | bool:
        """One number, named by its letter of struct."""
        (value,) = struct.unpack("<" + letter, self.take(struct.calcsize("<" + letter)))
        return value  # type: ignore[no-any-return]

    def count(self, what: str, limit: int) -> int:
        """A 64-bit count that is small enough to be believed."""
        count = int(self.scalar("Q"))
        if count > limit:
            raise self.error(f"{count:,} {what}; at most {limit:,} are supported")
        return count

    def string(self) -> str:
        """A length and that many bytes of UTF-8."""
        try:
            return self.take(self.count("bytes in a string", MAX_STRING)).decode()
        except UnicodeDecodeError as error:
            raise self.error(f"a string before byte {self.position:,} is not UTF-8") from error

    def strings(self, count: int) -> list[object]:
        """That many strings: a vocabulary and its merges have hundreds of thousands, so these are not read one by one.

        What is wrong with one is for `string` to say, as is one that is longer than a chunk.
        """
        found: list[object] = []
        length_at = struct.Struct("<Q").unpack_from
        while len(found) < count:
            chunk, end = self.file.read(CHUNK), 0
            with contextlib.suppress(struct.error, UnicodeDecodeError):
                for _ in range(count - len(found)):
                    (size,) = length_at(chunk, end)
                    text = chunk[end + 8 : end + 8 + size]
                    if len(text) < size:
                        break
                    found.append(text.decode())
                    end += 8 + size
            self.position = self.file.seek(self.position + end)
            if end == 0:
                found.append(self.string())
        return found

    def value(self, kind: int, key: str) -> object:
        """One metadata value: a number, a bool, a string, or a list of these."""
        if kind == STRING:
            return self.string()
        if kind in SCALARS:
            return self.scalar(SCALARS[kind])
        if kind == ARRAY:
            return self._array(int(self.scalar("I")), key)
        raise self.error(f"metadata key {_shown(key)} has unknown type {kind}")

    def _array(self, kind: int, key: str) -> list[object]:
        count = self.count(f"elements in {_shown(key)}", MAX_ARRAY)
        if kind == STRING:
            return self.strings(count)
        if kind not in SCALARS:
            raise self.error(f"metadata key {_shown(key)} is an array of type {kind}, which is not supported")
        letters = f"<{count}{SCALARS[kind]}"
        return list(struct.unpack(letters, self.take(struct.calcsize(letters))))


def _shown(name: str) -> str:
    """A name from the file, on one line of bounded length."""
    return repr(name[:100])
