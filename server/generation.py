"""What one submission yields, as it comes from the engine, whichever engine that is."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Self

import msgspec

from octavo.scheduler.messages import Abort, FinishReason, Pause, Submission, TokenEvent
from octavo.server.spawning import EngineError

MOST_UNREAD = 256
"""Events of one request that wait to be read, before it is paused."""


class Generation(AsyncIterator[tuple[TokenEvent, ...]]):
    """The events of one submission. Each iteration yields all that have arrived since the last one.

    Ends after the event that has `finish` set. Raises EngineError where the engine is gone for good before that. While
    nobody reads what has come, the request is paused.
    """

    def __init__(self, submission: Submission, tell: Callable[[Abort | Pause], None], room: int = MOST_UNREAD) -> None:
        """`tell`: sends a message to the engine. `room`: so many unread events pause the request."""
        self.request = submission.request
        self.progressed = False
        """Whether anything was delivered since the engine that computes it was given it."""
        self.aborted: FinishReason | None = None
        """The reason it was asked to end for."""
        self.paused = False
        """Whether the engine was asked to wait until what has come is read."""
        self._submission = submission
        self._tell = tell
        self._room = room
        self._emitted: list[int] = []
        self._scored = 0
        self.begun = False
        """Whether an engine has computed anything of it."""
        self._events: list[TokenEvent] = []
        self._arrived = asyncio.Event()
        self._finished = False
        self._failure: EngineError | None = None
        self._queue_timer: asyncio.TimerHandle | None = None
        self._request_timer: asyncio.TimerHandle | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[TokenEvent, ...]:
        while not self._events:
            if self._finished:
                raise StopAsyncIteration
            if self._failure is not None:
                raise EngineError(str(self._failure), self._failure.exit_code)
            self._arrived.clear()
            await self._arrived.wait()
        events = tuple(self._events)
        self._events.clear()
        if self.paused:
            self._pause(False)
        return events

    @property
    def submission(self) -> Submission:
        """The request as an engine must be told of it now: with all that has been delivered."""
        return msgspec.structs.replace(
            self._submission,
            emitted=tuple(self._emitted),
            scored=self._scored,
            announced=self.begun,
            paused=self.paused,
        )

    def abort(self, reason: FinishReason = "abort") -> None:
        """End the request now; its last event then has this reason, unless it has finished meanwhile. Idempotent."""
        if not (self.aborted or self._finished or self._failure):
            self.aborted = reason
            self._tell(Abort(request=self.request, reason=reason))

    def expire(self, queue_seconds: float, request_seconds: float) -> None:
        """End it as timed out if it is not begun, or not finished, after so many seconds; 0: never."""
        loop = asyncio.get_running_loop()
        if queue_seconds:
            message = Abort(request=self.request, reason="timeout", unbegun=True)
            self._queue_timer = loop.call_later(queue_seconds, self._tell, message)
        if request_seconds:
            self._request_timer = loop.call_later(request_seconds, self.abort, "timeout")

    def deliver(self, event: TokenEvent) -> None:
        """Queue one event for the reader. For the client."""
        if self._queue_timer is not None:
            self._queue_timer.cancel()
        if event.token is not None:
            self._emitted.append(event.token)
        self._scored += len(event.prompt_logprobs)
        self.begun |= event.first
        self.progressed = True
        self._events.append(event)
        self._finished = event.finish is not None
        if self._finished and self._request_timer is not None:
            self._request_timer.cancel()
        if len(self._events) >= self._room and not (self.paused or self._finished):
            self._pause(True)
        self._arrived.set()

    def _pause(self, paused: bool) -> None:
        self.paused = paused
        self._tell(Pause(request=self.request, paused=paused))

    def fail(self, error: EngineError) -> None:
        """End the stream with an error once its queued events are read. For the client."""
        self._failure = error
        self._arrived.set()
