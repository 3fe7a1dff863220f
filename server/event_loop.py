"""The event loop of the daemon: uvloop's, but with all of its threads from the start."""

import asyncio
import os
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import uvloop


class DaemonLoop(uvloop.Loop):
    """Starts no thread once it runs.

    A thread that is started where memory has run out can die before it says that it runs; whoever has started it, which
    `asyncio.to_thread` does on the loop, then waits for ever.
    """

    def __init__(self) -> None:
        super().__init__()
        count = min(32, (os.cpu_count() or 1) + 4)  # as many as asyncio starts in time
        self._threads, together = ThreadPoolExecutor(count), Barrier(count)
        for _ in range(count):
            self._threads.submit(together.wait)
        self.set_default_executor(self._threads)

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:  # noqa: ARG002
        """Wait for the threads, and start none that would do so."""
        self._threads.shutdown()


def run(main: Coroutine[Any, Any, int]) -> int:
    """Run the daemon to its end."""
    with asyncio.Runner(loop_factory=DaemonLoop) as runner:
        return runner.run(main)
