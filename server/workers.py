"""Processes that work for the server and can be killed: each answers one line with one line.

What a client or a checkpoint decides the cost of runs here: grammars and chat templates.
"""

import asyncio
import contextlib
import os
from collections.abc import Sequence

from octavo.server.errors import queue_full

LINE_BYTES = 9 << 20
"""The longest answer of a worker."""

WORKERS = 2
"""Processes of one kind, at most."""

START_SECONDS = 60.0
"""How long a worker may take until it can be asked: a busy machine must not make a good question look a bad one."""


class WorkerError(Exception):
    """A worker took too long and was killed, ended by itself, or answered more than it may: one line."""


class WorkerPool:
    """A few processes of one kind, started as they are needed; each question has one to itself."""

    def __init__(self, command: Sequence[str], opening: bytes, *, max_waiting: int, subject: str) -> None:
        """`opening` is the line that a new worker is sent first; `subject` is what those who wait bring."""
        self._command = command
        self._opening = opening
        self._turns = asyncio.Semaphore(WORKERS)
        self._max_waiting = max_waiting
        self._subject = subject
        self._waiting = 0
        self.idle: list[Worker] = []

    async def ask(self, question: bytes, seconds: float) -> bytes:
        """Return the answer to a line. Raises WorkerError, or APIError (429) if many wait."""
        if self._waiting >= self._max_waiting:
            raise queue_full(f"{self._max_waiting} {self._subject}")
        self._waiting += 1
        try:
            async with self._turns:
                return await self._ask(question, seconds)
        finally:
            self._waiting -= 1

    async def _ask(self, question: bytes, seconds: float) -> bytes:
        self.idle = [worker for worker in self.idle if worker.alive]
        worker = self.idle.pop() if self.idle else await Worker.start(self._command)
        try:
            if not worker.ready:
                await asyncio.wait_for(worker.ask(self._opening), START_SECONDS)
                worker.ready = True
            return await asyncio.wait_for(worker.ask(question), seconds)
        except TimeoutError:
            raise WorkerError(f"it takes more than {seconds:g} s") from None
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            raise WorkerError("it takes too much memory") from None
        finally:
            if worker.intact:
                self.idle.append(worker)
            else:
                await worker.end()

    async def close(self) -> None:
        """End the workers."""
        while self.idle:
            await self.idle.pop().end()


class Worker:
    """One process, which answers one line at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.ready = False
        """Whether it has read its opening, and so can be asked."""
        self.intact = False
        """Whether the last question was answered."""

    @classmethod
    async def start(cls, command: Sequence[str]) -> "Worker":
        """Start a process, without the server's own variables: a key may be among them."""
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=LINE_BYTES,
            start_new_session=True,
            env=environment(),
        )
        return cls(process)

    @property
    def alive(self) -> bool:
        """Whether the process has not ended, as far as is known."""
        return self._process.returncode is None

    async def ask(self, question: bytes) -> bytes:
        """Return the answer to a line. Raises OSError or IncompleteReadError where the process has died of it."""
        self.intact = False
        if self._process.stdin is None or self._process.stdout is None:
            raise BrokenPipeError
        self._process.stdin.write(question + b"\n")
        await self._process.stdin.drain()
        answer = await self._process.stdout.readuntil(b"\n")
        self.intact = True
        return answer

    async def end(self) -> None:
        """Kill the process and see that it is gone."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.communicate()


def environment() -> dict[str, str]:
    """The variables that a worker may know."""
    return {name: value for name, value in os.environ.items() if not name.startswith("OCTAVO_")}
