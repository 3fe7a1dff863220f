"""Any number of requests to an engine without a model, in virtual time: no process, no socket, nobody sleeps.

Scheduler, loop, metrics and the keeping of live requests (`Generation`) are the real ones. The device is the one of
`fake_device`, which notices every block that is shared or freed wrongly. Of the line to the server there are only the
messages: an engine that crashes is dropped with whatever it knew, and its requests go to another.
"""

import gc
import heapq
import logging
import os
import sys
from array import array
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import median
from zlib import crc32

from support.fake_device import PendingStep, ScriptedRunner, token_logprobs
from support.history import Books, Checker, Surroundings, Yield

from octavo.kvcache.pool import BlockPool
from octavo.kvcache.prefix import PrefixHasher
from octavo.model.step import SamplingParams, Step, StepResult
from octavo.scheduler.engine import Engine
from octavo.scheduler.messages import (
    Abort,
    EngineStats,
    FinishReason,
    Pause,
    Shutdown,
    StepReport,
    Submission,
    ToEngine,
    TokenEvent,
)
from octavo.scheduler.policy import Scheduler
from octavo.scheduler.request import Limits
from octavo.server.client import Generation
from octavo.server.metrics import Metrics

VOCABULARY = 1 << 16
MARKERS = VOCABULARY // 16 - 1
BREAKS_STEPS, BREAKS_ROWS = 1, 2
"""Prompts that begin with these cannot be computed."""
BLOCK_SIZE, BLOCKS, ROWS, CONTEXT = 4, 24, 8, 48
MOST_UNREAD = 3
"""Events."""
STEP_SECONDS = 0.001
MEASUREMENTS = 200
"""Of the memory, in a run."""
FAULTS = (
    *("abort", "timeout", "queue timeout", "slow reader", "burst", "row fails", "step fails for one request"),
    *("step fails once", "step fails once when awaited", "crash before a report", "crash after a report"),
)


log = logging.getLogger("soak")


class EngineCrashError(BaseException):
    """The engine is gone."""


class StepError(Exception):
    """A step that cannot be computed."""


def next_token(tokens: Sequence[int]) -> int | None:
    """The marker of the last token, and four bits that depend on every token so far."""
    if tokens[0] == BREAKS_STEPS:
        raise StepError
    if tokens[0] == BREAKS_ROWS:
        return None
    return tokens[-1] & ~15 | crc32(array("H", tokens)) & 15


def marker(submission: Submission) -> int:
    return submission.prompt[-1] >> 4


