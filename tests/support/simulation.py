"""A whole life of an engine, from a seed: random requests, a small pool, aborts, pauses, any number of steps ahead."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from support.fake_device import CorruptionError, PendingStep, ScriptedRunner
from support.scheduling import (
    BLOCK_SIZE,
    EOS,
    FAULT,
    POISON,
    VOCABULARY,
    DeviceError,
    Transcript,
    check,
    next_token_or_fault,
)

from octavo.kvcache.pool import BlockPool
from octavo.kvcache.prefix import PrefixHasher
from octavo.model.step import SamplingParams, Step, StepResult
from octavo.scheduler.engine import Engine
from octavo.scheduler.messages import Abort, EngineStats, Pause, Shutdown, StepReport, Submission, ToEngine
from octavo.scheduler.policy import Scheduler
from octavo.scheduler.request import Limits

CONTEXT = 44
MAX_TURNS = 3_000


@dataclass(frozen=True)
class Parts:
    """What is under test. A mutation replaces one of them."""

    pool: type[BlockPool] = BlockPool
    hasher: type[PrefixHasher] = PrefixHasher
    scheduler: type[Scheduler] = Scheduler


@dataclass(frozen=True)
class Outcome:
    """What happened, so that a test can tell that it tested something."""

    stats: EngineStats
    steps: list[Step]
    transcripts: dict[int, Transcript]
    paused: tuple[int, int]
    """Steps beside which a paused request kept its slot, and beside which one had lost it."""


class Script:
    """A random workload: what arrives before which turn."""

    def __init__(self, seed: int) -> None:
        random = Random(seed)
        self.rows = random.randrange(2, 7)
        self.tokens = random.choice([3, 5, 8, 32])
        self.blocks = random.randrange(-(-CONTEXT // BLOCK_SIZE), 24)
        self.caching = random.random() < 0.9
        shared = [random.randrange(1, FAULT) for _ in range(24)]
        self.submissions = [self._submission(random, number, shared) for number in range(random.randrange(4, 20))]
        self.arrivals = [(random.randrange(12), message) for message in self.submissions]
        aborts = [request.request for request in self.submissions if random.random() < 0.25]
        self.failing = random.sample(range(-40, 40), random.choice([0, 0, 4]))
        """Faults that no request causes: n fails the n-th step when it is queued, -n when it is awaited then."""
        self.aborts = [(random.randrange(1, 40), Abort(request=request)) for request in aborts]
        self.pauses: list[tuple[int, Pause]] = []
        for request in self.submissions:
            turn = 0
            for paused in (True, False) * random.choice([0, 0, 1, 3]):
                turn += random.randrange(1, 30)
                self.pauses.append((turn, Pause(request=request.request, paused=paused)))
        self.script = (*self.arrivals, *self.aborts, *self.pauses)

    def _submission(self, random: Random, number: int, shared: Sequence[int]) -> Submission:
        if random.random() < 0.3:  # exact multiples of a block, often equal to each other
            prompt = list(shared[: random.randrange(1, 7) * BLOCK_SIZE])
        else:
            own = [random.randrange(1, FAULT) for _ in range(random.randrange(1, 6))]
            prompt = [*shared[: random.randrange(24)], *own]
        if random.random() < 0.05:
            prompt[:2] = [random.choice([POISON, FAULT]), len(prompt) + random.randrange(1, 5)]
        params = SamplingParams(
            temperature=0.0,
            stop_token_ids=tuple(random.sample(range(VOCABULARY), random.choice([0, 0, 3]))),
            ignore_eos=random.random() < 0.3,
            min_tokens=random.choice([0, 0, 3]),
            logprobs=random.choice([None, None, 0, 2]),
            prompt_logprobs=random.choice([None, None, 0, 2]),
        )
        max_tokens = random.choice([0, 1, *range(2, 30), CONTEXT])
        return Submission(
            request=number, prompt=tuple(prompt), params=params, max_tokens=max_tokens, salt=random.choice([b"", b"s"])
        )

    def due(self, turn: int) -> list[ToEngine]:
        return [message for at, message in self.script if at == turn]

    @property
    def last_turn(self) -> int:
        return max(at for at, _ in self.script)


class ScriptedChannel:
    """Delivers the script turn by turn and keeps what the engine reports."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.turn = 0
        self.transcripts = {request.request: Transcript() for request in script.submissions}
        self.stats = EngineStats()
        self.paused: set[int] = set()
        self.known: set[int] = set()

    def receive(self, block: bool) -> list[ToEngine]:
        while True:
            messages = self.script.due(self.turn)
            self.note(messages)
            self.turn += 1
            assert self.turn < MAX_TURNS, "requests do not come to their end"
            if messages or not block:
                return messages
            if self.turn > self.script.last_turn:
                return [Shutdown()]

    def note(self, messages: Sequence[ToEngine]) -> None:
        """Who is paused: nobody whom the engine does not know yet."""
        for message in messages:
            match message:
                case Submission():
                    self.known.add(message.request)
                case Pause(paused=True) if message.request in self.known:
                    self.paused.add(message.request)
                case Pause():
                    self.paused.discard(message.request)

    def send(self, message: StepReport) -> None:
        failed = message.stats.failed_steps_total > self.stats.failed_steps_total
        assert message.events or message.stats.step_rows or failed
        for event in message.events:
            self.transcripts[event.request].events.append(event)
        before, self.stats = self.stats, message.stats
        for total in (
            "steps_total",
            "failed_steps_total",
            "preemptions_total",
            "prefix_queries_total",
            "prefix_hits_total",
        ):
            assert getattr(before, total) <= getattr(message.stats, total)


