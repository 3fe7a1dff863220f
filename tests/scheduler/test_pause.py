"""A request whose client does not read is left alone: it makes no tokens, keeps its place, and takes nobody else's."""

import pytest
from support.fake_device import ScriptedRunner
from support.list_channel import ListChannel
from support.scheduling import BLOCK_SIZE, VOCABULARY, Driver, make_scheduler, next_token, submission

from octavo.model.step import SamplingParams
from octavo.scheduler.engine import Engine
from octavo.scheduler.messages import Abort, Pause

PLAIN = SamplingParams(temperature=0.0, ignore_eos=True)


def driver_with(count: int, max_tokens: int = 12, **limits: int | bool) -> Driver:
    """Requests with prompts of three tokens of their own, after their first step."""
    driver = Driver(make_scheduler(**limits))
    for number in range(count):
        driver.add(submission(number, [number + 1] * 3, max_tokens, params=PLAIN))
    driver.turn()
    return driver


def finish_and_check(driver: Driver, count: int, max_tokens: int = 12) -> None:
    driver.finish()
    for number in range(count):
        driver.transcripts[number].check(submission(number, [number + 1] * 3, max_tokens, params=PLAIN), 64)


def lengths(driver: Driver) -> list[int]:
    return [len(transcript.tokens) for transcript in driver.transcripts.values()]


def test_a_paused_request_keeps_its_blocks_and_goes_on_where_it_was() -> None:
    driver = driver_with(2)
    driver.pause(0)
    blocks = list(driver.scheduler._running[0].blocks)
    for _ in range(5):
        driver.turn()
    assert lengths(driver) == [1, 6]
    assert (driver.scheduler.running, driver.scheduler._running[0].blocks) == (2, blocks)
    driver.resume(0)
    driver.turn()
    assert lengths(driver) == [2, 7]
    finish_and_check(driver, 2)
    assert driver.scheduler.preemptions == 0


def test_what_is_in_flight_when_a_request_is_paused_still_counts() -> None:
    driver = driver_with(1)
    driver.launch()
    driver.launch()
    driver.pause(0)
    assert driver.launch() is None
    driver.land()
    driver.land()
    assert lengths(driver) == [3]
    assert driver.launch() is None
    driver.resume(0)
    finish_and_check(driver, 1)


def test_when_blocks_run_out_a_paused_request_gives_up_its_own_first() -> None:
    driver = driver_with(3, max_tokens=24, blocks=12, caching=False)
    driver.pause(0)
    while not driver.scheduler.preemptions:
        driver.turn()
    assert [request.id for request in driver.scheduler._waiting.values()] == [0]
    assert list(driver.scheduler._running) == [1, 2]
    driver.resume(0)
    finish_and_check(driver, 3, max_tokens=24)


@pytest.mark.parametrize("limits", [{"rows": 1}, {"blocks": 4}, {"blocks": 4, "reserve": True}])
def test_nobody_waits_for_a_slot_or_a_block_of_a_paused_request(limits: dict[str, int | bool]) -> None:
    driver = driver_with(1, **limits)
    driver.pause(0)
    driver.add(submission(1, [2] * 3, 12, params=PLAIN))
    while not driver.transcripts[1].finish:
        assert driver.turn() is not None
    assert (driver.scheduler.preemptions, lengths(driver)) == (1, [1, 12])
    driver.resume(0)
    finish_and_check(driver, 2)


def test_a_request_that_lost_its_slot_while_it_was_paused_is_before_those_who_came_later() -> None:
    driver = driver_with(1, rows=1)
    driver.pause(0)
    for number in (1, 2):
        driver.add(submission(number, [number + 1] * 3, 12, params=PLAIN))
    driver.turn()
    assert list(driver.scheduler._running) == [1]
    driver.resume(0)
    while not driver.transcripts[1].finish:
        driver.turn()
    driver.turn()
    assert list(driver.scheduler._running) == [0]
    finish_and_check(driver, 3)


def test_a_paused_request_that_waits_is_passed_over_and_can_be_aborted() -> None:
    driver = driver_with(1, rows=1)
    driver.add(submission(1, [2] * 3, 12, params=PLAIN))
    driver.pause(1)
    driver.add(submission(2, [3] * 3, 12, params=PLAIN))
    while not driver.transcripts[2].finish:
        driver.turn()
    assert not driver.scheduler.busy
    assert driver.turn() is None
    driver.pause(7)  # nobody
    driver.abort(1)
    assert driver.transcripts[1].finish == "abort"
    assert (driver.scheduler.waiting, driver.scheduler.pool.referenced) == (0, 0)


@pytest.mark.parametrize("paused", [[0], [0, 1], [1, 2], [0, 1, 2, 3]])
def test_a_paused_suspect_holds_up_no_trial(paused: list[int]) -> None:
    driver = driver_with(4)
    driver.launch()
    driver.fail_for_no_reason()
    for number in paused:
        driver.pause(number)
    for _ in range(6):
        driver.turn()
    assert not driver.scheduler._suspects
    assert [length > 2 for length in lengths(driver)] == [number not in paused for number in range(4)]
    for number in paused:
        driver.resume(number)
    finish_and_check(driver, 4)


@pytest.mark.parametrize("lookahead", [0, 1])
def test_an_engine_with_nothing_but_paused_requests_waits_for_messages(lookahead: int) -> None:
    first = submission(0, [1, 2, 3], 9, params=PLAIN)
    channel = ListChannel(
        [first], [Pause(request=0, paused=True)], [Pause(request=0, paused=False)], [], [Abort(request=0)]
    )
    runner = ScriptedRunner(next_token, VOCABULARY, BLOCK_SIZE)
    Engine(make_scheduler(), runner, channel, lookahead).run()
    assert channel.blocked == [True, False, True, False, False, True]
    tokens = [event.token for report in channel.reports for event in report.events]
    assert len(tokens) - 1 == 3 - lookahead
