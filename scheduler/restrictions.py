"""Which tokens a request may sample next, where it allows some only or forbids words."""

from collections.abc import Sequence

from octavo.model.step import SamplingParams


def next_mask(params: SamplingParams, output: Sequence[int], pending: int, ending_ids: Sequence[int]) -> bytes | None:
    """Return the mask of a `Row` that samples behind `output` and `pending` more tokens; None where all are allowed.

    As in vLLM, a word of several tokens is prevented by forbidding its last one behind the others, and only what is
    generated counts: with bad words nothing may be pending. The end of the request is forbidden until min_tokens are
    there.
    """
    if params.allowed is None:
        return None
    mask = bytearray(params.allowed)
    for *beginning, last in params.bad_words:
        if beginning == list(output[max(len(output) - len(beginning), 0) :]):
            _forbid(mask, last)
    if len(output) + pending < params.min_tokens:
        for token in ending_ids:
            _forbid(mask, token)
    return bytes(mask)


def without(mask: bytes, tokens: Sequence[int]) -> bytes:
    """Return a mask less some tokens, unless nothing would be left."""
    rest = bytearray(mask)
    for token in tokens:
        _forbid(rest, token)
    return bytes(rest) if any(rest) else mask


def _forbid(mask: bytearray, token: int) -> None:
    if 0 <= token < 8 * len(mask):  # a model may declare an end of sequence that its logits cannot name
        mask[token // 8] &= ~(1 << token % 8)
