"""Sends the calls of a workload: so many at a time, or each when it is due."""

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from octavo.server.bench.client import Client, Record
from octavo.server.bench.workload import Call

INTERRUPTS = (signal.SIGINT, signal.SIGTERM)
"""What ends a run early: both raise KeyboardInterrupt, but while there is something to report."""

Progress = Callable[[int, int], None]
Send = Callable[[Call], Coroutine[Any, Any, None]]


@dataclass(slots=True)
class Outcome:
    """What a run measured."""

    records: list[Record] = field(default_factory=list)
    """In the order in which the requests were sent."""
    seconds: float = 0.0
    """From the first request to the end of the last."""
    client_cores: float = 0.0
    """Processor time that this client took meanwhile, as a share of one core."""
    interrupted: bool = False
    """Whether a signal ended it early."""


@dataclass(frozen=True, slots=True)
class Load:
    """How calls are sent."""

    client: Client
    fields: dict[str, Any]
    """What is the same in all bodies."""
    chat: bool
    concurrency: int | None
    """A closed loop of so many calls at a time; None: an open loop, in which each is sent when it is due."""
    duration: float | None = None
    """Nothing is sent after so many seconds."""

    async def run(self, calls: Sequence[Call], progress: Progress) -> Outcome:
        """Send the calls. Ctrl-C or SIGTERM sends nothing more and waits for what is under way; a second interrupts."""
        outcome, stop = Outcome(), asyncio.Event()
        cpu, start = time.process_time(), time.perf_counter()
        ended = 0

        def clock() -> float:
            return time.perf_counter() - start

        async def send(call: Call) -> None:
            nonlocal ended
            record = Record(due=call.due, asked_tokens=call.output_tokens)
            outcome.records.append(record)
            body = msgspec.json.encode(self.fields | call.fields(chat=self.chat))
            await self.client.send(body, record, clock)
            ended += 1
            progress(ended, len(calls))

        with self._stopping(stop, outcome):
            if self.concurrency is None:
                await _open_loop(calls, send, stop, clock)
            else:
                await _closed_loop(calls, self.concurrency, send, stop)
        outcome.seconds = clock()
        outcome.client_cores = (time.process_time() - cpu) / max(outcome.seconds, 1e-9)
        return outcome

    @contextlib.contextmanager
    def _stopping(self, stop: asyncio.Event, outcome: Outcome) -> Iterator[None]:
        """Set `stop` at the first signal, or when time is up."""
        loop = asyncio.get_running_loop()

        def let_go() -> None:
            for number in INTERRUPTS:
                loop.remove_signal_handler(number)
                signal.signal(number, signal.default_int_handler)

        def interrupted() -> None:
            let_go()
            outcome.interrupted = True
            stop.set()

        for number in INTERRUPTS:
            loop.add_signal_handler(number, interrupted)
        timer = loop.call_later(self.duration, stop.set) if self.duration is not None else None
        try:
            yield
        finally:
            let_go()
            if timer is not None:
                timer.cancel()


async def _closed_loop(calls: Sequence[Call], concurrency: int, send: Send, stop: asyncio.Event) -> None:
    queue = iter(calls)

    async def worker() -> None:
        for call in queue:
            if stop.is_set():
                return
            await send(call)

    async with asyncio.TaskGroup() as workers:
        for _ in range(min(concurrency, len(calls))):
            workers.create_task(worker())


async def _open_loop(calls: Sequence[Call], send: Send, stop: asyncio.Event, clock: Callable[[], float]) -> None:
    async with asyncio.TaskGroup() as requests:
        for call in calls:
            while not stop.is_set() and (early := call.due - clock()) > 0:  # timers round, some of them down
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), early)
            if stop.is_set():
                return
            requests.create_task(send(call))
