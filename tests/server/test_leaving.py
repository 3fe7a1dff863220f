"""Clients that leave, engines that die, queues that are full: nothing stays behind and everyone is told."""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import openai
import pytest
from support.live import Live, engine_pid, live_server, story_command
from support.raw import post
from support.story_engine import CRASH, SLOW

from octavo.scheduler.messages import EngineConfig
from octavo.server import stream
from octavo.server.revival import RestartPolicy

ABORTED = 'octavo_request_success_total{finished_reason="abort"}'


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def send_and_leave(live: Live, *, stream: bool, wait_for: bytes | None, behind: bytes = b"") -> None:
    """Send a request that would run long over a raw socket, and what comes behind it, and close it."""
    body = json.dumps({"model": "smollm2", "prompt": [SLOW, 5], "max_tokens": 1500, "stream": stream}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    host, port = live.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + body + behind)
        received = b""
        while wait_for is not None and wait_for not in received:
            received += connection.recv(65536)


def idle(live: Live) -> bool:
    return (
        live.metric("octavo_requests_running") == 0
        and live.metric("octavo_requests_waiting") == 0
        and live.metric('octavo_kv_blocks{state="used"}') == 0
        and live.service.client.live == 0
    )


def test_d01_a_client_that_leaves_a_stream_ends_its_request(live: Live) -> None:
    before = live.metric(ABORTED)
    send_and_leave(live, stream=True, wait_for=b"data: ")
    eventually(lambda: live.metric(ABORTED) == before + 1)
    eventually(lambda: idle(live))


def test_d01_a_client_that_leaves_while_it_waits_ends_its_request(live: Live) -> None:
    before = live.metric(ABORTED)
    started = live.metric("octavo_request_started_total")
    thread = threading.Thread(target=send_and_leave, args=(live,), kwargs={"stream": False, "wait_for": None})
    thread.start()
    thread.join()
    eventually(lambda: live.metric("octavo_request_started_total") == started + 1)
    eventually(lambda: live.metric(ABORTED) == before + 1)
    eventually(lambda: idle(live))


@pytest.mark.parametrize("stream", [False, True])
def test_d01_a_client_that_leaves_with_a_second_request_behind_the_first_ends_the_first(
    live: Live, caplog: pytest.LogCaptureFixture, *, stream: bool
) -> None:
    before = live.metric(ABORTED)
    started = live.metric("octavo_request_started_total")
    behind = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
    send_and_leave(live, stream=stream, wait_for=b"data: " if stream else None, behind=behind)
    eventually(lambda: live.metric("octavo_request_started_total") == started + 1)
    eventually(lambda: live.metric(ABORTED) == before + 1)
    eventually(lambda: idle(live))
    assert not caplog.records


def test_d01_a_request_that_still_queues_is_aborted_too(live: Live) -> None:
    before = live.metric(ABORTED)
    started = live.metric("octavo_request_started_total")
    leavers = [
        threading.Thread(target=send_and_leave, args=(live,), kwargs={"stream": True, "wait_for": b"HTTP"})
        for _ in range(20)
    ]
    for leaver in leavers:
        leaver.start()
    for leaver in leavers:
        leaver.join()
    eventually(lambda: live.metric("octavo_request_started_total") == started + 20)
    eventually(lambda: live.metric(ABORTED) == before + 20)
    eventually(lambda: idle(live))


def test_d01_a_client_that_leaves_within_its_body_is_no_fault_of_the_server(
    live: Live, caplog: pytest.LogCaptureFixture
) -> None:
    left, failed = (f'octavo_http_responses_total{{code="{code}"}}' for code in (499, 500))
    before = live.metric(left), live.metric(failed)
    host, port = live.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(post("/v1/completions", {"prompt": "a" * 1000})[:-500])
    eventually(lambda: live.metric(left) == before[0] + 1)
    assert live.metric(failed) == before[1]
    assert not caplog.records


def test_every_started_request_is_accounted_for(live: Live) -> None:
    eventually(lambda: idle(live))
    started = live.metric("octavo_request_started_total")
    reasons = ("stop", "length", "abort", "error", "timeout")
    finished = sum(live.metric(f'octavo_request_success_total{{finished_reason="{reason}"}}') for reason in reasons)
    assert started == finished > 0


def test_a_full_queue_is_refused_with_a_retry_hint(tmp_path: Path) -> None:
    command = story_command(tmp_path, {})
    with live_server(EngineConfig(model="smollm2", max_num_seqs=2), command=command, max_queued_requests=3) as live:
        refused = live.post("/v1/completions", prompt=[5], n=6)
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert refused.json()["error"]["code"] == "queue_full"
        assert len(live.completion(prompt=[5], n=5, max_tokens=2)["choices"]) == 5


