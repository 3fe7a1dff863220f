from collections.abc import Sequence

import pytest
from support.scheduling import BLOCK_SIZE, EOS, POISON, VOCABULARY, Driver, make_scheduler, submission

from octavo.kvcache.pool import BlockPool
from octavo.kvcache.prefix import PrefixHasher
from octavo.model.step import RowResult, SamplingParams, Step, StepResult
from octavo.scheduler.messages import FinishReason, TokenEvent
from octavo.scheduler.request import Request

PLAIN = SamplingParams(temperature=0.0, ignore_eos=True)


def count_up(tokens: Sequence[int]) -> int:
    """Token n follows n tokens, so the position of each token can be read off."""
    return len(tokens)


def launched(driver: Driver) -> Step:
    step = driver.launch()
    assert step is not None
    return step


def ran(driver: Driver, prompt: Sequence[int], max_tokens: int = 8, params: SamplingParams = PLAIN) -> list[TokenEvent]:
    """Events of one request that runs to its end."""
    number = len(driver.transcripts)
    driver.add(submission(number, prompt, max_tokens, params=params))
    driver.finish()
    return driver.transcripts[number].events


# How much a step computes


def test_prompts_fill_a_step_alone_but_only_part_of_one_beside_requests_that_generate() -> None:
    driver = Driver(make_scheduler(tokens=16, mixed_tokens=6), count_up)

    def counts() -> list[int]:
        step = launched(driver)
        driver.land()
        return sorted(row.count for row in step.rows)

    driver.add(submission(0, [1] * 20, max_tokens=9, params=PLAIN))
    assert [counts(), counts()] == [[16], [4]]
    driver.add(submission(1, [2] * 12, max_tokens=9, params=PLAIN))
    assert [counts() for _ in range(4)] == [[1, 5], [1, 5], [1, 2], [1, 1]]


# What is refused


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        (0, 4, "the prompt is empty"),
        (41, 4, "the prompt has 41 tokens, but the context holds only 40"),
        (41, 0, "the prompt has 41 tokens, but the context holds only 40"),
        (40, 1, "the prompt has 40 tokens and fills the context"),
        (30, 4, "30 prompt tokens and up to 4 generated ones need 9 KV blocks of 4, but the cache has only 8"),
        (33, 0, "33 prompt tokens and up to 0 generated ones need 9 KV blocks of 4, but the cache has only 8"),
        (1, 99, "1 prompt tokens and up to 39 generated ones need 10 KV blocks of 4, but the cache has only 8"),
    ],
)
def test_a_request_that_could_never_run_is_refused_with_the_numbers(prompt: int, max_tokens: int, message: str) -> None:
    scheduler = make_scheduler(blocks=8, context=40)
    event = scheduler.add(submission(5, [1] * prompt, max_tokens))
    assert event is not None
    assert (event.request, event.finish, event.first) == (5, "error", False)
    assert event.error is not None
    assert event.error.startswith(message)
    assert "\n" not in event.error
    assert not scheduler.busy


@pytest.mark.parametrize(("prompt", "max_tokens"), [(32, 0), (32, 1), (31, 2), (1, 32)])
def test_a_request_that_just_fits_the_pool_alone_runs_to_its_end(prompt: int, max_tokens: int) -> None:
    driver = Driver(make_scheduler(blocks=8, context=40), count_up)
    driver.add(submission(0, range(1, 9), max_tokens=20, params=PLAIN))
    driver.turn()
    events = ran(driver, [1] * prompt, max_tokens)
    assert events[-1].finish == "length"
    assert len(driver.transcripts[1].tokens) == max_tokens
    assert driver.transcripts[0].finish == "length"


def test_the_last_token_needs_no_block() -> None:
    driver = Driver(make_scheduler(blocks=1), count_up)
    assert [event.token for event in ran(driver, [1, 2, 3], max_tokens=2)] == [3, 4]


def test_two_live_requests_cannot_have_the_same_id() -> None:
    driver = Driver(make_scheduler(rows=1))
    for number in range(2):
        driver.add(submission(number, [1, 2], params=PLAIN))
    driver.turn()
    for number in range(2):
        with pytest.raises(ValueError, match=f"request {number} exists already"):
            driver.scheduler.add(submission(number, [1, 2]))


# How a request ends


