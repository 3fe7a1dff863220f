"""The invariants of the loop, one test each, on cases small enough to follow by hand. A block holds 4 positions."""

import dataclasses

import pytest
from support.scheduling import Driver, Expected, make_scheduler, submission

from octavo.kvcache.pool import BlockPool
from octavo.model.step import SamplingParams, Step

PLAIN = SamplingParams(temperature=0.0, ignore_eos=True)


def launched(driver: Driver) -> Step:
    step = driver.launch()
    assert step is not None
    return step


def test_invariant_1_a_block_freed_at_one_commit_is_given_away_in_the_next_step() -> None:
    driver = Driver(make_scheduler(blocks=2, tokens=8, context=8))
    driver.add(submission(0, range(1, 7), max_tokens=2, params=PLAIN))
    driver.add(submission(1, range(11, 17), max_tokens=2, params=PLAIN))
    first = launched(driver)
    launched(driver)
    driver.land()
    assert driver.launch() is None  # the first request still holds both blocks
    driver.land()
    assert driver.transcripts[0].finish == "length"
    step = launched(driver)
    assert step.retired == (first.admitted[0].slot,)
    assert set(step.admitted[0].blocks) == set(first.admitted[0].blocks)
    driver.finish()
    driver.transcripts[1].check(submission(1, range(11, 17), max_tokens=2, params=PLAIN), 8)


def test_invariant_1_blocks_of_an_aborted_request_are_given_away_while_its_step_is_still_in_flight() -> None:
    driver = Driver(make_scheduler(blocks=2, tokens=8, context=8))
    driver.add(submission(0, range(1, 7), max_tokens=2, params=PLAIN))
    driver.add(submission(1, range(11, 17), max_tokens=2, params=PLAIN))
    first = launched(driver)
    driver.abort(0)
    step = launched(driver)
    assert len(driver.flights) == 2
    assert set(step.admitted[0].blocks) == set(first.admitted[0].blocks)
    driver.finish()
    driver.transcripts[1].check(submission(1, range(11, 17), max_tokens=2, params=PLAIN), 8)


def test_invariant_2_a_submitted_step_never_changes_afterwards() -> None:
    driver = Driver(make_scheduler(blocks=8, rows=2, tokens=6))
    for number in range(4):
        driver.add(submission(number, range(1, 8 + number), max_tokens=12))
    seen: list[tuple[Step, str]] = []
    for turn in range(60):
        step = driver.launch()
        if step is not None:
            seen.append((step, repr(step)))
        if turn == 5:
            driver.abort(2)
        if len(driver.flights) > 1 or step is None:
            while driver.flights:
                driver.land()
    assert len(seen) > 20
    assert all(repr(step) == before for step, before in seen)
    for step, _ in seen:
        hash(step)  # tuples and frozen values all the way down: nothing in it could be changed
        with pytest.raises(dataclasses.FrozenInstanceError):
            step.rows = ()  # type: ignore[misc]


def test_invariant_3_a_step_reads_a_token_that_the_host_does_not_know_yet() -> None:
    driver = Driver(make_scheduler())
    driver.add(submission(0, range(1, 6), params=PLAIN))
    steps = [launched(driver) for _ in range(3)]
    assert driver.transcripts[0].events == []
    assert [(row.start, row.count, row.sample) for step in steps for row in step.rows] == [
        (0, 5, True),
        (5, 1, True),
        (6, 1, True),
    ]
    driver.finish()
    driver.transcripts[0].check(submission(0, range(1, 6), params=PLAIN), 64)


OUTGROWING = [
    submission(0, [1, 2, 3], max_tokens=10, params=PLAIN),
    submission(1, [4], max_tokens=10, params=PLAIN),
    submission(2, [5], max_tokens=10, params=PLAIN),
]
"""With two blocks each they fill a pool of six; the first is the first to need a third one."""


