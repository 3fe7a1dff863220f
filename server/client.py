"""The server's end of the engine: starts the process, submits requests, hands events to whoever waits for them.

Everything here runs on one event loop. A request lives in `EngineClient._live` from its submission until its last
event has arrived or the engine is gone; nothing else keeps track of it.
"""

import asyncio
import contextlib
import itertools
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Self, cast

from octavo.model.step import SamplingParams
from octavo.scheduler.channel import FrameDecoder, FrameEncoder, ProtocolError
from octavo.scheduler.messages import (
    Abort,
    EngineConfig,
    EngineStats,
    Fatal,
    FinishReason,
    FromEngine,
    Loading,
    Ready,
    Shutdown,
    StepReport,
    Submission,
    ToEngine,
    TokenEvent,
    Vocabulary,
)
from octavo.server.metrics import Metrics

ENGINE_COMMAND = (sys.executable, "-m", "octavo.scheduler.process")
INTERNAL_ERROR = 70

_CLOSE_SECONDS = 2.0


class EngineError(Exception):
    """The engine could not start, has died, or was shut down. `exit_code` is what the server should end with."""

    def __init__(self, message: str, exit_code: int = INTERNAL_ERROR) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Generation(AsyncIterator[tuple[TokenEvent, ...]]):
    """The events of one submission. Each iteration yields all that have arrived since the last one.

    Ends after the event that has `finish` set. Raises EngineError where the engine is gone before that.
    """

    def __init__(self, request: int, send_abort: Callable[[int, FinishReason], None]) -> None:
        self.request = request
        self._send_abort = send_abort
        self._events: list[TokenEvent] = []
        self._arrived = asyncio.Event()
        self._aborted = False
        self._finished = False
        self._failure: EngineError | None = None

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
        return events

    def abort(self, reason: FinishReason = "abort") -> None:
        """End the request now; its last event then has this reason, unless it has finished meanwhile. Idempotent."""
        if not (self._aborted or self._finished or self._failure):
            self._aborted = True
            self._send_abort(self.request, reason)

    def deliver(self, event: TokenEvent) -> None:
        """Queue one event for the reader. For the client."""
        self._events.append(event)
        self._finished = event.finish is not None
        self._arrived.set()

    def fail(self, error: EngineError) -> None:
        """End the stream with an error once its queued events are read. For the client."""
        self._failure = error
        self._arrived.set()


