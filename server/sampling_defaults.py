"""How a model's makers would sample it: the numbers in generation_config.json, used only where the operator asks."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from octavo.model.fields import Fields
from octavo.model.weights.configuration import read_json

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
    given = Fields(read_json(file) if path.is_dir() and file.is_file() else {}, str(file))
    return SamplingDefaults(  # within the ranges of requests
        temperature=given.number("temperature", 0, 2, 1.0),
        top_p=given.number("top_p", 0, 1, 1.0),
        top_k=int(given.number("top_k", 0, 2**31 - 1, 0)),
        min_p=given.number("min_p", 0, 1, 0.0),
        repetition_penalty=given.number("repetition_penalty", 1e-3, 1e3, 1.0),
    )
