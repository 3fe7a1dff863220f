"""Log-probabilities in the two shapes of the OpenAI API."""

from collections.abc import Iterable
from typing import Any

from octavo.model.step import TokenLogprobs
from octavo.server.choice import Token
from octavo.server.tokenizer import Tokenizer

UNLIKELY = -9999.0
"""OpenAI's spelling of minus infinity, which JSON has not."""


class TokenNames:
    """What tokens are called in log-probabilities: by their text, or by their number where a client asks for that."""

    def __init__(self, tokenizer: Tokenizer, *, by_number: bool = False) -> None:
        self._tokenizer = tokenizer
        self._by_number = by_number

    def name(self, token: int) -> str:
        """A token's text, or `token_id:` and its number."""
        return f"token_id:{token}" if self._by_number else self._tokenizer.token_text(token)

    def data(self, token: int) -> list[int]:
        """The bytes of its text."""
        return list(self._tokenizer.token_bytes(token))


def prompt_logprobs(tokenizer: Tokenizer, entries: Iterable[TokenLogprobs], alternatives: int) -> list[Any]:
    """vLLM's `prompt_logprobs`: null for the first token, then the token and the likeliest ones by id."""
    return [None, *(_ranked(tokenizer, entry, alternatives) for entry in entries)]


def _ranked(tokenizer: Tokenizer, entry: TokenLogprobs, alternatives: int) -> dict[str, Any]:
    shown = {entry.token: (entry.rank, entry.logprob)}
    shown |= {token: (rank, logprob) for rank, (token, logprob) in enumerate(entry.top[:alternatives], 1)}
    return {
        str(token): {"logprob": max(logprob, UNLIKELY), "rank": rank, "decoded_token": tokenizer.token_text(token)}
        for token, (rank, logprob) in shown.items()
    }


def chat_logprobs(names: TokenNames, entries: Iterable[TokenLogprobs]) -> dict[str, Any]:
    """The `logprobs` object of a chat choice."""
    content = [
        {
            **_chat_entry(names, entry.token, entry.logprob),
            "top_logprobs": [_chat_entry(names, token, logprob) for token, logprob in entry.top],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _chat_entry(names: TokenNames, token: int, logprob: float) -> dict[str, Any]:
    return {"token": names.name(token), "logprob": max(logprob, UNLIKELY), "bytes": names.data(token)}


def completion_logprobs(names: TokenNames, tokens: Iterable[Token]) -> dict[str, Any]:
    """The `logprobs` object of a completions choice: four parallel lists.

    A token without log-probabilities (the first of an echoed prompt) has nulls.
    """
    result: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token in tokens:
        entry = token.logprobs
        result["tokens"].append(names.name(token.id))
        result["text_offset"].append(token.offset)
        result["token_logprobs"].append(None if entry is None else max(entry.logprob, UNLIKELY))
        result["top_logprobs"].append(None if entry is None else _likeliest(names, entry))
    return result


def _likeliest(names: TokenNames, entry: TokenLogprobs) -> dict[str, float]:
    """The sampled token is always there; of two tokens with the same text the likelier is kept."""
    top: dict[str, float] = {}
    for token, logprob in (*entry.top, (entry.token, entry.logprob)):
        top.setdefault(names.name(token), max(logprob, UNLIKELY))
    return top
