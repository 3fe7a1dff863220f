"""Many requests, faults among them, and not one of the thirteen invariants broken. `make soak` runs the long form."""

import logging
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from support.checkpoints import tiny_model
from support.history import INVARIANTS
from support.live import live_server, story_command
from support.soak import FAULTS, STEP_SECONDS, Soak, slope
from support.socket_soak import DEATHS, Clients, at_rest, faults, recorded

from octavo.scheduler.messages import EngineConfig
from octavo.server.revival import RestartPolicy
from octavo.server.spawning import ENGINE_COMMAND

log = logging.getLogger("soak")

REQUESTS = int(os.environ.get("OCTAVO_SOAK_REQUESTS", "2000"))
PERIOD = int(os.environ.get("OCTAVO_SOAK_PERIOD", "20"))
"""Every so many requests there is a fault."""
SOCKET_REQUESTS = int(os.environ.get("OCTAVO_SOAK_SOCKET_REQUESTS", "120"))
SOCKET_PERIOD = int(os.environ.get("OCTAVO_SOAK_SOCKET_PERIOD", "8"))
SOCKET_DEATHS = int(os.environ.get("OCTAVO_SOAK_SOCKET_DEATHS", "2"))
"""Engines of a model that die; of a scripted one, which starts at once, one of each kind does."""
OFTEN = RestartPolicy(deaths=1_000_000, delays=(0.05,), stall_seconds=5)
ENOUGH_TO_MEASURE = 300_000
WARM_UP = 100_000
"""Requests, by the end of which the allocators have the memory that they keep. What follows is measured."""


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Faults are logged, and pytest keeps what is logged: in a long run that would be a leak of its own."""
    caplog.set_level(logging.CRITICAL, logger="octavo")
    caplog.set_level(logging.WARNING, logger="httpx")
    caplog.set_level(logging.INFO, logger="soak")


def test_requests_to_a_scripted_engine_in_virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_STRICT", "1")
    soak = Soak(REQUESTS, PERIOD)
    soak.run()
    log.info(
        "%d requests in %d virtual seconds, faults: %s, %d crashes, %d pauses, %d preemptions, %d violations",
        *(soak.submitted, soak.now, dict(soak.faults), soak.lives - 1, soak.pauses, soak.preemptions),
        soak.checker.found.total(),
    )
    assert soak.checker.found == Counter(), soak.checker.examples
    assert soak.checker.finished.total() == REQUESTS
    assert set(soak.faults) == set(FAULTS)
    assert soak.preemptions > REQUESTS / 1000
    assert soak.pauses > soak.faults["slow reader"] / 2
    assert soak.now > REQUESTS * STEP_SECONDS / 10
    if REQUESTS >= ENOUGH_TO_MEASURE:
        warm = next(number for number, requests in enumerate(soak.measured) if requests > WARM_UP)
        grown, more = (
            slope(list(zip(soak.measured[warm:], values[warm:], strict=True))) * 100_000
            for values in (soak.resident, soak.objects)
        )
        log.info("%+.0f bytes and %+.0f blocks of memory for every 100,000 requests after the first", grown, more)
        assert grown < 1_000_000
        assert more < 500


def test_the_slope_is_that_of_most_pairs() -> None:
    line = [(float(x), 3.0 * x + 7) for x in range(40)]
    line[10] = (10.0, 1e9)
    assert slope(line) == pytest.approx(3.0)


def test_every_invariant_is_named() -> None:
    assert list(INVARIANTS) == [f"I{number}" for number in range(1, 14)]


def soak_over_sockets(config: EngineConfig, command: Sequence[str], deaths: int) -> None:
    """Serve on sockets while `deaths` engines die, beside one that computes one request at a time, undisturbed."""
    breaking = msgspec.structs.replace(config, fault=faults(deaths, steps=max(SOCKET_REQUESTS // 100, 30)))
    unbatched = msgspec.structs.replace(config, max_num_seqs=1, prefix_caching=False, kv_blocks=64)
    with (
        live_server(unbatched, command=command) as alone,
        live_server(breaking, command=command, policy=OFTEN) as live,
    ):
        clients = Clients(live, alone, SOCKET_PERIOD)
        checker, metrics = clients.checker, live.service.client.metrics
        base = at_rest()
        with recorded(live.service.client, checker):
            clients.run(SOCKET_REQUESTS)
            checker.recovered(base, at_rest())
        checker.totals(metrics.prompt_tokens, metrics.generated_tokens)
        checker.require("I2", metrics.stats.blocks_referenced == 0, metrics.stats)
        checker.require("I4", checker.live == 0, checker.live)
        log.info(
            "%d requests over sockets, by the clients: %s, engine faults: %d that kill, %d steps undone, "
            "%d preemptions; %d violations",
            *(SOCKET_REQUESTS, dict(clients.did), metrics.engine_restarts, metrics._total("failed_steps_total")),
            *(metrics._total("preemptions_total"), checker.found.total()),
        )
        assert checker.found == Counter(), checker.examples
        assert metrics.engine_restarts == deaths
        assert metrics._total("failed_steps_total") > 0
        assert len(clients.did) == 5


@pytest.fixture
def _strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_STRICT", "1")


@pytest.mark.usefixtures("_strict")
def test_requests_over_sockets_to_a_scripted_engine(tmp_path: Path) -> None:
    config = EngineConfig(model="smollm2", max_num_seqs=8, kv_blocks=12, max_model_len=256)
    soak_over_sockets(config, story_command(tmp_path, {}), len(DEATHS))


@pytest.mark.usefixtures("_strict")
def test_requests_over_sockets_to_a_tiny_model(tmp_path: Path) -> None:
    tiny_model(tmp_path, "llama", vocabulary=49_152, max_context=256)
    config = EngineConfig(model=str(tmp_path), dtype="float32", max_num_seqs=8, kv_blocks=12)
    soak_over_sockets(config, ENGINE_COMMAND, SOCKET_DEATHS)


@pytest.mark.endurance
@pytest.mark.usefixtures("_strict")
def test_requests_over_sockets_to_smollm2() -> None:
    config = EngineConfig(model="smollm2", max_num_seqs=8, kv_blocks=20, max_model_len=256)
    soak_over_sockets(config, ENGINE_COMMAND, SOCKET_DEATHS)
