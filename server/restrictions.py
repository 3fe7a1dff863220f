"""Tokens that a request allows or forbids, from what a client writes to what the engine reads."""

from collections.abc import Iterator, Sequence

import numpy as np

from octavo.model.memory import mask_width
from octavo.server.errors import invalid
from octavo.server.prompts import check_ids
from octavo.server.protocol import SamplingFields
from octavo.server.tokenizer import Tokenizer

MAX_BAD_TOKENS = 1024
"""In all the words together."""


def restrictions(
    request: SamplingFields, tokenizer: Tokenizer, vocabulary: int
) -> tuple[bytes | None, tuple[tuple[int, ...], ...]]:
    """Return the mask of allowed tokens, None where all are, and the words as token ids. Raises APIError (400)."""
    allowed, words = request.allowed_token_ids, tuple(_words(request.bad_words or (), tokenizer))
    if allowed:
        check_ids(allowed, vocabulary, "allowed_token_ids", "allowed_token_ids")
    if sum(map(len, words)) > MAX_BAD_TOKENS:
        raise invalid("bad_words", f"'bad_words' are {sum(map(len, words))} tokens; at most {MAX_BAD_TOKENS} may be.")
    if allowed is None and not words:
        return None, ()
    open_tokens = np.full(8 * mask_width(vocabulary), allowed is None)
    open_tokens[vocabulary:] = False
    open_tokens[allowed or []] = True
    open_tokens[[word[0] for word in words if len(word) == 1]] = False
    if not open_tokens.any():
        raise invalid("bad_words", "'bad_words' forbid every token that 'allowed_token_ids' allows.")
    return np.packbits(open_tokens, bitorder="little").tobytes(), words


def _words(words: Sequence[str], tokenizer: Tokenizer) -> Iterator[tuple[int, ...]]:
    """Each word as it begins a text and, where that is as many tokens, as it stands behind a space: as vLLM does it."""
    for index, word in enumerate(words):
        bare = tokenizer.encode(word.lstrip(), add_special_tokens=False)
        spaced = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
        if not bare:
            raise invalid("bad_words", f"Invalid 'bad_words[{index}]': it is no token.")
        yield tuple(bare)
        if spaced[0] != bare[0] and len(spaced) == len(bare):
            yield tuple(spaced)
