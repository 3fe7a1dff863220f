"""Many requests, faults among them, and not one of the twelve invariants broken. `make soak` runs the long form."""

import logging
import os
from collections import Counter

import pytest
from support.history import INVARIANTS
from support.soak import FAULTS, STEP_SECONDS, Soak, slope

log = logging.getLogger("soak")

REQUESTS = int(os.environ.get("OCTAVO_SOAK_REQUESTS", "2000"))
PERIOD = int(os.environ.get("OCTAVO_SOAK_PERIOD", "20"))
"""Every so many requests there is a fault."""
ENOUGH_TO_MEASURE = 100_000
WARM_UP = 0.2
"""Share of the requests."""


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Faults are logged, and pytest keeps what is logged: in a long run that would be a leak of its own."""
    caplog.set_level(logging.CRITICAL, logger="octavo")
    caplog.set_level(logging.INFO, logger="soak")


def test_requests_to_a_scripted_engine_in_virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_STRICT", "1")
    soak = Soak(REQUESTS, PERIOD)
    soak.run()
    log.info(
        "%d requests in %d virtual seconds, faults: %s, %d crashes, %d preemptions, %d violations",
        *(soak.submitted, soak.now, dict(soak.faults), soak.lives - 1, soak.preemptions, soak.checker.found.total()),
    )
    assert soak.checker.found == Counter(), soak.checker.examples
    assert soak.checker.finished.total() == REQUESTS
    assert set(soak.faults) == set(FAULTS)
    assert soak.preemptions > REQUESTS / 1000
    assert soak.now > REQUESTS * STEP_SECONDS / 10
    if REQUESTS >= ENOUGH_TO_MEASURE:
        later = [point for point in soak.resident if point[0] > WARM_UP * REQUESTS]
        growth = slope(later[:: max(len(later) // 300, 1)]) * 100_000
        assert growth < 1_000_000, f"{growth:.0f} bytes more for every 100,000 requests"


def test_the_slope_is_that_of_most_pairs() -> None:
    line = [(float(x), 3.0 * x + 7) for x in range(40)]
    line[10] = (10.0, 1e9)
    assert slope(line) == pytest.approx(3.0)


def test_every_invariant_is_named() -> None:
    assert list(INVARIANTS) == [f"I{number}" for number in range(1, 13)]