def alone(submission: Submission) -> tuple[list[Yield], FinishReason]:
    """What a request yields, found without scheduler, cache or batch."""
    tokens, yielded, params = list(submission.prompt), list[Yield](), submission.params
    if tokens[0] in (BREAKS_STEPS, BREAKS_ROWS):
        return [], "error"
    for _ in range(min(submission.max_tokens, CONTEXT - len(tokens))):
        token = next_token(tokens)
        assert token is not None
        tokens.append(token)
        rivals = params.logprobs
        yielded.append((token, None if rivals is None else token_logprobs(token, token, rivals, VOCABULARY)))
        if token in params.stop_token_ids:
            return yielded, "stop"
    return yielded, "length"


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Of a line through the points by Theil and Sen: the median of the slopes of all pairs. Outliers do not count."""
    return median(
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for number, earlier in enumerate(points)
        for later in points[number + 1 :]
    )


class SoakRunner(ScriptedRunner):
    """Fails once when told to, and says whom each step computes."""

    def __init__(self, soak: "Soak", scheduler: Scheduler) -> None:
        super().__init__(next_token, VOCABULARY, BLOCK_SIZE)
        self.soak = soak
        self.scheduler = scheduler

    def submit(self, step: Step) -> PendingStep:
        self.soak.checker.stepped([request.id for request in self.scheduler._flights[-1].requests])
        self.fail_if_due("step fails once")
        return super().submit(step)

    def compute(self, step: Step) -> StepResult:
        self.fail_if_due("step fails once when awaited")
        return super().compute(step)

    def fail_if_due(self, fault: str) -> None:
        """Not while suspects are tried: a fault that nobody caused would be blamed on whoever is tried then."""
        if fault in self.soak.due and not self.scheduler._suspects:
            self.soak.due.remove(fault)
            self.broken = True
            raise StepError


class Soak:
    """A server's part in a run of `requests`, of which every `period`-th brings a fault with it."""

    def __init__(self, requests: int, period: int, seed: int = 0) -> None:
        self.requests = requests
        self.period = period
        self.random = Random(seed)
        self.checker = Checker(alone, marker)
        self.faults: Counter[str] = Counter()
        self.due: set[str] = set()
        self.submitted = 0
        self.now = 0.0
        self.target = 0
        """So many requests are kept alive; 0: until all are gone."""
        self.prefixes = [[self.random.randrange(16, VOCABULARY) for _ in range(24)] for _ in range(8)]
        self.live: dict[int, Generation] = {}
        self.pieces: dict[int, list[list[int]]] = {}
        self.slow: set[int] = set()
        self.timers: list[tuple[float, int, str]] = []
        self.outbox: list[ToEngine] = []
        self.metrics = Metrics(clock=lambda: self.now)
        self.metrics.observers.append(self.checker.lived)
        self.measured = array("d")
        self.resident = array("d")
        self.objects = array("d")
        """Each time: requests so far, bytes of this process, and blocks of memory that Python has handed out."""
        self.preemptions = self.lives = self.pauses = 0
        self.surroundings = Surroundings.now()
        self.start()

    def run(self) -> None:
        while not self.closed:
            self.turn()
        self.checker.totals(self.metrics.prompt_tokens, self.metrics.generated_tokens)

    @property
    def closed(self) -> bool:
        return self.engine._closed

    def turn(self) -> None:
        try:
            self.engine.turn()
        except EngineCrashError:
            self.replace()

    # The engine

    def make_scheduler(self) -> Scheduler:
        limits = Limits(ROWS, self.random.choice([5, 16, 64]), CONTEXT, BLOCK_SIZE, self.random.random() < 0.2)
        return Scheduler(BlockPool(BLOCKS), PrefixHasher(BLOCK_SIZE), limits, [0], clock=lambda: self.now)

    def make_runner(self) -> SoakRunner:
        return SoakRunner(self, self.scheduler)

    def start(self) -> None:
        self.scheduler = self.make_scheduler()
        self.engine = Engine(self.scheduler, self.make_runner(), self, self.random.randrange(3))
        self.lives += 1

    def replace(self) -> None:
        """As `EngineClient` does it."""
        self.preemptions += self.scheduler.preemptions
        self.outbox.clear()
        self.metrics.engine_died()
        self.start()
        for generation in [one for one in self.live.values() if one.aborted]:
            self.deliver(TokenEvent(request=generation.request, finish=generation.aborted))
        self.metrics.stats = EngineStats(blocks_free=BLOCKS)
        self.outbox += [generation.submission for generation in self.live.values()]
        self.metrics.engine_replaced(len(self.live))
        self.checker.recovered(self.surroundings, Surroundings.now())

    # The engine's end of the line

    def receive(self, block: bool) -> list[ToEngine]:
        while not (messages := self.due_messages(block)) and block and self.live:
            pass  # everybody is paused: only time goes on
        for message in messages:
            if isinstance(message, Pause | Submission):
                self.checker.paused(message.request, message.paused)
        return messages or ([Shutdown()] if block else [])

    def due_messages(self, block: bool) -> list[ToEngine]:
        self.now += STEP_SECONDS
        if not self.live and not self.outbox:
            self.rest(block)
        elif self.random.random() < 0.002:
            self.target = self.random.choice([0, 1, 4, 12, 40])
        while len(self.live) < self.target and self.submitted < self.requests:
            self.submit()
        while self.timers and self.timers[0][0] <= self.now:
            _, request, action = heapq.heappop(self.timers)
            if (generation := self.live.get(request)) is not None:
                self.expire(generation, action)
        messages, self.outbox = self.outbox, []
        return messages

    def rest(self, idle: bool) -> None:
        """Nobody is here."""
        if idle:
            self.checker.idle(self.books(self.engine._stats()), self.surroundings, Surroundings.now())
            if self.submitted >= self.requests * len(self.measured) / MEASUREMENTS:
                self.measure()
        self.target = self.random.choice([1, 4, 12, 40])

    def measure(self) -> None:
        gc.collect()
        self.measured.append(self.submitted)
        self.resident.append(resident_bytes())
        self.objects.append(sys.getallocatedblocks())
        if len(self.measured) % 2 == 0:
            state = (self.submitted, self.faults.total(), self.lives - 1, self.checker.found.total())
            text = "%d requests, %d faults, %d crashes, %d violations; %.2f MB resident, %d blocks of memory"
            log.info(text, *state, self.resident[-1] / 1e6, self.objects[-1])

    def send(self, report: StepReport) -> None:
        self.crash_if_due("crash before a report")
        self.checker.books(self.books(report.stats))
        self.metrics.step(report)
        for event in report.events:
            self.deliver(event)
        for generation in self.live.values():
            if generation._events and generation.request not in self.slow:
                self.read(generation)
        self.crash_if_due("crash after a report")

    def crash_if_due(self, fault: str) -> None:
        if fault in self.due:
            self.due.remove(fault)
            raise EngineCrashError

    def books(self, stats: EngineStats) -> Books:
        tables = [request.blocks for request in self.scheduler._running.values()]
        return Books.of(self.scheduler.pool, tables, stats)

    # The server

    def deliver(self, event: TokenEvent) -> None:
        self.checker.reported(event)
        generation = self.live.get(event.request)
        if generation is None:
            return
        if event.request in self.metrics._live and event.finish is not None:
            self.metrics.step(StepReport(events=(event,), stats=self.metrics.stats))
        generation.deliver(event)
        if event.first and event.request in self.slow:
            self.set_timer(60, event.request, "slow reader")
        if event.finish is not None:
            del self.live[event.request]
            self.slow.discard(event.request)
            self.read(generation)
            self.checker.streamed(self.pieces.pop(event.request, []), generation._emitted)

    def read(self, generation: Generation) -> None:
        """What a reader gets at once."""
        try:
            generation.__anext__().send(None)
        except StopIteration as done:
            piece = [event.token for event in done.value if event.token is not None]
            self.pieces.setdefault(generation.request, []).append(piece)

    def submit(self) -> None:
        self.submitted += 1
        fault = self.random.choice(FAULTS) if self.submitted % self.period == 0 else None
        submission = self.submission(self.submitted, fault)
        generation = self.live[submission.request] = Generation(submission, self.tell, MOST_UNREAD)
        self.checker.submitted(submission)
        self.metrics.request_started(submission.request, len(submission.prompt))
        self.outbox.append(generation.submission)
        if fault is not None:
            self.break_something(fault, submission.request)

    def submission(self, number: int, fault: str | None) -> Submission:
        random = self.random
        begin = {"row fails": [BREAKS_ROWS], "step fails for one request": [BREAKS_STEPS]}.get(fault or "", [])
        shared = random.choice(self.prefixes)[: random.choice([0, 4, 8, 8, 13, 24])]
        own = number % MARKERS + 1
        prompt = (*begin, *shared, random.randrange(16, VOCABULARY), own << 4 | random.randrange(16))
        params = SamplingParams(
            temperature=0.0,
            logprobs=random.choice([None, None, None, 0, 2]),
            stop_token_ids=(own << 4 | random.randrange(16),) if random.random() < 0.3 else (),
        )
        longest = 20 if fault == "slow reader" else random.choice([1, 2, 3, 5, 8, 20])
        return Submission(request=number, prompt=prompt, params=params, max_tokens=longest)

    def break_something(self, fault: str, request: int) -> None:
        self.faults[fault] += 1
        if fault in ("abort", "timeout", "queue timeout"):
            self.set_timer(12, request, fault)
        elif fault == "slow reader":
            self.slow.add(request)
        elif fault == "burst":
            self.target = 60
        elif not fault.startswith(("row", "step fails for")):
            self.due.add(fault)

    def set_timer(self, most_steps: int, request: int, fault: str) -> None:
        heapq.heappush(self.timers, (self.now + STEP_SECONDS * self.random.randrange(most_steps), request, fault))

    def expire(self, generation: Generation, fault: str) -> None:
        """The client of a slow reader reads again, or is cut off; the others leave, or their time is over."""
        self.slow.discard(generation.request)
        if fault == "queue timeout":
            self.tell(Abort(request=generation.request, reason="timeout", unbegun=True))
        elif fault != "slow reader" or self.random.random() < 0.3:
            generation.abort(self.random.choice(["abort", "timeout"]))
        elif generation._events:
            self.read(generation)

    def tell(self, message: Abort | Pause) -> None:
        if isinstance(message, Pause):
            self.pauses += message.paused
            self.metrics.request_paused(message.request, message.paused)
        self.outbox.append(message)
