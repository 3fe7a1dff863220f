"""How a model's makers would sample it: the numbers in generation_config.json, used only where the operator asks."""

import logging
from dataclasses import fields
from pathlib import Path

from octavo.model.fields import Fields
from octavo.model.step import SamplingParams
from octavo.model.weights.configuration import read_json_if_any

_log = logging.getLogger(__name__)


def choose_sampling_defaults(path: Path, *, wanted: bool) -> SamplingParams:
    """Return those of the model, if they are wanted, and log which are not OpenAI's. Raises CheckpointError."""
    if not wanted:
        return SamplingParams()
    defaults = model_sampling_defaults(path)
    values = ((field.name, getattr(defaults, field.name), field.default) for field in fields(defaults))
    changed = [f"{name} {value:g}" for name, value, usual in values if value != usual]
    _log.info("sampling defaults of the model: %s", ", ".join(changed) or "none")
    return defaults


def model_sampling_defaults(path: Path) -> SamplingParams:
    """Read them from the directory of a model; a .gguf file has none. Raises CheckpointError."""
    file = path / "generation_config.json"
    given = Fields(read_json_if_any(file), str(file))
    return SamplingParams(  # within the ranges of requests
        temperature=given.number("temperature", 0, 2, 1.0),
        top_p=given.number("top_p", 0, 1, 1.0),
        top_k=int(given.number("top_k", 0, 2**31 - 1, 0)),
        min_p=given.number("min_p", 0, 1, 0.0),
        repetition_penalty=given.number("repetition_penalty", 1e-3, 1e3, 1.0),
    )
