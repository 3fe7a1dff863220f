"""A Hugging Face directory of safetensors files: one, or several with an index."""

from pathlib import Path
from typing import cast

from safetensors import SafetensorError, safe_open
from torch import Tensor

from octavo.model.config import ModelConfig
from octavo.model.weights.configuration import directory_config
from octavo.model.weights.errors import CheckpointError
from octavo.model.weights.safetensors_header import read_headers


class SafetensorsCheckpoint:
    """Reads every header at once and data when asked. Each read maps its file anew, so no page of it stays behind."""

    def __init__(self, directory: Path) -> None:
        self.path = directory
        self.config: ModelConfig = directory_config(directory)
        self.shapes, self.files = read_headers(directory)

    def read(self, name: str, first_row: int = 0, rows: int | None = None, *, widen: bool = True) -> Tensor:  # noqa: ARG002
        """Rows of a tensor in the file's dtype, all of them unless told otherwise."""
        file = self.files[name]
        end = None if rows is None else first_row + rows
        try:
            with safe_open(file, framework="pt") as shard:
                return cast("Tensor", shard.get_slice(name)[first_row:end])
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: tensor {name!r} cannot be read: {error}") from error
