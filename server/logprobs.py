"""Log-probabilities in the two shapes of the OpenAI API."""

from collections.abc import Iterable
from typing import Any

from octavo.model.step import TokenLogprobs
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


class CompletionLogprobs:
    """The `logprobs` objects of one completions choice: parallel lists, with offsets that run through its chunks."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def write(self, text: str, tokens: Iterable[tuple[int, TokenLogprobs | None]]) -> dict[str, Any]:
        """Describe the tokens whose text is `text`; an entry of None (the first prompt token) has no probability.

        A token's offset is where its characters begin; one that only adds bytes to an unfinished character, or is a
        special token that is not shown, stands where the next character begins.
        """
        result: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        position = 0
        for token, entry in tokens:
            piece = self._tokenizer.token_text(token)
            result["tokens"].append(piece)
            result["text_offset"].append(self._offset + position)
            result["token_logprobs"].append(None if entry is None else max(entry.logprob, UNLIKELY))
            result["top_logprobs"].append(None if entry is None else self._top(entry))
            if text.startswith(piece, position):
                position += len(piece)
        self._offset += len(text)
        return result

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """The sampled token is always there; of two tokens with the same text the likelier is kept."""
        top: dict[str, float] = {}
        for token, logprob in (*entry.top, (entry.token, entry.logprob)):
            top.setdefault(self._tokenizer.token_text(token), max(logprob, UNLIKELY))
        return top
