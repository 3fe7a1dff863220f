"""Who may start: what can never fit is refused at the door, and under `reserve` nobody is ever put back."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from support.scheduling import BLOCK_SIZE, Driver, make_scheduler, submission

from octavo.model.step import SamplingParams
from octavo.scheduler.messages import Submission

CONTEXT = 64
ENDLESS = SamplingParams(temperature=0.0, ignore_eos=True)

loads = st.lists(
    st.builds(
        lambda length, seed, max_tokens: (
            tuple((seed + place * place) % 50 + 1 for place in range(length)),
            max_tokens,
        ),
        st.integers(1, 20),
        st.integers(0, 3),
        st.integers(0, 24),
    ),
    min_size=1,
    max_size=10,
)


def crowd(count: int) -> list[Submission]:
    return [submission(number, (number + 1, 2, 3), 12, params=ENDLESS) for number in range(count)]


def answers(requests: list[Submission], blocks: int, reserve: bool) -> tuple[list[list[int]], int]:
    driver = Driver(make_scheduler(blocks, context=CONTEXT, reserve=reserve))
    for request in requests:
        driver.add(request)
    driver.finish()
    for request in requests:
        driver.transcripts[request.request].check(request, CONTEXT)
    return [driver.transcripts[request.request].tokens for request in requests], driver.scheduler.preemptions


def test_a_pool_too_small_for_the_load_preempts_nobody_under_reserve_and_yields_the_same_tokens() -> None:
    optimistic, preemptions = answers(crowd(8), blocks=7, reserve=False)
    reserved, none = answers(crowd(8), blocks=7, reserve=True)
    assert preemptions > 0
    assert none == 0
    assert reserved == optimistic
    assert all(len(tokens) == 12 for tokens in reserved)


def test_under_reserve_a_request_waits_until_all_it_may_become_fits() -> None:
    driver = Driver(make_scheduler(blocks=7, reserve=True))
    for request in crowd(2):
        driver.add(request)
    driver.turn()
    assert (driver.scheduler.running, driver.scheduler.waiting) == (1, 1)
    assert driver.scheduler.pool.referenced == 4  # 3 prompt tokens and 11 of 12 new ones, in blocks of 4
    driver.finish()


def test_under_reserve_no_block_is_held_back_beside_the_reserved_ones() -> None:
    driver = Driver(make_scheduler(blocks=8, reserve=True))
    for request in crowd(2):
        driver.add(request)
    driver.turn()
    assert (driver.scheduler.running, driver.scheduler.pool.available) == (2, 0)
    driver.finish()


@pytest.mark.parametrize("reserve", [False, True])
@settings(max_examples=120, deadline=None)
@given(load=loads, blocks=st.integers(3, 14), rows=st.integers(1, 5), ahead=st.integers(0, 2))
def test_every_request_that_could_run_alone_ends_and_every_other_is_refused_with_the_numbers(
    reserve: bool, load: list[tuple[tuple[int, ...], int]], blocks: int, rows: int, ahead: int
) -> None:
    driver = Driver(make_scheduler(blocks, rows, context=CONTEXT, reserve=reserve))
    for number, (prompt, max_tokens) in enumerate(load):
        request = submission(number, prompt, max_tokens, params=ENDLESS)
        driver.add(request)
        needed = -(-(len(prompt) + max(max_tokens - 1, 0)) // BLOCK_SIZE)
        if needed > blocks:
            (refusal,) = driver.transcripts[number].events
            assert refusal.finish == "error"
            assert f"{needed} KV blocks" in (refusal.error or "")
            assert f"only {blocks}" in (refusal.error or "")
        else:
            assert driver.transcripts[number].events == []
    while driver.scheduler.busy:
        step = driver.launch()
        while driver.flights and (step is None or len(driver.flights) > ahead):
            driver.land()
    for number, (prompt, max_tokens) in enumerate(load):
        if driver.transcripts[number].finish != "error":
            driver.transcripts[number].check(submission(number, prompt, max_tokens, params=ENDLESS), CONTEXT)
    assert not (reserve and driver.scheduler.preemptions)