def test_a_queue_full_of_tokens_is_refused_with_a_retry_hint(tmp_path: Path) -> None:
    config = EngineConfig(model="smollm2", max_num_seqs=1)
    with live_server(config, command=story_command(tmp_path, {}), max_queued_tokens=100) as live:
        assert live.completion(prompt=[5] * 200, max_tokens=1), "nothing else waits"

        def occupy(prompt: list[int]) -> AbstractContextManager[httpx.Response]:
            body = {"model": "smollm2", "prompt": prompt, "max_tokens": 1800, "stream": True}
            return httpx.stream("POST", f"{live.url}/v1/completions", json=body, timeout=60)

        with occupy([SLOW]):
            eventually(lambda: live.metric("octavo_queued_tokens") == 0)
            with occupy([SLOW] * 60):
                assert live.metric("octavo_queued_tokens") == 60
                refused = live.post("/v1/completions", prompt=[5] * 41)
                assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
                assert refused.headers["retry-after"] == "1"
                assert live.metric('octavo_admission_rejections_total{reason="queue_tokens"}') == 1
                with occupy([5] * 40):
                    assert live.metric("octavo_queued_tokens") == 100
        eventually(lambda: idle(live))
        assert live.metric("octavo_queued_tokens") == 0


def test_b18_a_request_that_breaks_the_device_ends_with_an_error_event_and_others_go_on(tmp_path: Path) -> None:
    with live_server(command=story_command(tmp_path, {})) as live:
        engine = engine_pid(live.service.client)
        undisturbed = live.completion(prompt=[SLOW], max_tokens=60)["choices"][0]["text"]
        client = openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)
        text = ""
        with client:
            stream = client.completions.create(model="smollm2", prompt=[SLOW], max_tokens=60, stream=True)
            for number, chunk in enumerate(stream):
                text += chunk.choices[0].text
                if number == 1:
                    refused = live.post("/v1/completions", prompt=[CRASH])
                    assert (refused.status_code, refused.json()["error"]["code"]) == (500, "internal_error")
                    assert "secret" not in refused.text
                    assert "0x" not in refused.text
                    with pytest.raises(openai.APIError, match="internal error"):
                        list(client.completions.create(model="smollm2", prompt=[CRASH], stream=True))
        assert text == undisturbed
        assert engine_pid(live.service.client) == engine
        assert live.metric("octavo_failed_steps_total") >= 4


def test_b17_a_stream_that_waits_is_kept_alive_by_comments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "KEEP_ALIVE_SECONDS", 0.1)
    config = EngineConfig(model="smollm2", max_num_seqs=1)
    with live_server(config, command=story_command(tmp_path, {})) as live:
        body = {"model": "smollm2", "prompt": [SLOW], "max_tokens": 1000, "stream": True}
        with httpx.stream("POST", f"{live.url}/v1/completions", json=body, timeout=60) as running:
            arriving = running.iter_bytes()
            next(arriving)
            waits = {**body, "prompt": [5], "max_tokens": 2}
            with httpx.stream("POST", f"{live.url}/v1/completions", json=waits, timeout=60) as waiting:
                assert waiting.headers["cache-control"] == "no-cache"
                assert waiting.headers["x-accel-buffering"] == "no"
                lines = waiting.iter_lines()
                assert [next(lines), next(lines)] == [": keep-alive", ""]
                running.close()
                rest = [line for line in lines if line and not line.startswith(":")]
                assert rest[-1] == "data: [DONE]"
                assert all(line.startswith("data: ") for line in rest)


def test_b18_a_stream_ends_with_an_error_event_when_the_engine_dies_for_good(tmp_path: Path) -> None:
    with live_server(command=story_command(tmp_path, {}), policy=RestartPolicy(deaths=1)) as live:
        client = openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)

        def read_until_the_end() -> None:
            stream = client.completions.create(model="smollm2", prompt=[SLOW], max_tokens=1000, stream=True)
            for number, chunk in enumerate(stream):
                assert chunk.choices[0].finish_reason is None
                if number == 1:
                    os.kill(engine_pid(live.service.client), signal.SIGKILL)

        with client, pytest.raises(openai.APIError, match="engine"):
            read_until_the_end()
        assert httpx.get(f"{live.url}/health").status_code == 503
        refused = live.post("/v1/completions", prompt="a")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_dead")
        assert refused.headers["retry-after"]


def test_b18_a_killed_engine_is_noticed_and_replaced(tmp_path: Path) -> None:
    with live_server(command=story_command(tmp_path, {}), policy=RestartPolicy(delays=(0.5,))) as live:
        assert httpx.get(f"{live.url}/health").status_code == 200
        os.kill(engine_pid(live.service.client), signal.SIGKILL)
        eventually(lambda: httpx.get(f"{live.url}/health").status_code == 503)
        assert httpx.get(f"{live.url}/health/ready").json() == {"status": "engine restarting"}
        assert httpx.get(f"{live.url}/health/live").status_code == 200
        assert len(live.completion(prompt=[5], max_tokens=2)["choices"]) == 1
        assert httpx.get(f"{live.url}/health/ready").status_code == 200
        assert live.metric("octavo_engine_restarts_total") == 1