def test_invariant_4_a_victim_is_left_out_until_its_step_has_landed_and_preempted_then() -> None:
    driver = Driver(make_scheduler(blocks=6, context=16, caching=False))
    scheduler = driver.scheduler
    for request in OUTGROWING:
        driver.add(request)
    slots = [admission.slot for admission in launched(driver).admitted]
    while len(step := launched(driver).rows) == 3:
        driver.land()
    # The youngest is in flight: it is left out with what it has. The second has room and goes on.
    assert [row.slot for row in step] == [slots[1]]
    assert (scheduler.preemptions, scheduler.running, scheduler.pool.available) == (0, 3, 0)
    driver.land()
    after = launched(driver)
    assert after.retired == (slots[2],)
    assert [growth.slot for growth in after.grown] == [slots[0]]
    assert {row.slot for row in after.rows} == {slots[0], slots[1]}
    assert (scheduler.preemptions, scheduler.running, scheduler.waiting) == (1, 2, 1)
    driver.finish()
    for request in OUTGROWING:
        driver.transcripts[request.request].check(request, 16)


def test_invariant_4_a_victim_that_no_step_works_for_is_preempted_at_once() -> None:
    driver = Driver(make_scheduler(blocks=6, context=16, caching=False))
    for request in OUTGROWING:
        driver.add(request)
    while not driver.scheduler.preemptions:
        step = driver.turn()
    assert step is not None
    assert len(step.rows) == 2
    assert len(step.retired) == len(step.grown) == 1
    driver.finish()
    for request in OUTGROWING:
        driver.transcripts[request.request].check(request, 16)


def test_invariant_5_a_row_whose_request_has_ended_is_dropped_though_its_slot_has_a_new_owner() -> None:
    driver = Driver(make_scheduler(rows=1))
    driver.add(submission(0, [1, 2, 3], params=PLAIN))
    driver.add(submission(1, [4, 5, 6], params=PLAIN))
    old = launched(driver)
    driver.abort(0)
    new = launched(driver)
    assert old.rows[0].slot == new.rows[0].slot == new.admitted[0].slot == new.retired[0]
    driver.land()
    assert driver.transcripts[0].tokens == driver.transcripts[1].tokens == []
    driver.land()
    assert len(driver.transcripts[1].tokens) == 1
    driver.finish()
    assert len(driver.transcripts[0].events) == 1
    driver.transcripts[1].check(submission(1, [4, 5, 6], params=PLAIN), 64)


@pytest.mark.parametrize("length", range(1, 13))
def test_invariant_6_a_fully_cached_prompt_computes_its_last_token_again(length: int) -> None:
    driver = Driver(make_scheduler())
    for number in range(2):
        driver.add(submission(number, range(1, length + 1), max_tokens=1, params=PLAIN))
        driver.finish()
    (row,) = driver.steps[-1].rows
    assert row.start == (length - 1) // 4 * 4
    assert row.count == length - row.start >= 1
    assert driver.transcripts[0].tokens == driver.transcripts[1].tokens


def test_invariant_7_a_prompt_can_be_shared_by_the_very_step_that_computes_it() -> None:
    driver = Driver(make_scheduler())
    prompt = range(1, 10)
    driver.add(submission(0, prompt, params=PLAIN))
    driver.add(submission(1, prompt, params=PLAIN))
    step = launched(driver)
    first, second = step.admitted
    assert first.blocks[:2] == second.blocks[:2]
    assert first.blocks[2] != second.blocks[2]
    assert [(row.start, row.count) for row in step.rows] == [(8, 1), (0, 9)]
    driver.finish()
    for number in range(2):
        driver.transcripts[number].check(submission(number, prompt, params=PLAIN), 64)
    assert driver.transcripts[1].events[0].cached_tokens == 8


