"""Answers of the two OpenAI endpoints, whole or as a stream of chunks, from the same deltas."""

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from octavo.model.step import TokenLogprobs
from octavo.server.choice import Choice, Delta, Token, interleave
from octavo.server.logprobs import chat_logprobs, completion_logprobs
from octavo.server.text import TextStream
from octavo.server.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Head:
    """What all chunks of an answer share."""

    model: str
    fingerprint: str
    prefix: str
    id: str = field(init=False)
    created: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", f"{self.prefix}-{uuid.uuid4().hex}")
        object.__setattr__(self, "created", int(time.time()))

    def wrap(self, kind: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """A response or chunk around its choices."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": list(choices),
        }


class Writer(Protocol):
    """How one endpoint spells choices."""

    kind: str
    chunk_kind: str
    head: Head

    def opening(self, choice: Choice) -> list[dict[str, Any]]:
        """Chunks that precede a choice's first delta."""
        ...

    def pieces(self, choice: Choice, delta: Delta) -> list[dict[str, Any]]:
        """A delta as the choices of one or several chunks."""
        ...

    def result(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        """A whole choice from all its deltas in one."""
        ...


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as text, and where each of its tokens stands in it."""

    text: str
    ids: Sequence[int]
    offsets: Sequence[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer, ids: Sequence[int], given: str | Sequence[int]) -> "Echo":
        """Show a prompt with its special tokens, but without a BOS that the client did not write itself."""
        hidden = (
            isinstance(given, str) and ids[0] == tokenizer.bos_id and not given.startswith(tokenizer.bos_token or "")
        )
        stream = TextStream(tokenizer, skip_special_tokens=False)
        pieces = (stream.feed(ids[hidden:]), stream.finish())
        offsets = [0] * hidden + [offset for piece in pieces for offset in piece.offsets]
        return cls("".join(piece.text for piece in pieces), ids, offsets)

    def tokens(self, logprobs: Sequence[TokenLogprobs]) -> list[Token]:
        """The prompt's tokens; all but the first have log-probabilities, if any were computed."""
        entries = (None, *logprobs) if logprobs else (None,) * len(self.ids)
        return [Token(*parts) for parts in zip(self.ids, self.offsets, entries, strict=True)]


class CompletionWriter:
    """Choices of /v1/completions."""

    kind = chunk_kind = "text_completion"

    def __init__(self, head: Head, tokenizer: Tokenizer, seeds: Sequence[int], *, logprobs: bool) -> None:
        self.head = head
        self._tokenizer = tokenizer
        self._seeds = seeds
        self._logprobs = logprobs
        self._echoes: dict[int, Echo] = {}
        self._shift: dict[int, int] = {}
        """Characters of the prompt before what a choice generates."""

    def echo(self, choice: int, echo: Echo) -> None:
        """Let the prompt stand before what a choice generates."""
        self._echoes[choice] = echo
        self._shift[choice] = len(echo.text)

    def opening(self, choice: Choice) -> list[dict[str, Any]]:  # noqa: ARG002
        """Nothing: an echoed prompt comes with the first delta, when its log-probabilities are known."""
        return []

    def pieces(self, choice: Choice, delta: Delta) -> list[dict[str, Any]]:
        """One chunk for one delta."""
        return [self.result(choice, delta)]

    def result(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        """The same shape serves a chunk and a whole choice."""
        shift = self._shift.get(choice.index, 0)
        text, tokens = delta.text, [replace(token, offset=token.offset + shift) for token in delta.tokens]
        echo = self._echoes.pop(choice.index, None)
        if echo is not None:
            text, tokens = echo.text + text, [*echo.tokens(choice.prompt_logprobs), *tokens]
        return {
            "index": choice.index,
            "text": text,
            "logprobs": completion_logprobs(self._tokenizer, tokens) if self._logprobs else None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            "seed": self._seeds[choice.index],
        }


class ChatWriter:
    """Choices of /v1/chat/completions."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, head: Head, tokenizer: Tokenizer, seeds: Sequence[int], *, logprobs: bool) -> None:
        self.head = head
        self._tokenizer = tokenizer
        self._seeds = seeds
        self._logprobs = logprobs

    def opening(self, choice: Choice) -> list[dict[str, Any]]:
        """The role, once."""
        delta = {"role": "assistant", "content": ""}
        return [{"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}]

    def pieces(self, choice: Choice, delta: Delta) -> list[dict[str, Any]]:
        """Content first, then an empty delta with the finish reason."""
        chunks: list[dict[str, Any]] = []
        if delta.text or (delta.tokens and self._logprobs):
            content = {"content": delta.text}
            logprobs = self._entries(delta)
            chunks.append({"index": choice.index, "delta": content, "logprobs": logprobs, "finish_reason": None})
        if delta.finish_reason is not None:
            chunks.append({"index": choice.index, "delta": {}, "logprobs": None, **self._ending(choice, delta)})
        return chunks

    def result(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        """A whole choice."""
        message = {"role": "assistant", "content": delta.text, "refusal": None}
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._entries(delta),
            **self._ending(choice, delta),
        }

    def _ending(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        return {
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            "seed": self._seeds[choice.index],
        }

    def _entries(self, delta: Delta) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        return chat_logprobs(self._tokenizer, (token.logprobs for token in delta.tokens if token.logprobs))


def usage(prompts: Sequence[Sequence[int]], choices: Sequence[Choice]) -> dict[str, Any]:
    """Token counts: a prompt counts once however many choices continue it, and cached tokens are part of it."""
    prompt_tokens = sum(len(prompt) for prompt in prompts)
    completion_tokens = sum(choice.generated for choice in choices)
    first_choices = choices[:: len(choices) // len(prompts)]
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(choice.cached_tokens for choice in first_choices)},
    }


async def whole(writer: Writer, prompts: Sequence[Sequence[int]], choices: Sequence[Choice]) -> dict[str, Any]:
    """Wait for all choices and write the response."""
    parts: dict[int, list[Delta]] = {choice.index: [] for choice in choices}
    async with aclosing(interleave(choices)) as deltas:
        async for choice, delta in deltas:
            parts[choice.index].append(delta)
    results = [writer.result(choice, _joined(parts[choice.index])) for choice in choices]
    return {**writer.head.wrap(writer.kind, results), "usage": usage(prompts, choices)}


def _joined(deltas: Sequence[Delta]) -> Delta:
    text = "".join(delta.text for delta in deltas)
    tokens = tuple(token for delta in deltas for token in delta.tokens)
    return Delta(text, tokens, deltas[-1].finish_reason, deltas[-1].stop_reason)


async def chunks(
    writer: Writer, prompts: Sequence[Sequence[int]], choices: Sequence[Choice], *, include_usage: bool
) -> AsyncGenerator[dict[str, Any]]:
    """Yield the chunks of a stream as its choices grow, then the usage if it was asked for."""
    tail: dict[str, Any] = {"usage": None} if include_usage else {}
    for choice in choices:
        for piece in writer.opening(choice):
            yield writer.head.wrap(writer.chunk_kind, [piece]) | tail
    async with aclosing(interleave(choices)) as deltas:
        async for choice, delta in deltas:
            for piece in writer.pieces(choice, delta):
                yield writer.head.wrap(writer.chunk_kind, [piece]) | tail
    if include_usage:
        yield writer.head.wrap(writer.chunk_kind, []) | {"usage": usage(prompts, choices)}
