"""Small requests, small schedulers, and what must be true of them at any moment."""

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from hashlib import blake2b

from support.fake_device import PendingStep, ScriptedRunner, token_logprobs

from octavo.kvcache.pool import BlockPool
from octavo.kvcache.prefix import PrefixHasher
from octavo.model.step import SamplingParams, Step, TokenLogprobs
from octavo.scheduler.messages import FinishReason, Submission, TokenEvent
from octavo.scheduler.policy import Scheduler
from octavo.scheduler.request import Limits

VOCABULARY = 61
EOS = 0
BLOCK_SIZE = 4
POISON = 60
"""A request whose prompt begins with this token fails once it has as many tokens as the number that follows."""

FAULT = 59
"""The same, but then the whole step fails."""


class DeviceError(Exception):
    """A step that cannot be computed."""


def next_token(tokens: Sequence[int]) -> int | None:
    if tokens[0] in (POISON, FAULT) and len(tokens) > 1 and len(tokens) > tokens[1]:
        return None
    return blake2b(bytes(tokens), digest_size=1).digest()[0] % VOCABULARY


def submission(
    request: int,
    prompt: Iterable[int],
    max_tokens: int = 8,
    salt: bytes = b"",
    params: SamplingParams | None = None,
    priority: int = 0,
) -> Submission:
    return Submission(
        request=request,
        prompt=tuple(prompt),
        max_tokens=max_tokens,
        salt=salt,
        params=params or SamplingParams(temperature=0.0),
        priority=priority,
    )


def mask_of(tokens: Iterable[int]) -> bytes:
    """A mask of the vocabulary that allows these tokens."""
    return sum(1 << token for token in set(tokens)).to_bytes(8, "little")


def make_scheduler(
    blocks: int = 32,
    rows: int = 4,
    tokens: int = 16,
    context: int = 64,
    caching: bool = True,
    clock: Callable[[], float] = time.monotonic,
    reserve: bool = False,
    mixed_tokens: int | None = None,
) -> Scheduler:
    return Scheduler(
        BlockPool(blocks),
        PrefixHasher(BLOCK_SIZE) if caching else None,
        Limits(rows, tokens, context, BLOCK_SIZE, reserve, mixed_tokens),
        eos_ids=[EOS],
        clock=clock,
    )


def next_token_or_fault(tokens: Sequence[int]) -> int | None:
    token = next_token(tokens)
    if token is None and tokens[0] == FAULT:
        raise DeviceError
    return token


class Expected:
    """What a request must yield, found without scheduler, cache or batch."""

    def __init__(self, request: Submission, context: int) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs | None] = []
        self.stop_id: int | None = None
        self.finish = self._generate(request, context)
        self.prompt_logprobs = self._score(request)

    def _generate(self, request: Submission, context: int) -> FinishReason:
        params = request.params
        eos = set() if params.ignore_eos else {EOS}
        endings = eos | set(params.stop_token_ids)
        while len(self.tokens) < min(request.max_tokens, context - len(request.prompt)):
            likeliest = token = next_token([*request.prompt, *self.tokens])
            if likeliest is None or token is None:
                return "error"
            while self._forbids(params, endings, token):
                token = (token + 1) % VOCABULARY
            self.tokens.append(token)
            alternatives = params.logprobs
            self.logprobs.append(
                None if alternatives is None else token_logprobs(token, likeliest, alternatives, VOCABULARY)
            )
            if token in endings:
                self.stop_id = None if token in eos else token
                return "stop"
        return "length"

    def _forbids(self, params: SamplingParams, endings: set[int], token: int) -> bool:
        masked = params.allowed is not None and not params.allowed[token // 8] >> token % 8 & 1
        early = len(self.tokens) < params.min_tokens and token in endings
        return masked or early or any([*self.tokens, token][-len(word) :] == [*word] for word in params.bad_words)

    def _score(self, request: Submission) -> list[TokenLogprobs]:
        alternatives = request.params.prompt_logprobs
        if alternatives is None:
            return []
        return [
            token_logprobs(token, next_token(request.prompt[:position]) or 0, alternatives, VOCABULARY)
            for position, token in enumerate(request.prompt)
            if position > 0
        ]


class Transcript:
    """Everything that was reported about one request."""

    def __init__(self) -> None:
        self.events: list[TokenEvent] = []

    @property
    def tokens(self) -> list[int]:
        return [event.token for event in self.events if event.token is not None]

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs]:
        return [entry for event in self.events for entry in event.prompt_logprobs]

    @property
    def finish(self) -> FinishReason | None:
        return self.events[-1].finish if self.events else None

    def check(self, request: Submission, context: int, aborted: bool = False) -> None:
        """Nothing is lost, doubled or out of place, up to an abort if there was one."""
        assert [event.finish is not None for event in self.events] == [False] * (len(self.events) - 1) + [True]
        assert all(not event.first for event in self.events[1:])
        assert self.events[0].first or (aborted and self.finish == "abort")
        expected = Expected(request, context)
        logprobs = [event.logprobs for event in self.events if event.token is not None]
        if aborted and self.finish == "abort":
            assert self.tokens == expected.tokens[: len(self.tokens)]
            assert logprobs == expected.logprobs[: len(logprobs)]
            assert self.prompt_logprobs == expected.prompt_logprobs[: len(self.prompt_logprobs)]
        else:
            assert self.finish == expected.finish
            assert self.events[-1].stop_id == expected.stop_id
            assert self.tokens == expected.tokens
            assert logprobs == expected.logprobs
            if self.finish != "error":
                assert self.prompt_logprobs == expected.prompt_logprobs


