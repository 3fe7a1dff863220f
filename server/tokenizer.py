"""Text to token ids and back."""

import asyncio
import json
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tokenizers
from tokenizers.processors import TemplateProcessing

from octavo.server.vocabulary import TokenizerError, piece_decoder

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
