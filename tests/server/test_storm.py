"""F6, F13, F17: clients that leave at any moment, a server that is told to end under load, and ten times the load."""

import asyncio
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from support.daemon import running
from support.live import Live, live_server, story_command
from support.story_engine import SLOW

from octavo.scheduler.messages import EngineConfig


def eventually(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def tasks_of(live: Live) -> int:
    async def count() -> int:
        return len(asyncio.all_tasks()) - 1

    return asyncio.run_coroutine_threadsafe(count(), live.loop).result(10)


def resources(live: Live) -> tuple[int, int, float, int]:
    """What a request may leave behind: file descriptors, tasks, blocks, requests."""
    used = live.metric('octavo_kv_blocks{state="used"}')
    return len(os.listdir("/proc/self/fd")), tasks_of(live), used, live.service.client.live  # noqa: PTH208


async def leave(live: Live, rng: random.Random) -> None:
    """Begin a request and leave it at a random point: in its head, its body, the queue, the prompt or the stream."""
    host, port = live.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    fields = {"prompt": [SLOW] * rng.randrange(1, 100), "max_tokens": 500, "n": rng.choice([1, 1, 2])}
    body = json.dumps({"model": "smollm2", "stream": rng.random() < 0.7, **fields}).encode()
    lines = (
        "POST /v1/completions HTTP/1.1",
        "Host: a",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    )
    sent = "".join(line + "\r\n" for line in (*lines, "")).encode() + body
    try:
        writer.write(sent[: rng.randrange(len(sent))] if rng.random() < 0.3 else sent)
        await writer.drain()
        await asyncio.sleep(rng.random() * 0.3)
        if rng.random() < 0.5:
            async with asyncio.timeout(rng.random()):
                await reader.read(rng.randrange(1, 2000))
    except (TimeoutError, ConnectionError):
        pass
    finally:
        if rng.random() < 0.5:
            writer.transport.abort()
        else:
            writer.close()


async def storm(live: Live, clients: int, at_once: int) -> None:
    rng, gate = random.Random(3), asyncio.Semaphore(at_once)

    async def one() -> None:
        async with gate:
            await leave(live, rng)

    await asyncio.gather(*(one() for _ in range(clients)))
    await asyncio.sleep(0.1)


def survive_a_storm(directory: Path, clients: int) -> None:
    with live_server(EngineConfig(model="smollm2", max_num_seqs=16), command=story_command(directory, {})) as live:
        asyncio.run(storm(live, 20, 20))
        eventually(lambda: live.service.client.live == 0)
        httpx.get(f"{live.url}/version")
        time.sleep(0.2)
        base = resources(live)
        asyncio.run(storm(live, clients, 100))
        eventually(lambda: all(now <= before for now, before in zip(resources(live), base, strict=True)))
        assert live.completion(prompt=[5], max_tokens=3)["usage"]["completion_tokens"] == 3


def test_f6_a_hundred_and_fifty_clients_that_leave_at_random_points_leave_nothing_behind(tmp_path: Path) -> None:
    survive_a_storm(tmp_path, 150)


@pytest.mark.endurance
def test_f6_two_thousand_clients_that_leave_at_random_points_leave_nothing_behind(tmp_path: Path) -> None:
    survive_a_storm(tmp_path, 2000)


def test_f13_sigterm_under_load_truncates_no_stream() -> None:
    with running(step_seconds=0.005) as daemon, ThreadPoolExecutor(24) as pool:
        answers = [pool.submit(daemon.request, [5, number], 150, stream=True) for number in range(24)]
        eventually(lambda: daemon.running() > 0)
        eventually(lambda: "octavo_request_started_total 24.0" in httpx.get(f"{daemon.url}/metrics").text)
        daemon.process.send_signal(signal.SIGTERM)
        for answer in answers:
            *_, last, end = [line for line in answer.result().text.splitlines() if line.startswith("data: ")]
            assert end == "data: [DONE]"
            assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert daemon.wait() == 0


def test_f17_ten_times_the_capacity_is_refused_at_once_and_the_rest_is_served(tmp_path: Path) -> None:
    config = EngineConfig(model="smollm2", max_num_seqs=4)
    with live_server(config, command=story_command(tmp_path, {}), max_queued_requests=4) as live:
        statuses: list[int] = []
        lock = threading.Lock()

        def ask() -> None:
            with httpx.Client(timeout=60) as client:
                body = {"model": "smollm2", "prompt": [SLOW], "max_tokens": 60}
                for _ in range(3):
                    status = client.post(f"{live.url}/v1/completions", json=body).status_code
                    with lock:
                        statuses.append(status)

        clients = [threading.Thread(target=ask) for _ in range(80)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        assert set(statuses) == {200, 429}
        assert statuses.count(200) >= 8
        rejected = live.metric('octavo_admission_rejections_total{reason="queue_full"}')
        assert (statuses.count(429), len(statuses)) == (rejected, 240)
        assert live.completion(prompt=[5], max_tokens=3)["usage"]["completion_tokens"] == 3
        assert live.metric("octavo_requests_running") == live.metric("octavo_requests_waiting") == 0
