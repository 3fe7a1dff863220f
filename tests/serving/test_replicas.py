"""Two servers behind vllm-router: a prefix finds its replica, and neither a crash nor a restart costs a request.

`pytest -m replicas`, with the program vllm-router on the path or named by VLLM_ROUTER. Its wheel is best kept in a
virtual environment of its own. docs/operations.md has the figures.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from support.daemon import Daemon, running
from support.tools import free_port

from octavo.server.bench.client import Address, Client, Record
from octavo.server.bench.load import Load
from octavo.server.bench.workload import Call, Shape, Span

ROUTER = os.environ.get("VLLM_ROUTER") or shutil.which("vllm-router")
pytestmark = [
    pytest.mark.replicas,
    pytest.mark.skipif(ROUTER is None, reason="vllm-router is not installed; it is optional"),
]
REPLICA = ("--max-num-seqs", "16", "--max-num-batched-tokens", "512", "--kv-blocks", "4096")


@contextlib.contextmanager
def router(log: Path, *replicas: Daemon) -> Iterator[str]:
    """The URL of a router in front of the replicas."""
    port = free_port()
    command = [ROUTER, "--port", str(port), "--policy", "cache_aware", "--prometheus-port", str(free_port())]
    command += [
        "--health-check-interval-secs",
        "1",
        "--health-failure-threshold",
        "1",
        "--health-success-threshold",
        "1",
    ]
    command += ["--balance-abs-threshold", "2", "--balance-rel-threshold", "1.1", "--retry-initial-backoff-ms", "20"]
    command += ["--worker-urls", *(replica.url for replica in replicas)]
    with log.open("w") as file, subprocess.Popen(command, stdout=file, stderr=file) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            deadline = time.monotonic() + 60
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if httpx.get(f"{url}/health").status_code == 200:
                        break
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
            yield url
        finally:
            process.kill()


def load(url: str, calls: list[Call], concurrency: int) -> list[Record]:
    """Send chats, so many at a time; return what became of each."""
    fields = {"model": "smollm2", "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    client = Client(Address.parse(url), "/v1/chat/completions", None, 60.0)
    outcome = asyncio.run(Load(client, fields, True, concurrency).run(calls, lambda _done, _all: None))
    return outcome.records


def started(replica: Daemon) -> float:
    lines = httpx.get(f"{replica.url}/metrics").text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith("octavo_request_started_total"))


def test_repeats_of_a_prefix_reach_the_replica_that_has_it(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    with running(*REPLICA, step_seconds=0.005) as first, running(*REPLICA, step_seconds=0.005) as second:
        with router(tmp_path / "router.log", first, second) as url:
            prefixes = [Shape(Span(400, 400), seed=seed).calls(1)[0].prompt for seed in range(16)]
            calls = [Call(0.0, f"{prefix} question {i}", 8) for i in range(8) for prefix in prefixes]
            records = load(url, calls, 8)
        assert not [record.error for record in records if record.error]
        repeats = records[len(prefixes) :]
        found = [record.cached_tokens > 0.9 * (record.prompt_tokens or 0) for record in repeats]
        spread = started(first), started(second)
        record_property("affinity", sum(found) / len(found))
        record_property("requests of each replica", spread)
        assert sum(found) >= 0.9 * len(found)
        assert min(spread) >= 0.2 * sum(spread)


def disturbed(url: str, disturb: Callable[[], None]) -> list[Record]:
    """Eight streams at a time while something happens to the replicas behind the router, and some more after it."""
    thread = threading.Thread(target=disturb)
    thread.start()
    records: list[Record] = []
    while not records or thread.is_alive():
        records += load(url, Shape(Span(50, 50), Span(40, 40), seed=len(records)).calls(24), 8)
    return records + load(url, Shape(Span(50, 50), Span(40, 40), seed=len(records)).calls(24), 8)


def until_busy(replica: Daemon) -> None:
    """Wait for a request to run there."""
    deadline = time.monotonic() + 60
    while replica.running() < 1:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_killing_a_replica_costs_no_request_that_has_not_begun_to_stream(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    with running(*REPLICA, step_seconds=0.01) as first, running(*REPLICA, step_seconds=0.01) as second:

        def kill() -> None:
            until_busy(second)
            second.process.kill()

        with router(tmp_path / "router.log", first, second) as url:
            records = disturbed(url, kill)
        assert second.process.wait(10) == -signal.SIGKILL
    failed = [record for record in records if record.error]
    record_property("requests", len(records))
    record_property("cut while they streamed", len(failed))
    assert all(record.arrivals for record in failed)
    assert len(failed) <= 8


def test_a_rolling_restart_costs_no_request(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    port = free_port()
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(running(*REPLICA, step_seconds=0.01))
        second = stack.enter_context(running(*REPLICA, "--port", str(port), step_seconds=0.01))
        url = stack.enter_context(router(tmp_path / "router.log", first, second))
        ends: list[int] = []

        def restart() -> None:
            until_busy(second)
            second.process.terminate()
            ends.append(second.process.wait(60))
            again = stack.enter_context(running(*REPLICA, "--port", str(port), step_seconds=0.01))
            until_busy(again)
            first.process.terminate()
            ends.append(first.process.wait(60))

        records = disturbed(url, restart)
    record_property("requests", len(records))
    assert ends == [0, 0]
    assert [(record.error, record.detail) for record in records if record.error] == []