class Driver:
    """A scheduler and a device, taken forward by hand, with any number of steps between them."""

    def __init__(self, scheduler: Scheduler, script: Callable[[Sequence[int]], int | None] = next_token) -> None:
        self.scheduler = scheduler
        self.runner = ScriptedRunner(script, VOCABULARY, BLOCK_SIZE)
        self.flights: deque[tuple[Step, PendingStep]] = deque()
        self.steps: list[Step] = []
        self.transcripts: dict[int, Transcript] = {}
        self.paused: set[int] = set()
        self.once_paused: set[int] = set()

    def add(self, request: Submission) -> None:
        self.transcripts[request.request] = Transcript()
        self._record([self.scheduler.add(request)])

    def abort(self, request: int, reason: FinishReason = "abort") -> None:
        self._record([self.scheduler.abort(request, reason)])

    def pause(self, request: int) -> None:
        self.paused.add(request)
        self.once_paused.add(request)
        self.scheduler.pause(request, True)

    def resume(self, request: int) -> None:
        self.paused.discard(request)
        self.scheduler.pause(request, False)

    def launch(self) -> Step | None:
        step = self.scheduler.schedule()
        if step is not None:
            assert not self.paused.intersection(one.id for one in self.scheduler._flights[-1].requests)
            self.flights.append((step, self.runner.submit(step)))
            self.steps.append(step)
        self.check()
        return step

    def land(self) -> None:
        step, pending = self.flights.popleft()
        self._record(self.scheduler.commit(step, pending.wait()))
        self.check()

    def fail(self) -> None:
        self.flights.clear()
        self.runner.reset()
        self.scheduler.rollback()
        self.check()

    def fail_for_no_reason(self) -> None:
        """A step fails, and none of its requests is to blame."""
        assert not self.scheduler._suspects
        assert self.scheduler.fail("the device broke") is None
        self.flights.clear()
        self.runner.reset()
        self.check()

    def check(self) -> None:
        check(self.scheduler, self.once_paused)

    def turn(self) -> Step | None:
        step = self.launch()
        while self.flights:
            self.land()
        return step

    def finish(self) -> None:
        for _ in range(10_000):
            if not self.scheduler.busy:
                break
            if self.launch() is None:
                assert self.flights, "no request can go on and none is in flight"
            while self.flights:
                self.land()
        assert not self.scheduler.busy, "requests do not come to their end"
        while self.flights:
            self.land()
        assert self.scheduler.pool.referenced == 0

    def _record(self, events: Iterable[TokenEvent | None]) -> None:
        for event in events:
            if event is not None:
                self.transcripts[event.request].events.append(event)


def check(scheduler: Scheduler, once_paused: Collection[int] = ()) -> None:
    """What holds between any two calls: each block and slot has the owners it should have and no others."""
    check_pool(scheduler.pool, (block for request in scheduler._running.values() for block in request.blocks))
    slots = [request.slot for request in scheduler._running.values()]
    assert sorted([*slots, *scheduler._slots]) == list(range(scheduler._limits.max_rows))
    requests = [*scheduler._running.values(), *scheduler._waiting.values()]
    if scheduler._suspects:
        assert set(scheduler._running.values()) <= set(scheduler._suspects.group)
        assert {suspect for group in scheduler._suspects._groups for suspect in group} <= set(requests)
    else:
        for priority in {request.priority for request in requests}:
            others = [request for request in requests if request.priority == priority and request.id not in once_paused]
            equals = [request.order for request in others]
            assert equals == sorted(equals)  # no running one came later than a waiting one
    for queue in (scheduler._running, scheduler._waiting):
        orders = [request.order for request in queue.values()]
        assert orders == sorted(orders)
    assert all(request.finish is None for request in requests)
    for request in scheduler._waiting.values():
        assert (request.slot, request.blocks, request.in_flight, request.pending) == (None, [], 0, 0)


def check_pool(pool: BlockPool, held: Iterable[int]) -> None:
    """Every block is in one state, `held` lists each reference once, and names lead where they say."""
    references = Counter(held)
    assert pool._references == [references[block] for block in range(pool.total)]
    assert sorted([*pool._free, *pool._cached, *references]) == list(range(pool.total))
    assert pool.free + pool.cached + pool.referenced == pool.total
    named = {block: name for block, name in enumerate(pool._names) if name is not None}
    assert {name: block for block, name in named.items()} == pool._index
    assert set(pool._cached) <= set(named)
    assert not set(pool._free) & set(named)
