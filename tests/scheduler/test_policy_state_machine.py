"""Any order of arrivals, steps, landings, aborts and failures keeps the books in order and every answer right."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.scheduling import BLOCK_SIZE, Driver, check, make_scheduler, submission

from octavo.model.step import SamplingParams
from octavo.scheduler.messages import Submission

CONTEXT = 24
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
)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        blocks=st.integers(CONTEXT // BLOCK_SIZE, 14),
        rows=st.integers(1, 4),
        tokens=st.sampled_from([1, 3, 8, 64]),
        caching=st.sampled_from([True, True, False]),
    )
    def start(self, blocks: int, rows: int, tokens: int, caching: bool) -> None:
        self.driver = Driver(make_scheduler(blocks, rows, tokens, CONTEXT, caching))
        self.requests: dict[int, Submission] = {}
        self.aborted: set[int] = set()

    @rule(prompt=prompts, max_tokens=st.integers(0, 12), params=parameters, salt=st.sampled_from([b"", b"", b"s"]))
    def arrive(self, prompt: tuple[int, ...], max_tokens: int, params: SamplingParams, salt: bytes) -> None:
        request = submission(len(self.requests), prompt, max_tokens, salt, params)
        self.requests[request.request] = request
        self.driver.add(request)

    @precondition(lambda self: len(self.driver.flights) < 3)
    @rule()
    def launch(self) -> None:
        step = self.driver.launch()
        if step is None and not self.driver.flights:
            assert not self.driver.scheduler.busy

    @precondition(lambda self: self.driver.flights)
    @rule()
    def land(self) -> None:
        self.driver.land()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.requests)))
        self.aborted.add(request)
        self.driver.abort(request)

    @precondition(lambda self: self.driver.flights)
    @rule()
    def fail(self) -> None:
        self.driver.fail()

    @invariant()
    def the_books_are_in_order(self) -> None:
        scheduler = self.driver.scheduler
        check(scheduler)
        ended = sum(transcript.finish is not None for transcript in self.driver.transcripts.values())
        assert ended + scheduler.running + scheduler.waiting == len(self.requests)

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        self.driver.finish()
        for number, request in self.requests.items():
            self.driver.transcripts[number].check(request, CONTEXT, aborted=number in self.aborted)


SchedulerMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestScheduler = SchedulerMachine.TestCase
