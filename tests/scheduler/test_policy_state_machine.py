"""Arrivals, steps, pauses, aborts and failures in any order keep the books in order and every answer right."""

import dataclasses

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.scheduling import BLOCK_SIZE, Driver, make_scheduler, mask_of, submission

from octavo.model.step import SamplingParams
from octavo.scheduler.messages import Submission

CONTEXT = 24
MAX_FLIGHTS = 3
SHARED = (7, 3, 9, 9, 4, 1, 8, 2, 7, 7, 5, 6, 3, 3, 1, 2)

prompts = st.builds(
    lambda length, own: (*SHARED[:length], *own),
    st.integers(0, len(SHARED)),
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
) | st.sampled_from([SHARED[:BLOCK_SIZE], SHARED[: 2 * BLOCK_SIZE], SHARED])
parameters = st.builds(
    SamplingParams,
    temperature=st.just(0.0),
    ignore_eos=st.booleans(),
    min_tokens=st.sampled_from([0, 2]),
    stop_token_ids=st.sampled_from([(), (5, 6, 7, 8, 9)]),
    prompt_logprobs=st.sampled_from([None, None, 1]),
    allowed=st.sampled_from([None, None, mask_of(range(61)), mask_of(range(0, 61, 2)), mask_of([0, 5, 7, 20])]),
)
WORDS = [(5,), (7, 20), (20, 20, 20), (0,), (8, 10, 12)]


def with_bad_words(params: SamplingParams, words: list[tuple[int, ...]]) -> SamplingParams:
    """Where all tokens are allowed the server says so if there are words."""
    if not words:
        return params
    return dataclasses.replace(params, allowed=params.allowed or mask_of(range(61)), bad_words=tuple(words))


parameters = st.builds(with_bad_words, parameters, st.lists(st.sampled_from(WORDS), max_size=3, unique=True))


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        blocks=st.integers(CONTEXT // BLOCK_SIZE, 10),
        rows=st.integers(2, 4),
        tokens=st.sampled_from([1, 3, 8, 64]),
        caching=st.sampled_from([True, True, False]),
        reserve=st.booleans(),
    )
    def start(self, blocks: int, rows: int, tokens: int, caching: bool, reserve: bool) -> None:
        self.driver = Driver(make_scheduler(blocks, rows, tokens, CONTEXT, caching, reserve=reserve))
        self.reserve = reserve
        self.requests: dict[int, Submission] = {}
        self.aborted: set[int] = set()

    @rule(
        prompt=prompts,
        max_tokens=st.sampled_from([0, 1, 4, CONTEXT]),
        params=parameters,
        salt=st.sampled_from([b"", b"", b"s"]),
        priority=st.sampled_from([0, 0, -1, 2]),
    )
    def arrive(
        self, prompt: tuple[int, ...], max_tokens: int, params: SamplingParams, salt: bytes, priority: int
    ) -> None:
        request = submission(len(self.requests), prompt, max_tokens, salt, params, priority)
        self.requests[request.request] = request
        self.driver.add(request)

    @rule()
    def launch(self) -> None:
        if len(self.driver.flights) == MAX_FLIGHTS:
            self.driver.land()
        step = self.driver.launch()
        if step is None and not self.driver.flights:
            assert not self.driver.scheduler.busy

    @rule()
    def land(self) -> None:
        if self.driver.flights:
            self.driver.land()

    @rule(turns=st.integers(2, 8), ahead=st.integers(0, 2))
    def go_on(self, turns: int, ahead: int) -> None:
        for _ in range(turns):
            step = self.driver.launch()
            while self.driver.flights and (step is None or len(self.driver.flights) > ahead):
                self.driver.land()

    @rule(request=st.integers(0, 9))
    def abort(self, request: int) -> None:
        if request in self.requests:
            self.aborted.add(request)
            self.driver.abort(request)

    @rule(request=st.integers(0, 9), paused=st.booleans())
    def pause(self, request: int, paused: bool) -> None:
        if request in self.requests:
            (self.driver.pause if paused else self.driver.resume)(request)

    @rule()
    def fail(self) -> None:
        if self.driver.flights and not self.driver.scheduler._suspects:
            self.driver.fail_for_no_reason()
        else:
            self.driver.fail()

    @invariant()
    def the_books_are_in_order(self) -> None:
        scheduler = self.driver.scheduler
        self.driver.check()
        assert not (self.reserve and scheduler.preemptions and not self.driver.once_paused)
        ended = sum(transcript.finish is not None for transcript in self.driver.transcripts.values())
        assert ended + scheduler.running + scheduler.waiting == len(self.requests)

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        for number in tuple(self.driver.paused):
            self.driver.resume(number)
        self.driver.finish()
        for number, request in self.requests.items():
            self.driver.transcripts[number].check(request, CONTEXT, aborted=number in self.aborted)


SchedulerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestScheduler = SchedulerMachine.TestCase