class EngineClient:
    """A running engine. Made by `start`."""

    ready: Ready
    """What the engine said when it was."""

    def __init__(
        self, process: asyncio.subprocess.Process, metrics: Metrics, hear_loading: Callable[[Loading], None]
    ) -> None:
        self.metrics = metrics
        self._hear_loading = hear_loading
        self.stats = EngineStats()
        """As of the last report."""
        self.failure: EngineError | None = None
        """Why there is no engine; None while there is one."""
        self.lost = asyncio.Event()
        """Set when the engine is gone, for whatever reason."""
        self._process = process
        self._link = _Link(self._receive)
        self._numbers = itertools.count(1)
        self._live: dict[int, Generation] = {}
        self._became_ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._watcher = asyncio.create_task(self._watch())

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        command: Sequence[str] = ENGINE_COMMAND,
        metrics: Metrics | None = None,
        hear_loading: Callable[[Loading], None] = lambda _: None,
    ) -> Self:
        """Spawn an engine and wait until it has loaded its model; `hear_loading` is told how far it has come.

        `command` is called with one more argument, the number of an inherited socket. Raises EngineError. When
        cancelled, it leaves no process behind.
        """
        process, connection = await _spawn(command)
        client = cls(process, metrics or Metrics(), hear_loading)
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: client._link, sock=connection)
            client._link.send(config)
            client.ready = await client._became_ready
        except BaseException:
            client._kill()  # while it loads, it would not hear a Shutdown
            await client.close()
            raise
        client.metrics.engine_ready(client.ready)
        return client

    @property
    def alive(self) -> bool:
        """Whether requests can be submitted."""
        return self.failure is None

    @property
    def live(self) -> int:
        """Requests submitted and not finished."""
        return len(self._live)

    def learn(self, vocabulary: Vocabulary) -> None:
        """Tell the engine what tokens say. Requests that follow a grammar need it."""
        self._link.send(vocabulary)

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        max_tokens: int,
        salt: bytes = b"",
        grammar: str | None = None,
    ) -> Generation:
        """Send a request to the engine. Raises EngineError where there is none."""
        if self.failure is not None:
            raise EngineError(str(self.failure), self.failure.exit_code)
        generation = Generation(next(self._numbers), self._abort)
        submission = Submission(
            request=generation.request,
            prompt=tuple(prompt),
            params=params,
            max_tokens=max_tokens,
            salt=salt,
            grammar=grammar,
        )
        self._link.send(submission)
        self._live[generation.request] = generation
        self.metrics.request_started(generation.request, len(submission.prompt))
        return generation

    async def close(self) -> None:
        """End the engine: ask, wait at most 2 s, then kill. Live requests fail. Idempotent."""
        self._end(EngineError("the engine was shut down"))
        self._link.send(Shutdown())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), _CLOSE_SECONDS)
        self._kill()
        await self._process.wait()
        self._link.close()
        await self._watcher

    def _abort(self, request: int, reason: FinishReason) -> None:
        self._link.send(Abort(request=request, reason=reason))

    def _receive(self, message: FromEngine) -> None:
        match message:
            case StepReport():
                self.stats = message.stats
                self.metrics.step(message)
                for event in message.events:
                    self._deliver(event)
            case Loading():
                self._hear_loading(message)
            case Ready():
                if not self._became_ready.done():
                    self._became_ready.set_result(message)
            case Fatal():
                self._end(EngineError(message.message, message.exit_code))

    def _deliver(self, event: TokenEvent) -> None:
        generation = self._live.get(event.request)
        if generation is not None:
            if event.finish is not None:
                del self._live[event.request]
            generation.deliver(event)

    async def _watch(self) -> None:
        """Wait until the engine is gone, see that its process is too, and tell everyone why."""
        reason = await self._link.closed
        if reason is not None:
            self._kill()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), _CLOSE_SECONDS)
        self._kill()
        self._end(EngineError(reason or _describe_exit(await self._process.wait())))

    def _kill(self) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    def _end(self, error: EngineError) -> None:
        """Fail everything that waits for the engine. Only the first reason counts."""
        if self.failure is not None:
            return
        self.failure = error
        self.metrics.engine_lost()
        if not self._became_ready.done():
            self._became_ready.set_exception(error)
        for generation in self._live.values():
            generation.fail(error)
        self._live.clear()
        self.lost.set()


class _Link(asyncio.Protocol):
    """The socket to the engine. Reads as fast as bytes arrive; writes are buffered without limit.

    What is written is bounded by what the server admits, and the engine reads between any two steps.
    """

    def __init__(self, receive: Callable[[FromEngine], None]) -> None:
        self.closed: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        """Done when nothing more will arrive; the result says why, where it is not simply the end."""
        self._receive = receive
        self._decoder: FrameDecoder[FromEngine] = FrameDecoder(FromEngine)
        self._encoder = FrameEncoder()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Hand on the messages that these bytes complete."""
        try:
            for message in self._decoder.feed(data):
                self._receive(message)
        except ProtocolError as error:
            self._finish(f"the engine broke the protocol: {error}")
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Nothing more will arrive."""
        self._finish(None)

    def send(self, message: ToEngine) -> None:
        """Send or buffer one message; to an engine that is gone, nothing."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(self._encoder.encode(message))

    def close(self) -> None:
        """Drop the connection and whatever is buffered."""
        if self._transport is None:
            self._finish(None)
        else:
            self._transport.abort()

    def _finish(self, reason: str | None) -> None:
        if not self.closed.done():
            self.closed.set_result(reason)


async def _spawn(command: Sequence[str]) -> tuple[asyncio.subprocess.Process, socket.socket]:
    """Start the engine's process and return it with our end of the socket between us."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    try:
        with theirs:
            # A session of its own: the terminal's Ctrl-C is for the server, which decides when the engine ends.
            process = await asyncio.create_subprocess_exec(
                *command,
                str(theirs.fileno()),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
    except BaseException as error:
        ours.close()
        if isinstance(error, OSError):
            raise EngineError(f"cannot start the engine's process: {error}") from error
        raise
    return process, ours


def _describe_exit(code: int) -> str:
    """Return one line about how a process ended, from its return code."""
    if code >= 0:
        return f"the engine's process ended with exit code {code}"
    name = signal.Signals(-code).name
    hint = " (the system may be out of memory)" if name == "SIGKILL" else ""
    return f"the engine's process was killed by {name}{hint}"