@pytest.mark.parametrize(
    ("params", "tokens", "finish", "stop_id"),
    [
        (SamplingParams(), [9, 8, 7, EOS], "stop", None),
        (SamplingParams(ignore_eos=True), [9, 8, 7, EOS, 5, 4], "length", None),
        (SamplingParams(stop_token_ids=(3, 8)), [9, 8], "stop", 8),
        (SamplingParams(stop_token_ids=(EOS,)), [9, 8, 7, EOS], "stop", None),
        (SamplingParams(ignore_eos=True, stop_token_ids=(EOS,)), [9, 8, 7, EOS], "stop", EOS),
        (SamplingParams(stop_token_ids=(4,), ignore_eos=True), [9, 8, 7, EOS, 5, 4], "stop", 4),
    ],
)
def test_eos_stop_ids_and_length_end_a_request(
    params: SamplingParams, tokens: list[int], finish: FinishReason, stop_id: int | None
) -> None:
    driver = Driver(make_scheduler(), lambda known: [9, 8, 7, EOS, 5, 4][len(known) - 2])
    events = ran(driver, [1, 2], 6, params)
    assert [event.token for event in events] == tokens
    assert [event.finish for event in events] == [None] * (len(tokens) - 1) + [finish]
    assert [event.stop_id for event in events] == [None] * (len(tokens) - 1) + [stop_id]


def test_the_runner_is_told_which_ids_min_tokens_forbids() -> None:
    driver = Driver(make_scheduler())
    for number, params in enumerate(
        [SamplingParams(stop_token_ids=(9, 3)), SamplingParams(stop_token_ids=(9,), ignore_eos=True), SamplingParams()]
    ):
        driver.add(submission(number, [1, 2], params=params))
    assert [admission.ending_ids for admission in launched(driver).admitted] == [(EOS, 3, 9), (9,), (EOS,)]


def test_nothing_but_length_ends_a_request_before_min_tokens() -> None:
    scheduler = make_scheduler()
    scheduler.add(submission(0, [1, 2], params=SamplingParams(min_tokens=2, stop_token_ids=(9,))))
    tokens = []
    for token in (EOS, 9, 9):
        step = scheduler.schedule()
        assert step is not None
        tokens += scheduler.commit(step, StepResult((RowResult(token),)))
    assert [event.finish for event in tokens] == [None, None, "stop"]


def test_a_request_ends_where_the_context_does() -> None:
    driver = Driver(make_scheduler(context=16), count_up)
    events = ran(driver, range(1, 13), max_tokens=100)
    assert [event.token for event in events] == [12, 13, 14, 15]
    assert events[-1].finish == "length"


@pytest.mark.parametrize("length", [1, 4, 16, 40])
def test_max_tokens_0_computes_the_prompt_and_yields_no_token(length: int) -> None:
    driver = Driver(make_scheduler(tokens=16))
    events = ran(driver, range(1, length + 1), max_tokens=0)
    assert [(event.token, event.finish, event.first) for event in events] == [(None, "length", True)]
    assert driver.runner.computed == length
    assert not any(row.sample for step in driver.steps for row in step.rows)


def test_with_steps_in_flight_no_request_computes_more_than_it_can_yield() -> None:
    driver = Driver(make_scheduler(), count_up)
    driver.add(submission(0, [1, 2, 3], max_tokens=3, params=PLAIN))
    steps = [driver.launch() for _ in range(5)]
    assert [step is not None for step in steps] == [True, True, True, False, False]
    driver.finish()
    assert driver.transcripts[0].tokens == [3, 4, 5]


def test_a_row_that_failed_ends_only_its_request() -> None:
    driver = Driver(make_scheduler())
    poisoned = submission(0, [POISON, 7, 1, 2, 3], params=PLAIN)
    neighbour = submission(1, [1, 2, 3], params=PLAIN)
    driver.add(poisoned)
    driver.add(neighbour)
    driver.finish()
    last = driver.transcripts[0].events[-1]
    assert (last.finish, last.token) == ("error", None)
    assert last.error == "the model computed values that are not finite for this request"
    driver.transcripts[0].check(poisoned, 64)
    driver.transcripts[1].check(neighbour, 64)


def test_nobody_finds_the_blocks_of_a_row_that_failed() -> None:
    driver = Driver(make_scheduler())
    ran(driver, [POISON, 12, *range(1, 7)], 2)
    failing = ran(driver, [POISON, 12, *range(1, 8)], 20)
    assert failing[0].cached_tokens == 8
    assert failing[-1].finish == "error"
    assert driver.scheduler.pool.cached == 0
    assert ran(driver, [POISON, 12, *range(1, 7)], 2)[0].cached_tokens == 0


# Aborts


def test_a_waiting_request_is_aborted_with_the_reason_given() -> None:
    scheduler = make_scheduler()
    scheduler.add(submission(0, [1, 2]))
    assert scheduler.abort(0, "stop") == TokenEvent(request=0, finish="stop")
    assert not scheduler.busy
    assert scheduler.schedule() is None


