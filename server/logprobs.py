"""Log-probabilities in the two shapes of the OpenAI API."""

from collections.abc import Iterable
from typing import Any

from octavo.model.step import TokenLogprobs
from octavo.server.choice import Token
from octavo.server.tokenizer import Tokenizer

UNLIKELY = -9999.0
"""OpenAI's spelling of minus infinity, which JSON has not."""


def chat_logprobs(tokenizer: Tokenizer, entries: Iterable[TokenLogprobs]) -> dict[str, Any]:
    """The `logprobs` object of a chat choice."""
    content = [
        {
            **_chat_entry(tokenizer, entry.token, entry.logprob),
            "top_logprobs": [_chat_entry(tokenizer, token, logprob) for token, logprob in entry.top],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _chat_entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    return {
        "token": tokenizer.token_text(token),
        "logprob": max(logprob, UNLIKELY),
        "bytes": list(tokenizer.token_bytes(token)),
    }


def completion_logprobs(tokenizer: Tokenizer, tokens: Iterable[Token]) -> dict[str, Any]:
    """The `logprobs` object of a completions choice: four parallel lists.

    A token without log-probabilities (the first of an echoed prompt) has nulls.
    """
    result: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token in tokens:
        entry = token.logprobs
        result["tokens"].append(tokenizer.token_text(token.id))
        result["text_offset"].append(token.offset)
        result["token_logprobs"].append(None if entry is None else max(entry.logprob, UNLIKELY))
        result["top_logprobs"].append(None if entry is None else _likeliest(tokenizer, entry))
    return result


def _likeliest(tokenizer: Tokenizer, entry: TokenLogprobs) -> dict[str, float]:
    """The sampled token is always there; of two tokens with the same text the likelier is kept."""
    top: dict[str, float] = {}
    for token, logprob in (*entry.top, (entry.token, entry.logprob)):
        top.setdefault(tokenizer.token_text(token), max(logprob, UNLIKELY))
    return top
