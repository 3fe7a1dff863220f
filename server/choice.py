"""One choice of an answer while it is written: a generation turned into text.

Streaming and not streaming go through the same deltas, so their texts and token counts cannot differ.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from octavo.model.step import TokenLogprobs
from octavo.scheduler.messages import TokenEvent
from octavo.server import errors
from octavo.server.errors import APIError
from octavo.server.generation import Generation
from octavo.server.spawning import EngineError
from octavo.server.text import TextDelta, TextStream

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Token:
    """A token that is shown: where its text begins, and its log-probabilities where they were asked for."""

    id: int
    offset: int
    """In characters from the beginning of the choice's text."""
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """What a choice gained: text, and the tokens whose text it completes."""

    text: str = ""
    tokens: tuple[Token, ...] = ()
    ids: tuple[int, ...] = ()
    """All tokens generated since the last delta, those without a text among them."""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended the choice; None for an EOS or a limit."""


class Choice:
    """One generation and the text it has become so far."""

    def __init__(self, index: int, generation: Generation, text: TextStream, *, show_stop_ids: bool) -> None:
        self.index = index
        self.generation = generation
        self.generated = 0
        """Tokens generated, the one that ended the choice included."""
        self.cached_tokens = 0
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.constraint: str | None = None
        """The field of the request that asks for a grammar."""
        self._error: APIError | None = None
        """Why it cannot go on."""
        self._text = text
        self._show_stop_ids = show_stop_ids
        self._unfinished: deque[TokenEvent] = deque()
        """Tokens whose text is not yet released."""
        self._complete: list[Token] = []
        """Tokens whose text is, to be delivered with the next delta."""
        self._ids: list[int] = []
        """Generated since the last delta."""

    async def deltas(self) -> AsyncGenerator[Delta]:
        """Yield what the choice gains, the last delta with its finish reason. Raises APIError if it cannot go on."""
        try:
            async for events in self.generation:
                delta = self._read(events)
                if delta is not None:
                    yield delta
                    if delta.finish_reason is not None:
                        return
                if self._error is not None:
                    raise self._error
        except EngineError:
            raise errors.engine_unavailable() from None
        finally:
            self.generation.abort()

    def _read(self, events: Sequence[TokenEvent]) -> Delta | None:
        """Feed the text stream; None while nothing can be shown."""
        text = ""
        for event in events:
            self.cached_tokens = max(self.cached_tokens, event.cached_tokens)
            self.prompt_logprobs.extend(event.prompt_logprobs)
            if event.finish in ("error", "abort", "timeout"):
                self._error = self._failure(event)
                break
            if event.token is not None:
                piece = self._feed(event, event.token)
                text += piece.text
                if piece.stopped is not None:
                    self.generation.abort("stop")
                    return self._delta(text, "stop", piece.stopped)
            if event.finish is not None:
                last = self._release(self._text.finish())
                if last.stopped is not None:  # undecided while a longer stop string could still have completed
                    return self._delta(text + last.text, "stop", last.stopped)
                return self._delta(text + last.text, event.finish, event.stop_id)
        return self._delta(text) if text else None

    def _feed(self, event: TokenEvent, token: int) -> TextDelta:
        """Take the token of an event; the one that ended the choice has no text, unless a shown stop id."""
        self.generated += 1
        self._ids.append(token)
        if event.finish == "stop" and (event.stop_id is None or not self._show_stop_ids):
            return TextDelta()
        self._unfinished.append(event)
        return self._release(self._text.feed((token,)))

    def _release(self, piece: TextDelta) -> TextDelta:
        """Note the tokens that a piece of text completes."""
        for offset in piece.offsets:
            event = self._unfinished.popleft()
            if event.token is not None:
                self._complete.append(Token(event.token, offset, event.logprobs))
        return piece

    def _delta(self, text: str, finish: str | None = None, stop: str | int | None = None) -> Delta:
        """Tokens whose text was complete earlier but empty come with the next text."""
        delta = Delta(text, tuple(self._complete), tuple(self._ids), finish, stop)
        self._complete, self._ids = [], []
        return delta

    def _failure(self, event: TokenEvent) -> APIError:
        if event.finish == "abort":
            return errors.draining()
        if event.finish == "timeout":
            return errors.request_timed_out() if self.generation.begun else errors.queue_timed_out()
        if event.grammar:
            return errors.invalid(self.constraint, f"Invalid '{self.constraint}': {event.error}", "grammar_failed")
        log.error("request %d failed: %s", event.request, event.error)
        return errors.internal_error()


async def interleave(choices: Sequence[Choice]) -> AsyncGenerator[tuple[Choice, Delta]]:
    """Yield the deltas of several choices as they come. Ends, and aborts what is left, when the caller stops."""
    if len(choices) == 1:
        async for delta in choices[0].deltas():
            yield choices[0], delta
        return
    # Bounded: what a slow reader does not take is kept by the generations, which are paused then.
    queue: asyncio.Queue[tuple[Choice, Delta] | Exception | None] = asyncio.Queue(len(choices))

    async def pump(choice: Choice) -> None:
        try:
            async for delta in choice.deltas():
                await queue.put((choice, delta))
            await queue.put(None)
        except Exception as error:  # whatever it is, the reader must hear of it: it would wait for ever
            await queue.put(error)

    tasks = [asyncio.create_task(pump(choice)) for choice in choices]
    try:
        open_choices = len(choices)
        while open_choices:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                open_choices -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def complete(choices: Sequence[Choice]) -> list[Delta]:
    """Wait for all choices, and return everything that each gained as one delta."""
    parts: dict[int, list[Delta]] = {choice.index: [] for choice in choices}
    async with aclosing(interleave(choices)) as deltas:
        async for choice, delta in deltas:
            parts[choice.index].append(delta)
    return [_joined(parts[choice.index]) for choice in choices]


def _joined(deltas: Sequence[Delta]) -> Delta:
    text = "".join(delta.text for delta in deltas)
    tokens = tuple(token for delta in deltas for token in delta.tokens)
    ids = tuple(token for delta in deltas for token in delta.ids)
    return Delta(text, tokens, ids, deltas[-1].finish_reason, deltas[-1].stop_reason)
