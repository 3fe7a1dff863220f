import asyncio
import threading

import pytest
from support.daemon import running
from support.measuring import check_identities, scrape, stream_all, usage

from octavo.server import health
from octavo.server.health import watch_event_loop

COUNTERS = ("_total", "_count", "_sum", "_bucket")


def test_g01_the_sums_are_what_the_clients_measured() -> None:
    """Two at a time of eight: what is measured is long beside what lies between a client's clock and the server's."""
    with running("--max-num-seqs", "2", step_seconds=0.03) as daemon:
        bodies = [{"prompt": [5 + number, 6, 7], "max_tokens": 20} for number in range(8)]
        measured = stream_all(daemon.url, bodies)
        found = scrape(daemon.url)
    check_identities(found)
    assert found["time_to_first_token_seconds_count"] == len(bodies)
    assert found["generation_tokens_total"] == usage(measured, "completion_tokens") == 8 * 20
    assert found["prompt_tokens_total"] == usage(measured, "prompt_tokens") == 8 * 3
    for name, seconds in (
        ("time_to_first_token_seconds", [one.first_token for one in measured]),
        ("inter_token_latency_seconds", [one.last_token - one.first_token for one in measured]),
        ("e2e_request_latency_seconds", [one.end for one in measured]),
    ):
        assert found[f"{name}_sum"] == pytest.approx(sum(seconds), rel=0.05)


def test_g03_no_counter_falls_under_load_and_every_series_stays() -> None:
    with running("--max-num-seqs", "4", "--kv-blocks", "40", step_seconds=0.002) as daemon:
        start = last = scrape(daemon.url)
        bodies = [{"prompt": [5, 6, 7 + number], "max_tokens": 150} for number in range(12)]
        load = threading.Thread(target=stream_all, args=(daemon.url, bodies))
        load.start()
        while load.is_alive():
            now = scrape(daemon.url)
            assert {name for name in now if "version=" not in name} == {
                name for name in start if "version=" not in name
            }
            for name, value in now.items():
                assert value >= 0, name
                assert not name.partition("{")[0].endswith(COUNTERS) or value >= last[name], name
            active = now["requests_running"] + now["requests_waiting"]
            finished = sum(value for name, value in now.items() if name.startswith("request_success_total"))
            assert now["request_started_total"] == active + finished
            last = now
        load.join()
        check_identities(last := scrape(daemon.url))
        assert last["generation_tokens_total"] == 12 * 150
        assert last["http_responses_total{code=200}"] > 12


def test_the_lag_of_the_event_loop_is_what_a_timer_is_late_by(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "LAG_INTERVAL_SECONDS", 0.01)
    lags: list[float] = []

    async def block_for_a_while() -> None:
        import time

        watch = asyncio.create_task(watch_event_loop(lags.append))
        await asyncio.sleep(0)
        time.sleep(0.3)
        while not lags:
            await asyncio.sleep(0)
        watch.cancel()

    asyncio.run(block_for_a_while())
    assert lags[0] >= 0.29
