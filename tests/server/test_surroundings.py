"""What the machine does to a daemon: memory, disk, descriptors that run out; clocks that jump; ports that are taken."""

import ctypes
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from support import scripted_daemon
from support.checkpoints import tiny_model
from support.daemon import Daemon, running
from support.live import Live, answer, live_server, story_command
from support.story_engine import SLOW
from support.tools import free_port, need, tool

from octavo.scheduler.messages import EngineConfig
from octavo.server.revival import RestartPolicy

DAY = 24 * 3600


def address_space(pid: int) -> int:
    """Bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()


@contextmanager
def limited(pid: int, limit: int, value: int) -> Iterator[None]:
    _, most = resource.prlimit(pid, limit)
    before = resource.prlimit(pid, limit, (value, most))
    yield
    resource.prlimit(pid, limit, before)


def completed(daemon: Daemon, count: int = 5) -> bool:
    choice = daemon.request([5, 6, 7], count).json()["choices"][0]
    return choice["finish_reason"] == "length"


def test_f9_a_server_without_memory_for_a_request_refuses_that_one_alone() -> None:
    huge = b'{"model": "smollm2", "prompt": [[' + b"5," * 2_000_000 + b"5]]}"
    kind = {"content-type": "application/json"}
    with running() as daemon:
        assert completed(daemon)
        pid = daemon.process.pid
        with limited(pid, resource.RLIMIT_AS, address_space(pid) + (8 << 20)):
            for _ in range(4):
                refused = httpx.post(f"{daemon.url}/v1/completions", content=huge, headers=kind, timeout=60)
                assert (refused.status_code, refused.json()["error"]["code"]) == (500, "internal_error")
            assert completed(daemon)
        assert httpx.post(f"{daemon.url}/v1/completions", content=huge, headers=kind, timeout=60).status_code == 400
        assert completed(daemon)
        assert daemon.process.poll() is None


def test_f9_a_server_that_gets_no_memory_while_it_loads_serves_or_ends(tmp_path: Path) -> None:
    """It never waits for a thread that has died at its birth, for want of memory."""
    loaded = tmp_path / "loaded"
    with running("--load-until", str(loaded), until="listening on") as daemon:
        while httpx.get(f"{daemon.url}/health/startup").status_code != 503 or not daemon.engine():
            time.sleep(0.05)
        most = address_space(daemon.process.pid)
        resource.prlimit(daemon.process.pid, resource.RLIMIT_AS, (most, most))
        loaded.touch()
        end = time.monotonic() + 60
        while daemon.process.poll() is None and not ready(daemon.url):
            assert time.monotonic() < end, "it waits"
            time.sleep(0.05)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    directory = tmp_path_factory.mktemp("tiny")
    tiny_model(directory, "llama", vocabulary=49_152, max_context=256)
    with live_server(EngineConfig(model=str(directory), dtype="float32", max_num_seqs=8)) as live:
        yield live


def test_f9_steps_need_no_memory_that_was_not_planned(tiny: Live) -> None:
    """The engine cannot get another byte while it computes what it has computed before, and does not miss it."""
    asked = [{"prompt": [3 + number, 7], "max_tokens": 40, "seed": number, "logprobs": 2} for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        expected = list(pool.map(lambda request: answer(tiny, request, stream=False), asked))
        engine = tiny.service.client.ready.process
        with limited(engine, resource.RLIMIT_AS, address_space(engine)):
            assert list(pool.map(lambda request: answer(tiny, request, stream=True), asked)) == expected
        assert tiny.service.client.ready.process == engine


@pytest.mark.parametrize("death", [signal.SIGBUS, signal.SIGSEGV])
def test_f11_an_engine_that_loses_its_pages_is_replaced_and_its_requests_go_on(tmp_path: Path, death: int) -> None:
    """A mapped file that is cut off while it is read ends the process with SIGBUS."""
    asked = {"prompt": [SLOW, 8, 9], "max_tokens": 60}
    policy = RestartPolicy(deaths=5, delays=(0.05,))
    with live_server(command=story_command(tmp_path, {}), policy=policy) as live, ThreadPoolExecutor(1) as pool:
        expected = answer(live, asked, stream=False)
        going = pool.submit(answer, live, asked, stream=True)
        while not live.service.client.metrics.stats.running:
            time.sleep(0.01)
        os.kill(live.service.client.ready.process, death)
        assert going.result() == expected
        assert live.metric("octavo_engine_restarts_total") == 1


@contextmanager
def started(*arguments: str, environment: dict[str, str] | None = None) -> Iterator[Daemon]:
    """A daemon on a port that is known, whose log nobody can keep, and that cannot make any file longer."""
    port = free_port()
    command = [sys.executable, scripted_daemon.__file__, "--port", str(port), "--step-seconds", "0.01"]
    url = f"http://127.0.0.1:{port}"
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # noqa: E731
    with (
        Path("/dev/full").open("w") as full,
        subprocess.Popen(
            [*command, *arguments],
            stderr=full,
            env={**os.environ, **(environment or {})},
            preexec_fn=limit,  # noqa: PLW1509
        ) as process,
    ):
        try:
            while not ready(url):
                assert process.poll() is None
                time.sleep(0.05)
            yield Daemon(process, url)
        finally:
            process.kill()


def ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


def test_f12_a_full_disk_ends_neither_the_server_nor_a_request(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with started(environment={"TMPDIR": str(tmp_path / "file"), "XDG_CACHE_HOME": str(tmp_path / "file")}) as daemon:
        for _ in range(3):
            assert completed(daemon)
            httpx.get(f"{daemon.url}/nothing")
        user = [{"role": "user", "content": "a"}]
        chat = {"model": "smollm2", "messages": user, "max_tokens": 2}
        assert httpx.post(f"{daemon.url}/v1/chat/completions", json=chat, timeout=60).status_code == 200
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.wait() == 0


def unprivileged() -> None:
    """Without CAP_NET_BIND_SERVICE, whoever it is."""
    ctypes.CDLL(None).prctl(24, 10, 0, 0, 0)


def test_f14_a_port_that_one_may_not_listen_on_is_exit_code_73() -> None:
    need(int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text()) > 1, "a kernel with privileged ports")
    command = [sys.executable, "-m", "octavo.server.cli", "serve", "--port", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=unprivileged)
    assert done.returncode == 73
    assert done.stderr.startswith("octavo: error: cannot listen on 127.0.0.1 port 1: Permission denied; choose another")
    assert len(done.stderr.splitlines()) == 1


def test_f14_a_server_can_listen_on_ipv6_alone() -> None:
    need("::1" in hosts(), "IPv6")
    with running("--host", "::1") as daemon:
        assert daemon.url.startswith("http://[::1]:")
        assert completed(daemon)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", int(daemon.url.rpartition(":")[2])))


def hosts() -> set[str]:
    """Of the loopback device."""
    lines = Path("/proc/net/if_inet6").read_text().splitlines() if Path("/proc/net/if_inet6").exists() else []
    return {"::1" for line in lines if line.startswith("0" * 31 + "1")}


def test_f14_a_server_out_of_file_descriptors_recovers_when_clients_leave() -> None:
    with running() as daemon:
        host, port = daemon.url.removeprefix("http://").split(":")
        pid = daemon.process.pid
        used = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        with limited(pid, resource.RLIMIT_NOFILE, used + 4), ExitStack() as clients:
            for _ in range(40):
                clients.enter_context(socket.create_connection((host, int(port))))
            time.sleep(0.2)
            lines = len(daemon.log)
            time.sleep(0.5)
            assert len(daemon.log) - lines < 50, "it fills its log while it waits"
            assert daemon.process.poll() is None
        assert completed(daemon)
        assert daemon.process.poll() is None


def test_f15_a_clock_that_jumps_ends_no_request_and_no_metric_falls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offset, library = tmp_path / "offset", tmp_path / "clock.so"
    offset.write_text("0")
    source = Path(__file__).parent.parent / "support" / "jumping_clock.c"
    compiler = tool("gcc", "gcc")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source)], check=True)
    monkeypatch.setenv("LD_PRELOAD", str(library))
    monkeypatch.setenv("CLOCK_OFFSET", str(offset))
    limits = ("--request-timeout", "30", "--queue-timeout", "20", "--stall-timeout", "20")
    with running(*limits, step_seconds=0.01) as daemon:
        monkeypatch.undo()
        before = samples(daemon)
        for seconds in (DAY, -DAY, 3600, -3600, 0):
            streaming = daemon.in_background([5, 6, 7], 60, stream=True)
            offset.write_text(str(seconds))
            made = daemon.request([5], 1).json()["created"]
            assert abs(made - time.time() - seconds) < 600, "the clock did not jump"
            response = streaming.result()
            assert response is not None
            *_, last, end = [line for line in response.text.splitlines() if line.startswith("data: ")]
            assert end == "data: [DONE]"
            assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
            assert httpx.get(f"{daemon.url}/health").status_code == 200
            now = samples(daemon)
            assert min(now.values()) >= 0
            assert all(now[name] >= value for name, value in before.items() if name.partition("{")[0].endswith(COUNTED))
            before = now
        assert before['octavo_request_success_total{finished_reason="timeout"}'] == 0


COUNTED = ("_total", "_bucket", "_count", "_sum")


def samples(daemon: Daemon) -> dict[str, float]:
    lines = httpx.get(f"{daemon.url}/metrics").text.splitlines()
    pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}
