"""The loop: take in messages, decide a step, queue it on the device, report what an earlier one yielded."""

import contextlib
import logging
import os
from collections import deque
from dataclasses import dataclass
from time import perf_counter

import msgspec

from octavo.model.step import Pending, Runner, Step, StepResult
from octavo.scheduler.channel import Channel
from octavo.scheduler.grammar import PATIENCE_SECONDS, Intake
from octavo.scheduler.messages import (
    Abort,
    EngineStats,
    Pause,
    Shutdown,
    StepReport,
    Submission,
    TokenEvent,
    Vocabulary,
)
from octavo.scheduler.policy import Scheduler

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Queued:
    """A step on the device."""

    step: Step
    pending: Pending
    schedule_seconds: float
    submit_seconds: float


@dataclass(frozen=True, slots=True)
class _Failed:
    """A step that could not be queued."""

    error: Exception

    def wait(self) -> StepResult:
        """Fail in the step's turn."""
        raise self.error


class Engine:
    """Drives one runner for one server.

    `lookahead` is how many steps may be queued behind the one whose result is awaited. With 1 the host prepares the
    next step while the device computes; 0 suits a device that is the host itself: no step is computed in vain.

    A step that the runner cannot compute is undone, and its requests are tried again in parts, until the one to blame
    is found and ended. An exception from anything else leaves the engine unusable and is not caught here.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, channel: Channel, lookahead: int = 0) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._channel = channel
        self._lookahead = lookahead
        self._intake = Intake()
        self._pipeline: deque[_Queued] = deque()
        self._steps = 0
        self._activations_used = self._activations_peak = 0
        self._failed_steps = 0
        self._closed = False
        self._strict = os.environ.get("OCTAVO_STRICT") == "1"
        """Whether the books are audited after every commit."""

    def run(self) -> None:
        """Serve until a Shutdown arrives. Requests that are alive then are dropped."""
        while not self._closed:
            self.turn()

    def turn(self) -> None:
        """Queue one step if there is one to queue, and report those whose turn it is."""
        self._receive(block=self._idle and not self._intake)
        if self._closed:
            return
        queued = self._submit_next()
        while self._pipeline and (len(self._pipeline) > self._lookahead or not queued):
            self._commit_oldest()

    @property
    def _idle(self) -> bool:
        return not (self._scheduler.busy or self._pipeline)

    def _receive(self, block: bool) -> None:
        events: list[TokenEvent | None] = []
        for message in self._channel.receive(block):
            match message:
                case Submission(grammar=None):
                    events.append(self._scheduler.add(message))
                case Submission(grammar=str(grammar)):
                    self._intake.begin(message, grammar)
                case Abort():
                    events.append(self._abort(message))
                case Pause():
                    self._pause(message)
                case Vocabulary():
                    self._intake.learn(message)
                case Shutdown():
                    self._closed = True
                    return
                case _:
                    raise ValueError("an engine is configured once, before its first request")
        for submission, state in self._intake.finished(PATIENCE_SECONDS if self._idle else 0):
            events.append(self._scheduler.add(submission, state))
        if reported := tuple(event for event in events if event is not None):
            self._channel.send(StepReport(events=reported, stats=self._stats()))

    def _abort(self, message: Abort) -> TokenEvent | None:
        if self._intake.drop(message.request):
            return TokenEvent(request=message.request, finish=message.reason)
        if message.unbegun and self._scheduler.has_begun(message.request):
            return None
        return self._scheduler.abort(message.request, message.reason)

    def _pause(self, message: Pause) -> None:
        if not self._intake.pause(message.request, message.paused):
            self._scheduler.pause(message.request, message.paused)

    def _submit_next(self) -> bool:
        """Queue a step; False if there is none, or none should follow it before it has landed."""
        started = perf_counter()
        step = self._scheduler.schedule()
        if step is None:
            return False
        scheduled = perf_counter()
        try:
            pending = self._runner.submit(step)
        except Exception as error:  # whatever it is, it is dealt with once the steps before it have landed
            pending = _Failed(error)
        self._pipeline.append(_Queued(step, pending, scheduled - started, perf_counter() - scheduled))
        return not isinstance(pending, _Failed)

    def _commit_oldest(self) -> None:
        queued = self._pipeline.popleft()
        started = perf_counter()
        try:
            result = queued.pending.wait()
        except Exception as error:
            self._recover(queued.step, error)
            return
        landed = perf_counter()
        events = self._scheduler.commit(queued.step, result)
        if self._strict:
            self._scheduler.audit()
        self._steps += 1
        self._activations_used = result.activations
        self._activations_peak = max(self._activations_peak, result.activations)
        stats = msgspec.structs.replace(
            self._stats(),
            step_tokens=queued.step.tokens,
            step_rows=len(queued.step.rows),
            step_decode_tokens=sum(row.count == 1 for row in queued.step.rows),
            schedule_seconds=queued.schedule_seconds,
            device_seconds=queued.submit_seconds + landed - started,
            commit_seconds=perf_counter() - landed,
        )
        self._channel.send(StepReport(events=tuple(events), stats=stats))

    def _recover(self, step: Step, error: Exception) -> None:
        """Undo a step that failed and those behind it. A runner that cannot be reset ends the engine."""
        while self._pipeline:
            with contextlib.suppress(Exception):  # it runs on what the failed step left: its result does not count
                self._pipeline.popleft().pending.wait()
        self._runner.reset()
        self._failed_steps += 1
        event = self._scheduler.fail(f"the model cannot compute this request: {type(error).__name__}")
        if event is None:
            _log.warning("a step of %d requests failed (%s): trying them apart", len(step.rows), type(error).__name__)
        else:
            _log.error("request %d fails whenever it is computed", event.request, exc_info=error)
        self._channel.send(StepReport(events=(event,) if event else (), stats=self._stats()))

    def _stats(self) -> EngineStats:
        scheduler = self._scheduler
        return EngineStats(
            running=scheduler.running,
            waiting=scheduler.waiting,
            blocks_free=scheduler.pool.free,
            blocks_cached=scheduler.pool.cached,
            blocks_referenced=scheduler.pool.referenced,
            blocks_peak=scheduler.pool.peak,
            activations_used=self._activations_used,
            activations_peak=self._activations_peak,
            steps_total=self._steps,
            failed_steps_total=self._failed_steps,
            preemptions_total=scheduler.preemptions,
            prefix_queries_total=scheduler.prefix_queries,
            prefix_hits_total=scheduler.prefix_hits,
        )
