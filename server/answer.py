"""Answers of the two OpenAI endpoints, whole or as a stream of chunks, from the same deltas."""

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from octavo.model.step import TokenLogprobs
from octavo.server.choice import Choice, Delta, Token, complete, interleave
from octavo.server.logprobs import TokenNames, chat_logprobs, completion_logprobs, prompt_logprobs
from octavo.server.prepare import Prepared
from octavo.server.protocol import SamplingFields
from octavo.server.stream import Framing
from octavo.server.text import TextStream
from octavo.server.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Head:
    """What all chunks of an answer share."""

    model: str
    fingerprint: str
    id: str
    created: int = field(default_factory=lambda: int(time.time()))

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


@dataclass(frozen=True, slots=True)
class Shown:
    """What a client wants to see beside the text."""

    tokenizer: Tokenizer
    names: TokenNames
    logprobs: int | None
    """Alternatives beside each token; None: no log-probabilities."""
    prompt_logprobs: int | None
    token_ids: bool
    usage: bool
    """At the end of a stream."""

    @classmethod
    def of(cls, request: SamplingFields, tokenizer: Tokenizer, logprobs: int | None) -> "Shown":
        """Read it from a request; `logprobs` is spelled differently by the two endpoints."""
        names = TokenNames(tokenizer, by_number=request.return_tokens_as_token_ids is True)
        usage = request.stream_options is not None and request.stream_options.include_usage is True
        return cls(tokenizer, names, logprobs, request.prompt_logprobs, request.return_token_ids is True, usage)

    def of_prompt(self, choice: Choice) -> dict[str, Any]:
        """The log-probabilities of a prompt, where they are wanted."""
        if self.prompt_logprobs is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs(self.tokenizer, choice.prompt_logprobs, self.prompt_logprobs)}


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

    def tokens(self, logprobs: Sequence[TokenLogprobs], alternatives: int) -> list[Token]:
        """The prompt's tokens; all but the first have log-probabilities, if any were computed."""
        cut = [replace(entry, top=entry.top[:alternatives]) for entry in logprobs]
        entries = (None, *cut) if cut else (None,) * len(self.ids)
        return [Token(*parts) for parts in zip(self.ids, self.offsets, entries, strict=True)]