def test_a_request_aborted_in_flight_ends_at_once_and_its_tokens_are_dropped() -> None:
    driver = Driver(make_scheduler())
    driver.add(submission(0, range(1, 6), params=PLAIN))
    driver.turn()
    launched(driver)
    launched(driver)
    driver.abort(0, "length")
    assert driver.scheduler.pool.referenced == 0
    assert [event.finish for event in driver.transcripts[0].events] == [None, "length"]
    driver.land()
    driver.land()
    assert len(driver.transcripts[0].events) == 2


def test_aborting_an_unknown_or_ended_request_does_nothing() -> None:
    driver = Driver(make_scheduler())
    ran(driver, [1, 2, 3], 2)
    assert driver.scheduler.abort(0, "abort") is None
    assert driver.scheduler.abort(77, "abort") is None


# The first event


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_first_event_tells_of_the_queue_and_the_cache() -> None:
    clock = Clock()
    driver = Driver(make_scheduler(rows=1, clock=clock))
    driver.add(submission(0, range(1, 11), max_tokens=2, params=PLAIN))
    driver.add(submission(1, range(1, 11), max_tokens=3, params=PLAIN))
    driver.turn()
    clock.now += 5
    driver.finish()
    first, *rest = driver.transcripts[1].events
    assert (first.first, first.queue_seconds, first.cached_tokens) == (True, 5.0, 8)
    assert [(event.first, event.queue_seconds, event.cached_tokens) for event in rest] == [(False, 0.0, 0)] * 2


def test_a_first_event_without_a_token_is_a_first_event_too() -> None:
    driver = Driver(make_scheduler(tokens=6))
    events = ran(driver, range(1, 11), 2, SamplingParams(temperature=0.0, ignore_eos=True, prompt_logprobs=0))
    assert [event.first for event in events] == [True, False, False]
    assert [event.token is None for event in events] == [True, False, False]
    assert [len(event.prompt_logprobs) for event in events] == [6, 3, 0]


def test_an_abort_before_any_token_is_a_first_event_only_after_admission() -> None:
    clock = Clock()
    driver = Driver(make_scheduler(rows=1, tokens=4, clock=clock))
    for number in range(2):
        driver.add(submission(number, range(1, 9)))
    clock.now += 3
    launched(driver)
    driver.abort(0)
    driver.abort(1)
    (running,), (waiting,) = (driver.transcripts[number].events for number in range(2))
    assert (running.first, running.queue_seconds) == (True, 3.0)
    assert (waiting.first, waiting.queue_seconds) == (False, 0.0)


# Who computes next


def rows(step: Step) -> list[tuple[int, int, int]]:
    return [(row.slot, row.start, row.count) for row in step.rows]


def test_a_long_prompt_is_computed_in_chunks_beside_the_tokens_of_others() -> None:
    driver = Driver(make_scheduler(tokens=6))
    driver.add(submission(0, [1, 2, 3], params=PLAIN))
    driver.turn()
    driver.add(submission(1, range(1, 14), params=PLAIN))
    steps = [driver.turn() for _ in range(3)]
    assert [rows(step) for step in steps if step] == [
        [(0, 3, 1), (1, 0, 5)],
        [(0, 4, 1), (1, 5, 5)],
        [(0, 5, 1), (1, 10, 3)],
    ]
    assert [step.rows[1].sample for step in steps if step] == [False, False, True]


def test_rows_of_one_token_come_first() -> None:
    driver = Driver(make_scheduler(tokens=12))
    for number, length in enumerate([5, 1, 3, 1]):
        driver.add(submission(number, [number + 1] * length, params=PLAIN))
    assert [row.count for row in launched(driver).rows] == [1, 1, 5, 3]


def test_waiting_requests_are_admitted_in_order_and_never_overtake() -> None:
    driver = Driver(make_scheduler(blocks=6, context=24, caching=False))
    driver.add(submission(0, range(1, 9), max_tokens=4, params=PLAIN))
    driver.add(submission(1, range(1, 19), max_tokens=4, params=PLAIN))
    driver.add(submission(2, [1], max_tokens=1, params=PLAIN))
    step = launched(driver)
    assert [len(admission.tokens) for admission in step.admitted] == [8]  # the third would fit, but it is not its turn
    driver.finish()
    assert [len(admission.tokens) for step in driver.steps for admission in step.admitted] == [8, 18, 1]


