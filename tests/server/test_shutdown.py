import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from support.daemon import gone, running
from support.scripted_engine import KILL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_lets_running_requests_finish_and_refuses_new_ones(number: signal.Signals) -> None:
    with running(step_seconds=0.01) as daemon:
        engine = daemon.engine()
        request = daemon.in_background([5, 6], 150)
        daemon.process.send_signal(number)
        while (health := httpx.get(f"{daemon.url}/health")).status_code == 200:
            assert request.is_alive()
        assert (health.status_code, health.json()["status"]) == (503, "draining")
        refused = daemon.request([7], 1)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert int(refused.headers["Retry-After"]) >= 1
        assert request.is_alive()
        response = request.result()
        assert daemon.wait() == 0
        assert response.json()["usage"]["completion_tokens"] == 150
        assert gone(engine)
        assert not any("Traceback" in line for line in daemon.log)


def test_an_engine_does_not_outlive_a_server_that_is_killed() -> None:
    with running(step_seconds=0.01) as daemon:
        engine = daemon.engine()
        daemon.in_background([5], 1900)
        daemon.process.kill()
        deadline = time.monotonic() + 20
        while not gone(engine):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_idle_connections_do_not_delay_the_end() -> None:
    with running() as daemon, httpx.Client() as client:
        assert client.get(f"{daemon.url}/health").status_code == 200
        daemon.process.terminate()
        assert daemon.wait() == 0


def test_requests_that_outlast_the_timeout_end_with_an_error() -> None:
    with running("--shutdown-timeout", "0.3", step_seconds=0.01) as daemon:
        engine = daemon.engine()
        whole = daemon.in_background([5], 1900)
        stream = daemon.in_background([6], 1900, stream=True)
        daemon.process.terminate()
        assert daemon.wait() == 0
        assert whole.result().status_code == 503
        events = [line for line in stream.result().text.splitlines() if line.startswith("data: {")]
        assert "error" in json.loads(events[-1].removeprefix("data: "))
        assert gone(engine)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_everything_at_once(number: signal.Signals) -> None:
    with running("--shutdown-timeout", "600", step_seconds=0.01) as daemon:
        engine = daemon.engine()
        request = daemon.in_background([5], 1900)
        daemon.process.send_signal(number)
        while not any("shutting down" in line for line in daemon.log):
            time.sleep(0.01)
        daemon.process.send_signal(number)
        assert daemon.wait() == 0
        assert gone(engine)
        assert request.result() is None or request.result().status_code == 503


def test_f2_a_request_that_kills_the_engine_fails_and_the_server_goes_on() -> None:
    with running(step_seconds=0.002) as daemon:
        other = daemon.in_background([5], 600)
        assert daemon.request([KILL], 1).status_code == 500
        assert other.result().json()["usage"]["completion_tokens"] == 600
        assert daemon.request([5], 3).status_code == 200
        assert daemon.process.poll() is None


def test_an_engine_that_dies_again_and_again_fails_live_requests_and_ends_the_server_with_70() -> None:
    faults = ("--enable-faults", "--fault", "engine-killed:step=30")
    with running(*faults, step_seconds=0.002) as daemon:
        whole = daemon.in_background([5], 1900)
        stream = daemon.in_background([6], 1900, stream=True)
        assert whole.result().status_code == 503
        events = [line for line in stream.result().text.splitlines() if line.startswith("data: {")]
        assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "engine_dead"
        assert daemon.wait() == 70
    assert any("the server ends" in line for line in daemon.log)


def test_a_signal_while_the_model_loads_ends_at_once(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    loading = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    program = f"""
import sys, uvloop
from octavo.server import lifecycle, listening
from octavo.server.flags import resolve
command = [sys.executable, "-c", {loading!r}]
with listening.bind("127.0.0.1", 0) as listener:
    sys.exit(uvloop.run(lifecycle.Daemon(resolve({{}}, {{}}), listener, command).run()))
"""
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        while not pid.exists() or not pid.read_text():
            time.sleep(0.01)
        process.terminate()
        assert process.wait(30) == 0
    assert gone(int(pid.read_text()))


def test_the_log_tells_what_was_loaded_and_who_asks_but_not_of_probes_and_scrapes() -> None:
    with running() as daemon:
        httpx.get(f"{daemon.url}/health")
        httpx.get(f"{daemon.url}/metrics")
        httpx.get(f"{daemon.url}/v1/models")
        daemon.process.terminate()
        daemon.wait()
    text = "".join(daemon.log)
    for expected in (
        "Scripted, 0 parameters",
        "cpu, bfloat16, kernels scripted",
        "1,024 blocks of 16 = 16,384 tokens",
        "8 of full length (2,048 tokens)",
        "batch-invariant  yes: nothing is computed",
        "serving on http://127.0.0.1:",
    ):
        assert expected in text
    [access] = [line for line in daemon.log if "GET" in line]
    assert "/v1/models" in access
