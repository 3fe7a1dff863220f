"""A Hugging Face directory of safetensors files: one, or several with an index."""

from pathlib import Path
from typing import cast

from safetensors import SafetensorError, safe_open
from torch import Tensor

from octavo.model.config import ModelConfig
from octavo.model.weights.configuration import directory_config
from octavo.model.weights.errors import CheckpointError
from octavo.model.weights.headers import directory_headers, scale_shapes


class SafetensorsCheckpoint:
    """Reads every header at once and data when asked. Each read maps its file anew, so no page of it stays behind."""

    def __init__(self, directory: Path) -> None:
        self.path = directory
        self.config: ModelConfig = directory_config(directory)
        self.shapes, self.files = directory_headers(directory, self.config)
        self._scales = scale_shapes(self.config)

    def read(self, name: str, first_row: int = 0, rows: int | None = None, *, widen: bool = True) -> Tensor:
        """Rows of a tensor in the file's dtype, all of them unless told otherwise; 8-bit floats widened to float32."""
        file = self.files[name]
        part = slice(first_row, None if rows is None else first_row + rows)
        try:
            with safe_open(file, framework="pt") as shard:
                if name in self._scales:
                    return cast("Tensor", shard.get_tensor(name)).float().flatten().expand(self._scales[name])[part]
                found = cast("Tensor", shard.get_slice(name)[part])
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: tensor {name!r} cannot be read: {error}") from error
        if not widen or (scale := f"{name}_scale") not in self._scales:
            return found
        return found.float() * self.read(scale, first_row, rows)[:, None]
