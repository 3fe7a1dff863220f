"""One life of the engine: its process, and the server's end of the socket to it."""

import asyncio
import contextlib
import signal
import subprocess
from collections.abc import Callable
from typing import Self, cast

from octavo.scheduler.channel import FrameDecoder, FrameEncoder, ProtocolError
from octavo.scheduler.messages import EngineConfig, Fatal, FromEngine, Loading, Ready, Shutdown, StepReport, ToEngine
from octavo.server.spawning import EngineError, Spawned

_CLOSE_SECONDS = 2.0


class EngineProcess:
    """A process that loads a model and computes requests. Made by `start`."""

    ready: Ready
    """What the engine said when it was."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        hear_report: Callable[[StepReport], None],
        hear_loading: Callable[[Loading], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[EngineError] = loop.create_future()
        """Done once the process is gone; the result says why."""
        self._process = process
        self._hear_report = hear_report
        self._hear_loading = hear_loading
        self._reason: EngineError | None = None
        """Why it ends, if that is known before it has ended."""
        self._link = _Link(self._receive)
        self._became_ready: asyncio.Future[Ready] = loop.create_future()
        self._watcher = asyncio.create_task(self._watch())

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        spawned: Spawned,
        hear_report: Callable[[StepReport], None],
        hear_loading: Callable[[Loading], None],
    ) -> Self:
        """Wait until an engine has loaded its model; `hear_loading` is told how far it has come.

        Raises EngineError. When cancelled, it leaves no process behind.
        """
        engine = cls(spawned.process, hear_report, hear_loading)
        try:
            connecting = asyncio.get_running_loop().create_unix_connection(
                lambda: engine._link, sock=spawned.connection
            )
            await asyncio.shield(connecting)  # uvloop would leave a transport that is neither open nor lost
            engine.send(config)
            engine.ready = await engine._readiness()
        except BaseException:
            engine.kill("it was not wanted any more")  # while it loads, it would not hear a Shutdown
            await engine.close()
            raise
        return engine

    @property
    def returncode(self) -> int | None:
        """What the process ended with; None while it runs."""
        return self._process.poll()

    def send(self, message: ToEngine) -> None:
        """Send or buffer one message; to an engine that is gone, nothing."""
        self._link.send(message)

    def kill(self, reason: str) -> None:
        """End the process at once."""
        self._reason = self._reason or EngineError(reason)
        self._process.kill()

    async def close(self) -> None:
        """End the process: ask, wait at most 2 s, then kill. Idempotent."""
        self._link.send(Shutdown())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._exit(), _CLOSE_SECONDS)
        self.kill("it did not end when it was told to")
        await self._exit()
        self._link.close()
        await self._watcher

    async def _readiness(self) -> Ready:
        await asyncio.wait((self._became_ready, self.ended), return_when=asyncio.FIRST_COMPLETED)
        if not self._became_ready.done():
            raise self.ended.result()
        return self._became_ready.result()

    def _receive(self, message: FromEngine) -> None:
        match message:
            case StepReport():
                self._hear_report(message)
            case Loading():
                self._hear_loading(message)
            case Ready():
                if not self._became_ready.done():
                    self._became_ready.set_result(message)
            case Fatal():
                self._reason = EngineError(message.message, message.exit_code)

    async def _watch(self) -> None:
        """Wait until the connection is gone, see that the process is too, and say why."""
        broken = await self._link.closed
        if broken is not None:
            self.kill(broken)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._exit(), _CLOSE_SECONDS)
        if self.returncode is None:
            self.kill("the engine closed its connection")
        self.ended.set_result(self._reason or EngineError(_describe_exit(await self._exit())))

    async def _exit(self) -> int:
        """Wait for the end of the process, which is near, and return what it ended with."""
        while (code := self.returncode) is None:
            await asyncio.sleep(0.005)
        return code


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


def _describe_exit(code: int) -> str:
    """Return one line about how a process ended, from its return code."""
    if code >= 0:
        return f"the engine's process ended with exit code {code}"
    name = signal.Signals(-code).name
    hint = " (the system may be out of memory)" if name == "SIGKILL" else ""
    return f"the engine's process was killed by {name}{hint}"
