import pytest

from octavo.server.revival import Obituary, RestartPolicy, StallWatch


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def obituary(**policy: object) -> tuple[Obituary[str], Clock]:
    clock = Clock()
    return Obituary(RestartPolicy(**policy), clock), clock


def test_starts_are_put_off_longer_and_longer_and_then_given_up() -> None:
    deaths, _ = obituary()
    delays = []
    for _ in range(5):
        assert deaths.died(["a", "b"], [True, True], 8) is None
        delays.append(deaths.delay())
    assert delays == [0.1, 0.5, 2.0, 10.0, None]


def test_only_recent_deaths_count_and_starts_that_fail_are_deaths() -> None:
    deaths, clock = obituary()
    for _ in range(20):
        deaths.failed_to_start()
        assert deaths.delay() in (0.1, 0.5, 2.0, 10.0)
        clock.now += 15.1


def test_a_request_that_gets_on_between_two_deaths_is_no_suspect() -> None:
    deaths, _ = obituary(deaths=99)
    for _ in range(10):
        assert deaths.died(["a", "b"], [True, True], 8) is None
        assert deaths.suspect is None


def test_suspects_are_tried_one_by_one_until_one_is_tried_at_a_death() -> None:
    deaths, _ = obituary()
    deaths.died(["a", "b", "c", "d"], [True, False, False, False], 8)
    assert deaths.suspect is None
    deaths.died(["a", "b", "c", "d", "new"], [True, False, False, False, False], 8)
    assert deaths.suspect == "b"
    assert not deaths.acquit("d")
    assert deaths.acquit("b")
    assert deaths.suspect == "c"
    assert deaths.died(["a", "b", "c"], [False, True, False], 8) is None
    assert deaths.died(["c"], [False], 8) == "c"
    assert deaths.suspect is None
    assert deaths.delay() == 2.0  # the death that was cleared up does not count


def test_an_engine_that_dies_during_a_trial_once_proves_nothing() -> None:
    deaths, _ = obituary(deaths=99)
    for _ in range(3):
        deaths.died(["a", "b"], [False, False], 8)
    assert deaths.acquit("a")
    assert deaths.died(["a", "b"], [True, False], 8) is None
    assert deaths.suspect == "b"
    assert deaths.acquit("b")
    assert deaths.suspect is None


def test_requests_that_only_waited_are_not_suspected() -> None:
    deaths, _ = obituary()
    deaths.died(["a", "b", "c"], [True, False, False], 2)
    deaths.died(["a", "b", "c"], [True, False, False], 2)
    assert deaths.acquit("b")
    assert deaths.suspect is None


def test_a_failed_start_does_not_clear_anybody() -> None:
    deaths, _ = obituary()
    deaths.died(["a", "b"], [False, False], 8)
    deaths.failed_to_start()
    deaths.died(["a", "b"], [False, False], 8)
    assert deaths.suspect == "a"


@pytest.mark.parametrize("limit", [0.5, 5.0, 300.0])
def test_an_engine_with_work_and_no_reports_has_stalled_after_the_limit(limit: float) -> None:
    watch = StallWatch(limit)
    looks = round(limit / watch.interval)
    assert [watch.stalled(working=True) for _ in range(looks)] == [False] * (looks - 1) + [True]
    for _ in range(looks - 1):
        assert not watch.stalled(working=True)
    watch.reported()
    assert not watch.stalled(working=True)
    assert not watch.stalled(working=False)


def test_without_a_limit_nothing_stalls() -> None:
    watch = StallWatch(0.0)
    assert not any(watch.stalled(working=True) for _ in range(10_000))