class CheckingRunner(ScriptedRunner):
    """Also checks the limits of each step and, whenever something moves, the books of the scheduler."""

    def __init__(self, scheduler: Scheduler, channel: ScriptedChannel) -> None:
        super().__init__(next_token_or_fault, VOCABULARY, BLOCK_SIZE)
        self.scheduler = scheduler
        self.channel = channel
        self.script = script = channel.script
        self.kept = self.put_back = 0
        self.once_paused = {message.request for _, message in script.pauses}
        self.steps: list[Step] = []
        self.failing = set(script.failing)

    def submit(self, step: Step) -> PendingStep:
        try:
            self._check(step)
        except AssertionError as error:
            raise CorruptionError from error
        self.steps.append(step)
        self._fail_once(len(self.steps))
        return super().submit(step)

    def _check(self, step: Step) -> None:
        assert 1 <= step.tokens <= self.script.tokens
        assert 1 <= len(step.rows) <= self.script.rows
        assert len({row.slot for row in step.rows}) == len(step.rows)
        assert not self.channel.paused.intersection(one.id for one in self.scheduler._flights[-1].requests)
        check(self.scheduler, self.once_paused)
        self.kept += any(request.paused for request in self.scheduler._running.values())
        self.put_back += any(request.paused and request.output for request in self.scheduler._waiting.values())

    def compute(self, step: Step) -> StepResult:
        self._fail_once(-len(self.steps))
        return super().compute(step)

    def _fail_once(self, moment: int) -> None:
        """Not while suspects are tried: a fault that nobody caused would be blamed on whoever is tried then."""
        if moment in self.failing and not self.scheduler._suspects:
            self.failing.remove(moment)
            self.broken = True
            raise DeviceError


def simulate(seed: int, lookahead: int, parts: Parts | None = None) -> Outcome:
    """Run the seed's workload and check every request against what it must yield. Raises on any deviation."""
    parts = parts or Parts()
    script = Script(seed)
    scheduler = parts.scheduler(
        parts.pool(script.blocks),
        parts.hasher(BLOCK_SIZE) if script.caching else None,
        Limits(script.rows, script.tokens, CONTEXT, BLOCK_SIZE),
        [EOS],
    )
    channel = ScriptedChannel(script)
    runner = CheckingRunner(scheduler, channel)
    Engine(scheduler, runner, channel, lookahead).run()
    check(scheduler, runner.once_paused)
    assert (scheduler.pool.referenced, scheduler.running, scheduler.waiting) == (0, 0, 0)
    aborted = {message.request for _, message in script.aborts}
    for request in script.submissions:
        transcript = channel.transcripts[request.request]
        transcript.check(request, CONTEXT, aborted=request.request in aborted)
    return Outcome(channel.stats, runner.steps, channel.transcripts, (runner.kept, runner.put_back))
