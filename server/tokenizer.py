"""Text to token ids and back, for a Hugging Face directory or a GGUF file."""

import asyncio
import json
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.processors import TemplateProcessing

from octavo.model.weights.configuration import read_json
from octavo.model.weights.gguf_file import GGUFFile
from octavo.server.tokenizer_gguf import gguf_tokenizer
from octavo.server.vocabulary import TokenizerError, piece_decoder

__all__ = ["Tokenizer", "TokenizerError", "load_tokenizer"]

INLINE_CHARACTERS = 4096
"""Longer texts are tokenised in a thread, so that the event loop goes on answering."""
LONG_CHARACTERS = 1 << 16
"""Longer ones wait for one of two threads: they take seconds, and nobody else should wait for them."""

_SURROGATE = re.compile("[\ud800-\udfff]")


class Tokenizer:
    """A tokenizer with what the server needs around it: exact bytes of each token, BOS, EOS and the chat template."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        adds_bos: bool = False,
        chat_template: str | None = None,
    ) -> None:
        """Take over `backend`. `adds_bos` is for one that adds no special tokens of its own. Raises TokenizerError."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
        self._bytes: dict[int, bytes] = {}
        self.pieces = piece_decoder(_decoder_specification(backend))
        """How tokens become bytes, and what is stripped from the text of a whole sequence."""
        self.vocabulary = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        """Every token id is below it."""
        self.longest_piece = _longest_piece(backend)
        """The most characters of a text that one token stands for; None where that is not bounded."""
        self._long_texts = ThreadPoolExecutor(2, thread_name_prefix="long texts")
        self.bos_token, self.eos_token = bos_token, eos_token
        self.bos_id = None if bos_token is None else self._id(bos_token)
        if eos_token is not None:
            self._id(eos_token)  # one that is not there is refused
        self.chat_template = chat_template
        """Jinja source, or None."""
        if adds_bos and bos_token is not None and backend.post_processor is None:
            backend.post_processor = TemplateProcessing(
                single=[bos_token, "$A"], pair=None, special_tokens=[(bos_token, self._id(bos_token))]
            )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text; special tokens such as BOS are added as the tokenizer's own files say.

        A lone surrogate, which has no UTF-8, counts as U+FFFD.
        """
        text = _SURROGATE.sub("\N{REPLACEMENT CHARACTER}", text)
        # Unlike `encode`, this lets other threads run meanwhile.
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    async def encode_aside(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return what `encode` does, without holding up the event loop."""
        if len(text) <= INLINE_CHARACTERS:
            return self.encode(text, add_special_tokens)
        pool = self._long_texts if len(text) > LONG_CHARACTERS else None
        return await asyncio.get_running_loop().run_in_executor(pool, self.encode, text, add_special_tokens)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids. Each maximal invalid sequence of bytes becomes one U+FFFD.

        That is what `tokenizers` does for byte-level BPE; for byte-fallback tokens it differs where bytes are invalid
        (there `tokenizers` also gives up the valid characters beside them).
        """
        shown = (i for i in ids if not (skip_special_tokens and self.is_special(i)))
        text = b"".join(map(self.token_bytes, shown)).decode("utf-8", "replace")
        for _ in range(self.pieces.strip_count):
            text = text.removeprefix(self.pieces.strip)
        return text

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token adds to a text; none for an id that the tokenizer does not know."""
        known = self._bytes.get(token)
        if known is None:
            piece = self._backend.id_to_token(token) if 0 <= token < self.vocabulary else None
            known = self.pieces.encode(piece) if piece is not None else b""
            if piece is not None:
                self._bytes[token] = known
        return known

    def token_text(self, token: int) -> str:
        """Return a token's own text, a leading space included.

        Bytes that are no text alone are spelled as in OpenAI's completions API, for example "bytes:\\xe2\\x98": so
        different tokens keep different names.
        """
        data = self.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def is_special(self, token: int) -> bool:
        """Whether the token is a control token such as BOS, which decoding can skip."""
        return token in self._special

    def special_id(self, text: str) -> int | None:
        """Return the control token that is written so; None if there is none."""
        token = self._backend.token_to_id(text)
        return token if token in self._special else None

    def _id(self, token: str) -> int:
        found = self._backend.token_to_id(token)
        if found is None:
            raise TokenizerError(f"special token {token!r} is not in the tokenizer's vocabulary")
        return found


def _longest_piece(backend: tokenizers.Tokenizer) -> int | None:
    """What is normalised away, or swallowed by a token beside it, has no bound."""
    added = backend.get_added_tokens_decoder().values()
    if backend.normalizer is not None or any(token.lstrip or token.rstrip for token in added):
        return None
    return max(map(len, backend.get_vocab(with_added_tokens=True)), default=1)


def _decoder_specification(backend: tokenizers.Tokenizer) -> Any:
    """The decoder's JSON, without that of the whole vocabulary: its pickled state is the same JSON."""
    state = backend.decoder.__getstate__() if backend.decoder is not None else b"null"
    return json.loads(state) if isinstance(state, (bytes, str)) else None


def load_tokenizer(path: Path) -> Tokenizer:
    """Load the tokenizer of a Hugging Face directory or a .gguf file.

    Raises TokenizerError, or CheckpointError if a file is damaged: one line that begins with the path.
    """
    try:
        if path.suffix.lower() == ".gguf" and not path.is_dir():
            return _from_gguf(path)
        return _from_directory(path)
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from None


def _from_directory(directory: Path) -> Tokenizer:
    if not (directory / "tokenizer.json").is_file():
        raise TokenizerError("no tokenizer.json here; a model needs one (or use a .gguf file, which carries its own)")
    config = _read_json(directory / "tokenizer_config.json")
    names = _read_json(directory / "special_tokens_map.json") | {k: v for k, v in config.items() if v is not None}
    return Tokenizer(
        _parse(directory / "tokenizer.json"),
        bos_token=_token_string(names.get("bos_token")),
        eos_token=_token_string(names.get("eos_token")),
        adds_bos=config.get("add_bos_token") is True,
        chat_template=_chat_template(directory, config),
    )


def _from_gguf(path: Path) -> Tokenizer:
    metadata: Mapping[str, Any] = GGUFFile(path).metadata
    parts = gguf_tokenizer(metadata)
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(
        parts.backend,
        bos_token=parts.bos_token,
        eos_token=parts.eos_token,
        adds_bos=parts.adds_bos,
        chat_template=template if isinstance(template, str) else None,
    )


def _parse(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises nothing more specific
        raise TokenizerError(f"{path.name} cannot be read: {error}") from None


def _read_json(path: Path) -> dict[str, Any]:
    """An object from a JSON file; empty if there is no such file."""
    return read_json(path) if path.is_file() else {}


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