def test_a_newcomer_leaves_a_block_for_each_running_request() -> None:
    driver = Driver(make_scheduler(blocks=5, context=16, caching=False))
    driver.add(submission(0, [1, 2, 3], max_tokens=8, params=PLAIN))
    driver.add(submission(1, range(1, 14), max_tokens=1, params=PLAIN))
    assert len(launched(driver).admitted) == 1  # four blocks are left and it needs four
    driver.finish()
    assert driver.scheduler.preemptions == 0
    assert driver.transcripts[1].finish == "length"


def test_no_more_requests_run_than_there_are_slots() -> None:
    driver = Driver(make_scheduler(rows=2))
    for number in range(3):
        driver.add(submission(number, [1, 2], params=PLAIN))
    driver.turn()
    assert (driver.scheduler.running, driver.scheduler.waiting) == (2, 1)


def test_a_preempted_request_is_the_next_to_be_admitted_and_goes_on_where_it_was() -> None:
    driver = Driver(make_scheduler(blocks=5, context=16, caching=False), count_up)
    for number in range(2):
        driver.add(submission(number, [1, 2, 3], max_tokens=12, params=PLAIN))
    while not driver.scheduler.preemptions:
        driver.turn()
    driver.add(submission(2, [9], max_tokens=1, params=PLAIN))
    so_far = len(driver.transcripts[1].tokens)
    assert so_far > 1
    driver.finish()
    again, newcomer = [admission for step in driver.steps for admission in step.admitted][2:]
    assert again.tokens == (1, 2, 3, *range(3, 3 + so_far))
    assert again.prompt_length == 3
    assert newcomer.tokens == (9,)
    assert driver.transcripts[1].tokens == list(range(3, 15))
    assert [event.first for event in driver.transcripts[1].events].count(True) == 1


def test_the_oldest_request_always_gets_ahead() -> None:
    driver = Driver(make_scheduler(blocks=8, rows=8, context=32, caching=False), count_up)
    for number in range(8):
        driver.add(submission(number, [1] * 3, max_tokens=29, params=PLAIN))
    turns = 0
    while driver.transcripts[0].finish is None:
        driver.turn()
        turns += 1
    assert turns == 29  # one token a turn: it never waited for anybody
    driver.finish()
    assert driver.scheduler.preemptions > 0


# The prefix cache


def test_requests_of_another_salt_find_nothing() -> None:
    driver = Driver(make_scheduler())
    found = []
    for number, salt in enumerate([b"", b"a", b"a", b""]):
        driver.add(submission(number, range(1, 11), salt=salt))
        driver.finish()
        found.append(driver.transcripts[number].events[0].cached_tokens)
    assert found == [0, 0, 8, 8]


def test_what_a_request_generated_is_found_by_the_next_turn_of_the_conversation() -> None:
    driver = Driver(make_scheduler(), count_up)
    ran(driver, range(40, 46), max_tokens=8)
    conversation = [*range(40, 46), *range(6, 14)]
    assert ran(driver, [*conversation, 50, 51], max_tokens=1)[0].cached_tokens == 12


def test_without_a_hasher_nothing_is_cached_or_counted() -> None:
    driver = Driver(make_scheduler(caching=False))
    for _ in range(2):
        assert ran(driver, range(1, 11))[0].cached_tokens == 0
    scheduler = driver.scheduler
    assert (scheduler.pool.cached, scheduler.prefix_queries, scheduler.prefix_hits) == (0, 0, 0)


def test_lookups_are_counted_in_prompt_tokens() -> None:
    driver = Driver(make_scheduler())
    for prompt in (range(1, 11), range(1, 11), range(21, 26)):
        ran(driver, prompt)
    assert (driver.scheduler.prefix_queries, driver.scheduler.prefix_hits) == (25, 8)


# Prompt log-probabilities


SCORED = SamplingParams(temperature=0.0, ignore_eos=True, prompt_logprobs=1)