class Writer(ABC):
    """How one endpoint spells an answer: whole, or as a stream of chunks."""

    framing = Framing()
    kind: str
    chunk_kind: str

    def __init__(self, head: Head, prepared: Prepared, shown: Shown) -> None:
        self._head = head
        self._prepared = prepared
        self._shown = shown

    async def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Wait for all choices and write the response."""
        results = [self._result(*pair) for pair in zip(choices, await complete(choices), strict=True)]
        return {**self._head.wrap(self.kind, results), **self._around(choices), "usage": self._usage(choices)}

    async def events(self, choices: Sequence[Choice]) -> AsyncGenerator[dict[str, Any]]:
        """Yield the chunks of a stream as its choices grow, then the usage if it was asked for."""
        tail: dict[str, Any] = {"usage": None} if self._shown.usage else {}
        first = self._around(choices)
        for choice in choices:
            for piece in self._opening(choice):
                yield self._head.wrap(self.chunk_kind, [piece]) | tail | first
                first = {}
        async with aclosing(interleave(choices)) as deltas:
            async for choice, delta in deltas:
                for piece in self._pieces(choice, delta):
                    yield self._head.wrap(self.chunk_kind, [piece]) | tail
        if self._shown.usage:
            yield self._head.wrap(self.chunk_kind, []) | {"usage": self._usage(choices)}

    @abstractmethod
    def _result(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        """A whole choice from all its deltas in one."""

    def _opening(self, choice: Choice) -> list[dict[str, Any]]:  # noqa: ARG002
        """Chunks that precede a choice's first delta."""
        return []

    def _pieces(self, choice: Choice, delta: Delta) -> list[dict[str, Any]]:
        """A delta as the choices of one or several chunks."""
        return [self._result(choice, delta)]

    def _around(self, choices: Sequence[Choice]) -> dict[str, Any]:  # noqa: ARG002
        """What stands beside the choices of a response or of a stream's first chunk."""
        return {}

    def _usage(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Token counts: a prompt counts once however many choices continue it, and cached tokens are part of it."""
        prompt_tokens = sum(len(prompt) for prompt in self._prepared.prompts)
        completion_tokens = sum(choice.generated for choice in choices)
        cached_tokens = sum(choice.cached_tokens for choice in choices[:: self._prepared.choices])
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }


class CompletionWriter(Writer):
    """Choices of /v1/completions. The same shape serves a chunk and a whole choice."""

    kind = chunk_kind = "text_completion"

    def __init__(
        self, head: Head, prepared: Prepared, shown: Shown, echoed: Sequence[str | Sequence[int]] = ()
    ) -> None:
        """`echoed`: the prompts as they were given, where they are to stand before what is generated."""
        super().__init__(head, prepared, shown)
        self._untold = set(range(len(prepared.seeds)))
        """Choices whose prompt has not been sent."""
        self._echoes = [Echo.of(shown.tokenizer, *pair) for pair in zip(prepared.prompts, echoed, strict=False)]

    def _result(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        prompt = choice.index // self._prepared.choices
        first = choice.index in self._untold
        self._untold.discard(choice.index)
        text, tokens = delta.text, list(delta.tokens)
        if self._echoes:
            echo = self._echoes[prompt]
            tokens = [replace(token, offset=token.offset + len(echo.text)) for token in tokens]
            if first:
                text = echo.text + text
                tokens = [*echo.tokens(choice.prompt_logprobs, self._shown.logprobs or 0), *tokens]
        result = {
            "index": choice.index,
            "text": text,
            "logprobs": completion_logprobs(self._shown.names, tokens) if self._shown.logprobs is not None else None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            "seed": self._prepared.seeds[choice.index],
            **self._shown.of_prompt(choice),
        }
        if self._shown.token_ids:
            ids = self._prepared.prompts[prompt] if first else None
            result |= {"token_ids": delta.ids, "prompt_token_ids": ids}
        return result


class ChatWriter(Writer):
    """Choices of /v1/chat/completions."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def _opening(self, choice: Choice) -> list[dict[str, Any]]:
        """The role, once."""
        delta = {"role": "assistant", "content": ""}
        return [{"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}]

    def _pieces(self, choice: Choice, delta: Delta) -> list[dict[str, Any]]:
        """Content first, then an empty delta with the finish reason."""
        chunks: list[dict[str, Any]] = []
        logprobs = self._entries(delta)
        for part in self._parts(choice, delta):
            chunks.append({"index": choice.index, "delta": part, "logprobs": logprobs, "finish_reason": None})
            logprobs = None  # they come with the first part of a delta
        if delta.finish_reason is not None:
            chunks.append({"index": choice.index, "delta": {}, "logprobs": None, **self._ending(choice, delta)})
        if self._shown.token_ids and chunks:
            chunks[0]["token_ids"] = delta.ids
        return chunks

    def _result(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        """A whole choice."""
        return {
            "index": choice.index,
            "message": self._message(choice, delta),
            "logprobs": self._entries(delta),
            **self._ending(choice, delta),
            **({"token_ids": delta.ids} if self._shown.token_ids else {}),
        }

    def _around(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The prompt, which all choices share."""
        ids = {"prompt_token_ids": self._prepared.prompts[0]} if self._shown.token_ids else {}
        return ids | self._shown.of_prompt(choices[0])

    def _parts(self, choice: Choice, delta: Delta) -> list[dict[str, Any]]:  # noqa: ARG002
        return [{"content": delta.text}] if delta.text or self._shows_tokens(delta) else []

    def _message(self, choice: Choice, delta: Delta) -> dict[str, Any]:  # noqa: ARG002
        return {"role": "assistant", "content": delta.text, "refusal": None}

    def _reason(self, choice: Choice, delta: Delta) -> str | None:  # noqa: ARG002
        return delta.finish_reason

    def _shows_tokens(self, delta: Delta) -> bool:
        return bool(delta.tokens) and self._shown.logprobs is not None

    def _ending(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        return {
            "finish_reason": self._reason(choice, delta),
            "stop_reason": delta.stop_reason,
            "seed": self._prepared.seeds[choice.index],
        }

    def _entries(self, delta: Delta) -> dict[str, Any] | None:
        if self._shown.logprobs is None:
            return None
        return chat_logprobs(self._shown.names, (token.logprobs for token in delta.tokens if token.logprobs))
