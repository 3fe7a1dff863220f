"""The server's end of the engine: submits requests, hands events to whoever waits for them, and survives the engine.

Everything here runs on one event loop. A request lives in `EngineClient._live` from its submission until its last
event has arrived or the client has given up; nothing else keeps track of it. When the engine's process dies, another is
started and every live request is submitted again with the tokens it has emitted: since a token depends on nothing but
its own request, the new engine goes on with the tokens the old one would have chosen.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Self

import msgspec

from octavo.scheduler.faults import faults_in
from octavo.scheduler.messages import (
    Abort,
    EngineConfig,
    Loading,
    Pause,
    Ready,
    StepReport,
    Submission,
    TokenEvent,
    Vocabulary,
)
from octavo.server.engine_process import EngineProcess
from octavo.server.generation import Generation
from octavo.server.metrics import Metrics
from octavo.server.revival import Obituary, RestartPolicy, StallWatch
from octavo.server.spawning import ENGINE_COMMAND, EngineError, Spawned, spawn

_log = logging.getLogger(__name__)


class EngineClient:
    """An engine that is started again when it dies. Made by `start`."""

    def __init__(self, config: EngineConfig, command: Sequence[str], metrics: Metrics, policy: RestartPolicy) -> None:
        self.metrics = metrics
        self.failure: EngineError | None = None
        """Why there is no engine any more; None while there is one, or will be again."""
        self.lost = asyncio.Event()
        """Set when the engine is gone for good."""
        self.restarting = False
        """Whether an engine is being started in place of one that died."""
        self._config = config
        self._command = command
        self._obituary: Obituary[Generation] = Obituary(policy)
        self._numbers = itertools.count(1)
        self._lives = itertools.count(0)
        self._live: dict[int, Generation] = {}
        self._vocabulary: Vocabulary | None = None
        self._sent: set[int] = set()
        """Those that the present engine knows of."""
        self._process: EngineProcess
        self._stalls = StallWatch(policy.stall_seconds)
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        command: Sequence[str] = ENGINE_COMMAND,
        metrics: Metrics | None = None,
        hear_loading: Callable[[Loading], None] = lambda _: None,
        policy: RestartPolicy | None = None,
        spawned: Spawned | None = None,
    ) -> Self:
        """Wait until an engine has loaded its model; `hear_loading` is told how far it has come.

        `command` is what to `spawn`, at first unless it is `spawned` already, and later in place of one that died.
        Raises EngineError. When cancelled, it leaves no process behind.
        """
        client = cls(config, command, metrics or Metrics(), policy or RestartPolicy())
        client._process = await client._launch(spawned or spawn(command), hear_loading)
        client.metrics.engine_ready(client.ready)
        client._tasks = [asyncio.create_task(client._supervise()), asyncio.create_task(client._watch_stalls())]
        return client

    @property
    def ready(self) -> Ready:
        """What the engine said when it was."""
        return self._process.ready

    @property
    def alive(self) -> bool:
        """Whether requests can be submitted."""
        return self.failure is None

    @property
    def live(self) -> int:
        """Requests submitted and not finished."""
        return len(self._live)

    def learn(self, vocabulary: Vocabulary) -> None:
        """Tell the engine, and those after it, what tokens say. Requests that follow a grammar need it."""
        self._vocabulary = vocabulary
        if not self.restarting:
            self._process.send(vocabulary)

    def submit(self, submission: Submission) -> Generation:
        """Number a request and send it to the engine, or keep it for the next one.

        Raises EngineError where there will be none.
        """
        if self.failure is not None:
            raise EngineError(str(self.failure), self.failure.exit_code)
        number = next(self._numbers)
        numbered = msgspec.structs.replace(submission, request=number)
        generation = self._live[number] = Generation(numbered, self._tell)
        self.metrics.request_started(number, len(submission.prompt))
        self._send_due()
        return generation

    async def close(self) -> None:
        """End the engine: ask, wait at most 2 s, then kill. Live requests fail. Idempotent."""
        self._end(EngineError("the engine was shut down"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._process.close()

    def _tell(self, message: Abort | Pause) -> None:
        if isinstance(message, Pause):
            self.metrics.request_paused(message.request, message.paused)
        if message.request in self._sent:
            self._process.send(message)
        elif isinstance(message, Abort) and message.request in self._live:
            self._end_request(TokenEvent(request=message.request, finish=message.reason))

    def _end_request(self, event: TokenEvent) -> None:
        """End a request that no engine will end."""
        self._hear(StepReport(events=(event,), stats=self.metrics.stats))

    def _hear(self, report: StepReport) -> None:
        self._stalls.reported()
        self.metrics.step(report)
        for event in report.events:
            self._deliver(event)

    def _deliver(self, event: TokenEvent) -> None:
        generation = self._live.get(event.request)
        if generation is None:
            return
        if event.finish is not None:
            del self._live[event.request]
            self._sent.discard(event.request)
        generation.deliver(event)
        if self._obituary.acquit(generation):
            self._send_due()

    def _send_due(self) -> None:
        """Tell the engine of those it should know of: after deaths with suspects, only of one of these at a time."""
        if self.restarting:
            return
        suspect = self._obituary.suspect
        for generation in self._live.values() if suspect is None else [suspect]:
            if generation.request not in self._sent:
                self._sent.add(generation.request)
                generation.progressed = False
                self._process.send(generation.submission)

    async def _launch(self, spawned: Spawned, hear_loading: Callable[[Loading], None]) -> EngineProcess:
        faults = faults_in(self._config.fault, next(self._lives))
        config = msgspec.structs.replace(self._config, fault=faults)
        return await EngineProcess.start(config, spawned, self._hear, hear_loading)

    async def _supervise(self) -> None:
        """Replace the engine whenever it dies, until that is hopeless."""
        while self.failure is None:
            error = await asyncio.shield(self._process.ended)
            self.restarting = True
            self.metrics.engine_died()
            try:
                self._bury(error)
                await self._replace(error)
            except EngineError as hopeless:
                self._end(hopeless)
            except Exception as fault:
                _log.exception("the engine cannot be replaced")
                self._end(EngineError(f"internal error: {type(fault).__name__}"))

    def _bury(self, error: EngineError) -> None:
        """Settle what the dead engine cannot: requests that were to end, and one that has killed it."""
        for generation in [generation for generation in self._live.values() if generation.aborted]:
            self._end_request(TokenEvent(request=generation.request, finish=generation.aborted))
        sent = [self._live[request] for request in sorted(self._sent)]
        known = [generation for generation in sent if not generation.paused]
        self._sent.clear()
        culprit = self._obituary.died(known, [generation.progressed for generation in known], self.ready.max_num_seqs)
        _log.error("%s; %d requests will go on in another", error, len(self._live) - (culprit is not None))
        if culprit is not None:
            reason = "the engine dies whenever it computes this request"
            self._end_request(TokenEvent(request=culprit.request, finish="error", error=reason))

    async def _replace(self, error: EngineError) -> None:
        """Start an engine in place of the dead one. Raises EngineError where that is hopeless."""
        while True:
            delay = self._obituary.delay()
            if delay is None:
                raise EngineError(f"{error}{', again and again' * self._obituary.repeated}")
            await asyncio.sleep(delay)
            try:
                process = await self._launch(spawn(self._command), lambda _: None)
            except EngineError as failed:
                _log.error("the engine does not start: %s", failed)
                self._obituary.failed_to_start()
                error = failed
            else:
                break
        if _identity(process.ready) != _identity(self.ready):
            await process.close()
            raise EngineError("the engine that was started again is not the same: its tokens might differ")
        self._process = process
        self.restarting = False
        if self._vocabulary is not None:
            process.send(self._vocabulary)
        self.metrics.engine_ready(process.ready)
        self.metrics.engine_replaced(len(self._live))
        _log.warning("a new engine goes on with %d requests", len(self._live))
        self._send_due()

    async def _watch_stalls(self) -> None:
        while True:
            await asyncio.sleep(self._stalls.interval)
            working = any(not self._live[request].paused for request in self._sent)
            if self._stalls.stalled(working=working and not self.restarting):
                self._process.kill(f"the engine finished no step for {self._stalls.limit:g} s and was killed")

    def _end(self, error: EngineError) -> None:
        """Fail everything that waits for the engine. Only the first reason counts."""
        if self.failure is not None:
            return
        self.failure = error
        self.metrics.engine_lost()
        for generation in self._live.values():
            generation.fail(error)
        self._live.clear()
        self.lost.set()


def _identity(ready: Ready) -> tuple[object, ...]:
    """What tokens depend on, and what the server has told its clients."""
    return (ready.architecture, ready.parameters, ready.vocabulary, ready.dtype, ready.kernels, ready.max_model_len)
