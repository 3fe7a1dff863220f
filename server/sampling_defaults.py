"""How a model's makers would sample it: the numbers in generation_config.json, used only where the operator asks."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from octavo.model.weights.configuration import read_json
from octavo.model.weights.errors import CheckpointError

RANGES = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "top_k": (0, 2**31 - 1),
    "min_p": (0, 1),
    "repetition_penalty": (1e-3, 1e3),
}
"""As for requests."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What holds where a request says nothing."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def changed(self) -> Iterator[str]:
        """Yield the defaults that are not OpenAI's, as `name value`."""
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                yield f"{field.name} {value:g}"


def choose_sampling_defaults(path: Path, *, wanted: bool) -> SamplingDefaults:
    """Return those of the model, if they are wanted, and log which. Raises CheckpointError."""
    if not wanted:
        return SamplingDefaults()
    defaults = model_sampling_defaults(path)
    _log.info("sampling defaults of the model: %s", ", ".join(defaults.changed()) or "none")
    return defaults


def model_sampling_defaults(path: Path) -> SamplingDefaults:
    """Read them from the directory of a model; a .gguf file has none. Raises CheckpointError."""
    file = path / "generation_config.json"
    values = read_json(file) if path.is_dir() and file.is_file() else {}
    return SamplingDefaults(**{name: _number(values, name, file) for name in RANGES if values.get(name) is not None})


def _number(values: Mapping[str, object], name: str, file: Path) -> Any:
    value, (least, most) = values[name], RANGES[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise CheckpointError(f"{file}: {name} must be a number from {least:g} to {most:g}, not {value!r:.40}")
    return int(value) if name == "top_k" else value