def test_a_scored_prompt_is_computed_in_full_but_others_find_it() -> None:
    driver = Driver(make_scheduler())
    ran(driver, range(1, 11))
    computed = driver.runner.computed
    scored = ran(driver, range(1, 11), 1, SCORED)
    assert driver.runner.computed - computed == 10
    assert scored[0].cached_tokens == 0
    assert sum(len(event.prompt_logprobs) for event in scored) == 9
    driver = Driver(make_scheduler())
    ran(driver, range(1, 11), 1, SCORED)
    assert ran(driver, range(1, 11))[0].cached_tokens == 8


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 16])
@pytest.mark.parametrize("max_tokens", [0, 2])
@pytest.mark.parametrize("length", [1, 2, 9, 12])
def test_each_prompt_token_but_the_first_is_scored_once(tokens: int, max_tokens: int, length: int) -> None:
    driver = Driver(make_scheduler(tokens=tokens))
    request = submission(0, range(1, length + 1), max_tokens, params=SCORED)
    driver.add(request)
    while driver.scheduler.busy:
        if driver.launch() is None or len(driver.flights) > 1:
            driver.land()
    driver.transcripts[0].check(request, 64)
    scores = [row.score for step in driver.steps for row in step.rows]
    assert sum(scores) == -(-(length - 1) // tokens)


def test_after_a_preemption_only_what_is_missing_is_scored() -> None:
    driver = Driver(make_scheduler(blocks=6, tokens=3, context=24))
    elder = submission(0, [41, 42, 43], max_tokens=18, params=PLAIN)
    scored = submission(1, range(1, 14), max_tokens=2, params=SCORED)
    driver.add(elder)
    driver.turn()
    driver.add(scored)
    while not driver.scheduler.preemptions:
        driver.turn()
    reported = len(driver.transcripts[1].prompt_logprobs)
    assert 0 < reported < 12
    steps = len(driver.steps)
    driver.finish()
    driver.transcripts[0].check(elder, 24)
    driver.transcripts[1].check(scored, 24)
    rescored = [row for step in driver.steps[steps:] for row in step.rows if row.score]
    assert rescored[0].start <= reported < rescored[0].start + rescored[0].count


# The cost of a step


def test_the_name_of_a_block_is_computed_once_in_the_life_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    named = []
    name = PrefixHasher.name

    def counting(hasher: PrefixHasher, parent: bytes, tokens: Sequence[int]) -> bytes:
        named.append(tuple(tokens))
        return name(hasher, parent, tokens)

    monkeypatch.setattr(PrefixHasher, "name", counting)
    driver = Driver(make_scheduler(blocks=8, tokens=5, context=32), count_up)
    for number in range(3):
        driver.add(submission(number, [number + 40] * 6, max_tokens=20, params=PLAIN))
    driver.finish()
    assert driver.scheduler.preemptions > 0
    assert len(named) == 3 * (25 // BLOCK_SIZE)


def test_a_request_that_waits_for_blocks_costs_nothing_until_enough_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    lookups = []
    lookup = BlockPool.lookup

    def counting(pool: BlockPool, names: Sequence[bytes]) -> list[int]:
        lookups.append(len(names))
        return lookup(pool, names)

    monkeypatch.setattr(BlockPool, "lookup", counting)
    driver = Driver(make_scheduler(blocks=8, context=32))
    driver.add(submission(0, range(1, 9), max_tokens=20, params=PLAIN))
    driver.add(submission(1, range(11, 39), max_tokens=2, params=PLAIN))
    driver.finish()
    assert len(driver.steps) > 20
    assert lookups == [1, 6, 6]  # at its admission; at the first try of the other, and when its blocks came back


def test_decoding_after_a_long_prompt_reads_each_new_token_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    tokens = Request.tokens

    def counting(request: Request, start: int, stop: int) -> tuple[int, ...]:
        read.append(stop - start)
        return tokens(request, start, stop)

    driver = Driver(make_scheduler(blocks=300, tokens=1_000, context=1_100), lambda known: len(known) % VOCABULARY)
    driver.add(submission(0, [7] * 1_000, max_tokens=80, params=PLAIN))
    driver.turn()
    monkeypatch.setattr(Request, "tokens", counting)
    driver.finish()
    assert read == [BLOCK_SIZE] * (79 // BLOCK_SIZE)


# Priority


def test_requests_of_lower_number_are_admitted_first_and_equals_as_they_came() -> None:
    driver = Driver(make_scheduler(rows=1))
    for number, priority in enumerate([0, 5, 0, -3, 5]):
        driver.add(submission(number, [1, 2], 2, params=PLAIN, priority=priority))
    order = []
    while (step := driver.launch()) is not None:
        order += [driver.scheduler._flights[-1].requests[0].id for admission in step.admitted]
        driver.land()
    assert order == [3, 0, 2, 1, 4]


def test_where_blocks_run_out_the_last_in_order_gives_way_even_if_it_came_first() -> None:
    driver = Driver(make_scheduler(blocks=7, rows=2))
    driver.add(submission(0, range(1, 9), max_tokens=12, params=PLAIN, priority=1))
    launched(driver)
    driver.land()
    driver.add(submission(1, range(11, 19), max_tokens=12, params=PLAIN))
    while driver.transcripts[1].finish is None:
        launched(driver)
        driver.land()
    assert driver.scheduler.preemptions > 0
    assert driver.transcripts[0].finish is None
    driver.finish()
    for number, prompt in ((0, range(1, 9)), (1, range(11, 19))):
        driver.transcripts[number].check(submission(number, prompt, 12, params=PLAIN), 64)
