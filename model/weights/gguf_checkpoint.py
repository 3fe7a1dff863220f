"""A GGUF file as a checkpoint: Hugging Face's names, llama.cpp's row order undone, blocks dequantised by slices."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.model.kernels.packing import QUANTISED
from octavo.model.weights.configuration import gguf_config
from octavo.model.weights.errors import CheckpointError
from octavo.model.weights.gguf_file import GGUFFile
from octavo.model.weights.gguf_names import hugging_face_name

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GGUFCheckpoint:
    """Reads the header at once and tensors when asked: floats in their own dtype, quantised blocks as float32."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = GGUFFile(path)
        self.config = gguf_config(self.file)
        self.files: dict[str, Path] = {}
        self._gguf_names = {hugging_face_name(name): name for name in self.file.tensors}
        self.shapes = {name: self.file.tensors[stored].shape for name, stored in self._gguf_names.items()}

    def read(self, name: str, first_row: int = 0, rows: int | None = None, *, widen: bool = True) -> Tensor:
        """Rows of a tensor, in Hugging Face's order; quantised ones as uint8 [rows, bytes] unless they are widened."""
        stored = self._gguf_names[name]
        tensor = self.file.tensors[stored]
        order = self._row_order(name)[first_row : None if rows is None else first_row + rows]
        try:
            data = self.file.rows(stored)
            if len(tensor.shape) == 1:
                return _decode(data, tensor.type)[0][order]
            return _decode(data[order], tensor.type) if widen else torch.from_numpy(data[order])
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path}: tensor {stored} cannot be read: {error}") from error

    def _row_order(self, name: str) -> npt.NDArray[np.intp]:
        """Where each row of a tensor lies in the file.

        Only files of the llama architecture store q and k otherwise than Hugging Face: llama.cpp rotates neighbouring
        pairs there, so the two halves of each head are interleaved.
        """
        rows = np.arange(self.shapes[name][0], dtype=np.intp)
        projection = name.rpartition(".")[0]
        if self.config.architecture == "LlamaForCausalLM" and projection.endswith((".q_proj", ".k_proj")):
            return rows.reshape(-1, self.config.head_dim // 2, 2).swapaxes(1, 2).reshape(-1)
        return rows


def _decode(data: npt.NDArray[np.uint8], kind: str) -> Tensor:
    """Bytes of rows, [rows, bytes], as numbers, [rows, columns]."""
    if kind in FLOATS:
        return torch.from_numpy(np.array(data)).view(FLOATS[kind])
    if kind in ("Q4_0", "Q4_1", "Q8_0"):
        return _widen(torch.from_numpy(np.array(data)), kind)
    import gguf  # noqa: PLC0415 - not needed for most files, and slower

    return torch.from_numpy(gguf.dequantize(data, gguf.GGMLQuantizationType[kind]))


def _widen(data: Tensor, kind: str) -> Tensor:
    """Blocks of 32 numbers, uint8 [rows, bytes], as float32 [rows, columns]: integer * scale, and + offset in Q4_1.

    Layout: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. Every product is exact.
    """
    blocks, head = data.view(len(data), -1, QUANTISED[kind][1]), 4 if kind == "Q4_1" else 2
    scales, integers = blocks[..., :head].view(torch.float16).float(), blocks[..., head:]
    if kind == "Q8_0":
        return (integers.view(torch.int8) * scales).flatten(1)
    integers = torch.cat((integers & 15, integers >> 4), dim=-1)
    widened = integers * scales[..., :1] + scales[..., 1:] if kind == "Q4_1" else (integers.char() - 8) * scales
    return widened.flatten(1)
