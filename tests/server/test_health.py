import os
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest
from support.daemon import running
from support.live import Live, engine_pid, live_server, story_command
from support.story_engine import SLOW


@pytest.fixture
def own(tmp_path: Path) -> Live:
    with live_server(command=story_command(tmp_path, {})) as live:
        yield live


def probe(url: str, name: str = "/health/ready") -> tuple[int, str]:
    response = httpx.get(url + name)
    return response.status_code, response.json()["status"]


def eventually(url: str, expected: tuple[int, str]) -> None:
    deadline = time.monotonic() + 30
    while (found := probe(url)) != expected:
        assert time.monotonic() < deadline, found
        time.sleep(0.01)


def test_while_the_model_loads_the_probes_answer_and_everything_else_is_503(tmp_path: Path) -> None:
    loaded = tmp_path / "loaded"
    with running("--load-until", str(loaded), until="listening on") as daemon, httpx.Client() as client:
        while (state := client.get(f"{daemon.url}/health/startup")).json()["progress"] == 0:
            assert state.json() == {"status": "loading", "phase": "starting the engine", "progress": 0}
        assert state.status_code == 503
        assert state.json() == {"status": "loading", "phase": "loading weights", "progress": 0.5}
        assert probe(daemon.url, "/health/live") == (200, "ok")
        assert probe(daemon.url, "/health/ready") == probe(daemon.url, "/health") == (503, "loading")
        for method, path in (
            ("POST", "/v1/completions"),
            ("GET", "/v1/models"),
            ("GET", "/openapi.json"),
            ("PUT", "/"),
        ):
            refused = client.request(method, daemon.url + path)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "loading")
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.headers["x-request-id"]
        overloaded = client.post(f"{daemon.url}/v1/messages", json={})
        assert (overloaded.status_code, overloaded.json()["error"]["type"]) == (529, "overloaded_error")
        assert "octavo_engine_up 0.0" in client.get(f"{daemon.url}/metrics").text
        loaded.touch()
        eventually(daemon.url, (200, "ok"))
        assert client.get(f"{daemon.url}/health/startup").json() == {"status": "ok"}
        assert client.get(f"{daemon.url}/v1/models").status_code == 200


def test_keys_are_asked_for_while_the_model_loads(tmp_path: Path) -> None:
    arguments = ("--api-key", "sk-correct-horse", "--load-until", str(tmp_path / "loaded"))
    with running(*arguments, until="listening on") as daemon:
        assert httpx.get(f"{daemon.url}/health/live").status_code == 200
        for path, status in (("/metrics", 200), ("/v1/models", 503)):
            assert httpx.get(daemon.url + path).status_code == 401
            key = {"Authorization": "Bearer sk-correct-horse"}
            assert httpx.get(daemon.url + path, headers=key).status_code == status


def test_d12_an_engine_that_is_stuck_is_not_ready_but_the_server_lives(own: Live) -> None:
    own.service.stall_seconds = 0.2
    engine = engine_pid(own.service.client)
    assert probe(own.url) == (200, "ok")
    os.kill(engine, signal.SIGSTOP)
    request = threading.Thread(target=own.completion, kwargs={"prompt": [5], "max_tokens": 3})
    try:
        request.start()
        eventually(own.url, (503, "stalled"))
        assert own.metric("octavo_engine_heartbeat_age_seconds") > 0.2
        assert probe(own.url, "/health/live") == probe(own.url, "/health/startup") == (200, "ok")
    finally:
        os.kill(engine, signal.SIGCONT)
    request.join(30)
    eventually(own.url, (200, "ok"))
    assert own.metric("octavo_engine_heartbeat_age_seconds") == 0


def test_d12_a_server_is_ready_while_it_is_saturated_and_while_it_is_idle(own: Live) -> None:
    """The limit is far above a step's time and far below the time that all of it takes."""
    own.service.stall_seconds = 1.0
    requests = [
        threading.Thread(target=own.completion, kwargs={"prompt": [SLOW, 5], "max_tokens": 60, "n": 4})
        for _ in range(12)
    ]
    for request in requests:
        request.start()
    probes = 0
    while any(request.is_alive() for request in requests):
        assert probe(own.url) == (200, "ok")
        probes += 1
    assert probes > 10
    time.sleep(1.1)
    assert probe(own.url) == (200, "ok")


def test_probes_answer_head_without_a_body(live: Live) -> None:
    for path in ("/health", "/health/live", "/health/ready", "/health/startup"):
        response = httpx.head(live.url + path)
        assert (response.status_code, response.content) == (200, b"")
    live.service.draining = True
    try:
        assert httpx.head(f"{live.url}/health/ready").status_code == 503
        assert httpx.head(f"{live.url}/health/live").status_code == 200
    finally:
        live.service.draining = False
