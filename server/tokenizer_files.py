"""The tokenizer of a Hugging Face directory or a GGUF file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from octavo.model.weights.configuration import read_json_if_any
from octavo.model.weights.gguf_file import GGUFFile
from octavo.server.tokenizer import Tokenizer
from octavo.server.tokenizer_gguf import gguf_tokenizer
from octavo.server.vocabulary import TokenizerError


def load_tokenizer(path: Path) -> Tokenizer:
    """Load the tokenizer of a Hugging Face directory or a .gguf file.

    Raises TokenizerError, or CheckpointError if a file is damaged: one line that begins with the path.
    """
    try:
        if path.suffix.lower() == ".gguf" and not path.is_dir():
            return gguf_tokenizer(GGUFFile(path).metadata)
        return _from_directory(path)
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from None


def _from_directory(directory: Path) -> Tokenizer:
    if not (directory / "tokenizer.json").is_file():
        raise TokenizerError("no tokenizer.json here; a model needs one (or use a .gguf file, which carries its own)")
    config = read_json_if_any(directory / "tokenizer_config.json")
    names = read_json_if_any(directory / "special_tokens_map.json") | {k: v for k, v in config.items() if v is not None}
    return Tokenizer(
        _parse(directory / "tokenizer.json"),
        bos_token=_token_string(names.get("bos_token")),
        eos_token=_token_string(names.get("eos_token")),
        adds_bos=config.get("add_bos_token") is True,
        chat_template=_chat_template(directory, config),
    )


def _parse(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises nothing more specific
        raise TokenizerError(f"{path.name} cannot be read: {error}") from None


def _token_string(value: Any) -> str | None:
    """A special token is named by its string, or by an object with its content."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _chat_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    """The template in its own file, else the one in tokenizer_config.json, "default" if there are several."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    value = config.get("chat_template")
    if isinstance(value, list):
        value = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}.get("default")
    return value if isinstance(value, str) else None