def test_invariant_7_what_a_failed_step_had_promised_is_withdrawn() -> None:
    driver = Driver(make_scheduler(tokens=12))
    prompt = range(1, 10)
    driver.add(submission(0, range(21, 26), max_tokens=3, params=PLAIN))
    driver.turn()
    driver.add(submission(1, prompt, max_tokens=3, params=PLAIN))
    driver.add(submission(2, prompt, max_tokens=3, params=PLAIN))
    launched(driver)
    driver.abort(1)  # its blocks are cached now, under names that only the step in flight can make true
    driver.fail()
    assert (driver.scheduler.running, driver.scheduler.waiting) == (0, 2)
    assert (driver.scheduler.pool.referenced, driver.scheduler.pool.cached) == (0, 1)
    step = launched(driver)
    assert step.retired == ()
    assert [admission.tokens[0] for admission in step.admitted] == [21, 1]
    assert [row.start for row in step.rows] == [4, 0]
    driver.finish()
    driver.transcripts[0].check(submission(0, range(21, 26), max_tokens=3, params=PLAIN), 64)
    driver.transcripts[2].check(submission(2, prompt, max_tokens=3, params=PLAIN), 64)


def test_invariant_8_every_block_is_free_cached_or_referenced_and_idle_means_no_references() -> None:
    driver = Driver(make_scheduler(blocks=12, tokens=7))
    pool = driver.scheduler.pool
    for number in range(6):
        driver.add(submission(number, range(1, 4 + 2 * number), max_tokens=10, params=PLAIN))
    states = set()
    while driver.scheduler.busy:
        driver.turn()
        assert pool.free + pool.cached + pool.referenced == pool.total == 12
        states.add((pool.free > 0, pool.cached > 0, pool.referenced > 0))
    assert len(states) > 2
    assert pool.referenced == 0
    assert pool.cached > 0


def test_invariant_8_a_block_is_freed_in_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[int] = []
    allocated: list[int] = []
    release, allocate = BlockPool.release, BlockPool.allocate

    def recording_release(pool: BlockPool, blocks: list[int]) -> None:
        released.extend(blocks)
        release(pool, blocks)

    def recording_allocate(pool: BlockPool, count: int) -> list[int] | None:
        blocks = allocate(pool, count)
        allocated.extend(blocks or ())
        return blocks

    monkeypatch.setattr(BlockPool, "release", recording_release)
    monkeypatch.setattr(BlockPool, "allocate", recording_allocate)
    driver = Driver(make_scheduler(blocks=6, caching=False))
    for number in range(5):
        driver.add(submission(number, [number + 1] * 3, max_tokens=20, params=PLAIN))
    for _ in range(8):
        driver.turn()
    driver.abort(0)
    driver.abort(4)
    driver.finish()
    assert driver.scheduler.preemptions > 0
    assert sorted(released) == sorted(allocated)


def test_invariant_9_every_accepted_request_ends_once_and_no_token_is_lost_or_doubled() -> None:
    driver = Driver(make_scheduler(blocks=8, tokens=6, context=24))
    requests = [submission(number, range(1, 3 + 2 * number), max_tokens=9) for number in range(7)]
    for request in requests:
        driver.add(request)
    for turn in range(200):
        driver.launch()
        if turn == 7:
            driver.abort(5)
            driver.abort(5)
        if len(driver.flights) > 1:
            driver.land()
        if not driver.scheduler.busy:
            break
    driver.finish()
    driver.abort(0)
    for request in requests:
        driver.transcripts[request.request].check(request, 24, aborted=request.request == 5)
    assert driver.transcripts[5].finish == "abort"


@pytest.mark.parametrize("tokens", [1, 3, 16, 64])
@pytest.mark.parametrize("blocks", [8, 40])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("neighbours", [0, 6])
def test_invariant_10_a_request_does_not_depend_on_its_neighbours(
    tokens: int, blocks: int, caching: bool, neighbours: int
) -> None:
    driver = Driver(make_scheduler(blocks, 4, tokens, 32, caching))
    requests = [submission(number, range(1, 8 + number), max_tokens=14, params=PLAIN) for number in range(neighbours)]
    requests.append(submission(99, range(1, 14), max_tokens=14, params=PLAIN))
    for request in requests:
        driver.add(request)
    driver.finish()
    alone = Expected(requests[-1], 32)
    assert driver.transcripts[99].tokens == alone.tokens
    assert len(alone.tokens) == 14
