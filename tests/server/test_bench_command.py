"""`octavo bench` against servers: the daemon around the scripted engine, and one that counts and misbehaves."""

import asyncio
import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from support.daemon import Daemon, running

from octavo.server.cli import main

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running("--max-num-seqs", "8", "--max-num-batched-tokens", "128", step_seconds=0.002) as started:
        yield started


@contextlib.contextmanager
def server(handler: Handler) -> Iterator[str]:
    """A server in a thread that answers each connection with what a test wants."""
    urls: queue.Queue[str] = queue.Queue()
    stop = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handler(reader, writer)
        finally:
            writer.close()

    async def serve() -> None:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as listening:
            urls.put(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
            await stop.wait()

    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        thread = threading.Thread(target=runner.run, args=(serve(),))
        thread.start()
        try:
            yield urls.get(timeout=10)
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join(10)


async def request_of(reader: asyncio.StreamReader) -> dict[str, object]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    return json.loads(await reader.readexactly(length))


def metric(daemon: Daemon, name: str) -> float:
    lines = httpx.get(f"{daemon.url}/metrics").text.splitlines()
    [value] = [float(line.split()[-1]) for line in lines if line.startswith(name + " ")]
    return value


def measured(capsys: Capture, folder: Path, *arguments: str) -> tuple[int, dict, list[dict]]:
    """Exit code, figures and events of a run, after checking that the report is on standard output."""
    code = main(["bench", *arguments, "--json", str(folder / "out.json"), "--events", str(folder / "events.jsonl")])
    facts = json.loads((folder / "out.json").read_text())
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert f"{facts['succeeded']} succeeded, {facts['failed']} failed" in capsys.readouterr().out
    return code, facts, events


@pytest.mark.parametrize("load", [["--concurrency", "6"], ["--rate", "300"]])
def test_counts_are_those_of_the_server_and_percentiles_those_of_numpy(
    load: list[str], daemon: Daemon, capsys: Capture, tmp_path: Path
) -> None:
    names = ("octavo_request_started_total", "octavo_generation_tokens_total", "octavo_prompt_tokens_total")
    before = [metric(daemon, name) for name in names]
    shape = ["--prompt-tokens", "20-40", "--output-tokens", "5-25", "--token-ids", "5-900", "--seed", str(len(load[0]))]
    code, facts, events = measured(capsys, tmp_path, daemon.url, *load, *shape, "--requests", "30", "--warm-up", "2")
    assert (code, facts["succeeded"], facts["failed"]) == (0, 30, 0)
    started, generated, prompts = (metric(daemon, name) - old for name, old in zip(names, before, strict=True))
    assert started == 32
    warmed = generated - facts["output_tokens"], prompts - facts["prompt_tokens"]
    assert 2 * 5 <= warmed[0] <= 2 * 25
    assert 2 * 20 <= warmed[1] <= 2 * 40
    assert facts["output_tokens"] == sum(event["asked_tokens"] for event in events)
    good = {"first_token": [], "between_chunks": [], "whole_request": []}
    for event in events:
        arrivals = np.array(event["arrivals"])
        good["first_token"].append(arrivals[0] - event["sent"])
        good["between_chunks"].extend(np.diff(arrivals))
        good["whole_request"].append(event["ended"] - event["sent"])
        assert event["due"] <= event["sent"] <= event["connected"] <= arrivals[0]
        assert arrivals[-1] <= event["ended"] <= facts["seconds"]
    for name, seconds in good.items():
        for q in (50, 90, 95, 99):
            assert facts["latency_ms"][name][f"p{q}"] == pytest.approx(1000 * np.percentile(seconds, q))
    tokens_after_the_first_chunks = facts["latency_ms"]["inter_token"]["count"]
    assert len(good["between_chunks"]) <= tokens_after_the_first_chunks <= facts["output_tokens"] - 30


def test_a_chat_with_a_shared_prefix_finds_it_in_the_cache(daemon: Daemon, capsys: Capture, tmp_path: Path) -> None:
    options = ["--chat", "--prompt-tokens", "80", "--shared-prefix", "64", "--output-tokens", "4", "--requests", "5"]
    code, facts, _ = measured(capsys, tmp_path, daemon.url, *options)
    assert (code, facts["succeeded"]) == (0, 5)
    assert facts["cached_tokens"] >= 4 * 64
    ids = ["--token-ids", "5-900", *options[1:]]
    code, facts, _ = measured(capsys, tmp_path, daemon.url, *ids)
    assert code == 0
    assert facts["cached_tokens"] == 4 * 64


def test_a_closed_loop_never_has_more_under_way_than_it_may(capsys: Capture, tmp_path: Path) -> None:
    state = {"now": 0, "most": 0}

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = await request_of(reader)
        state["now"] += 1
        state["most"] = max(state["most"], state["now"])
        await asyncio.sleep(0.02)
        state["now"] -= 1
        answer = {"choices": [{"text": "a b", "finish_reason": "length"}], "echo": body["max_tokens"]}
        writer.write(HEAD + b"data: " + json.dumps(answer).encode() + b"\n\ndata: [DONE]\n\n")

    with server(handler) as url:
        options = ["--model", "m", "--concurrency", "3", "--requests", "20", "--output-tokens", "1"]
        code, facts, _ = measured(capsys, tmp_path, url, *options)
    assert (code, state["most"], facts["output_tokens"]) == (0, 3, 20)
    assert facts["latency_ms"]["inter_token"] is None
    assert any("without usage" in remark for remark in facts["remarks"])


def test_an_open_loop_sends_on_time_whatever_the_server_does(capsys: Capture, tmp_path: Path) -> None:
    sent: list[str] = []
    everything = threading.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = await request_of(reader)
        sent.append(body["prompt"])
        if len(sent) == 4:
            everything.set()
        while not everything.is_set():  # none is answered before all have come
            await asyncio.sleep(0.005)
        writer.write(HEAD + b'data: {"choices": [{"text": "a", "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n')
        writer.close()

    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps({"timestamp": i / 50, "prompt": f"p{i}"}) + "\n" for i in range(4)))
    with server(handler) as url:
        code, facts, events = measured(capsys, tmp_path, url, "--model", "m", "--trace", str(trace))
    assert (code, sent) == (0, ["p0", "p1", "p2", "p3"])
    assert [event["due"] for event in events] == [0.0, 0.02, 0.04, 0.06]
    assert facts["latest_start_ms"] == pytest.approx(1000 * max(e["sent"] - e["due"] for e in events))


def test_every_fault_is_counted_by_its_kind_and_ends_with_exit_code_1(capsys: Capture, tmp_path: Path) -> None:
    turn = iter(range(100))

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        kind = next(turn) % 4
        if kind == 0:
            writer.write(b'HTTP/1.1 429 No\r\nContent-Length: 44\r\n\r\n{"error": {"code": "full", "message": "no"}}')
        elif kind == 1:
            writer.write(HEAD + b'data: {"choices": [{"text": "a"}]}\n\n')
        elif kind == 2:
            await asyncio.sleep(30)
        else:
            writer.write(HEAD + b'data: {"choices": [{"text": "a", "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n')

    with server(handler) as url:
        options = ["--model", "m", "--requests", "8", "--timeout", "0.5", "--slo-ttft", "60000"]
        code, facts, events = measured(capsys, tmp_path, url, *options)
    assert (code, facts["succeeded"], facts["failed"], len(events)) == (1, 2, 6, 8)
    counted = {fault["error"]: fault["requests"] for fault in facts["errors"]}
    assert counted == {"HTTP 429 full": 2, "the stream ended early": 2, "not finished within 0.5 s": 2}
    assert facts["goodput"]["requests"] == 2


def test_files_of_the_report_and_a_picture_of_the_distributions(
    daemon: Daemon, capsys: Capture, tmp_path: Path
) -> None:
    image = pytest.importorskip("matplotlib.image")
    options = ["--requests", "6", "--token-ids", "5-900", "--prompt-tokens", "9", "--output-tokens", "9"]
    picture, document = tmp_path / "a.png", tmp_path / "a.md"
    assert main(["bench", daemon.url, *options, "--plot", str(picture), "--markdown", str(document)]) == 0
    assert "6 succeeded" in capsys.readouterr().out
    assert "| first token | " in document.read_text()
    pixels = image.imread(picture)
    assert pixels.shape[:2] == (840, 1440)
    assert len(np.unique(pixels.reshape(-1, pixels.shape[2]), axis=0)) > 10


def test_without_matplotlib_a_plot_is_refused_before_anything_is_sent(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    assert main(["bench", "http://127.0.0.1:1", "--plot", "a.png"]) == 64
    assert capsys.readouterr().err == "octavo: error: --plot needs matplotlib: pip install matplotlib\n"


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (["nowhere"], 64, "'nowhere'"),
        (["http://127.0.0.1:1"], 69, "127.0.0.1 port 1 cannot be reached"),
        (["--rate", "0"], 64, "--rate"),
        (["--rate", "2", "--concurrency", "2"], 64, "--concurrency and --rate"),
        (["--chat", "--token-ids", "1-2"], 64, "--token-ids"),
        (["--prompt-tokens", "9-3"], 64, "--prompt-tokens: '9-3'"),
        (["--extra-body", "[]"], 64, "--extra-body"),
        (["--trace", "/no/such/file"], 64, "/no/such/file"),
        (["--requests", "0"], 64, "--requests"),
    ],
)
def test_a_wrong_option_is_one_line_with_its_exit_code(
    arguments: list[str], code: int, named: str, capsys: Capture
) -> None:
    try:
        ended = main(["bench", *arguments])
    except SystemExit as end:
        ended = end.code
    error = capsys.readouterr().err
    assert (ended, error.count("\n")) == (code, 1)
    assert named in error


def test_a_server_that_refuses_is_not_measured(daemon: Daemon, capsys: Capture) -> None:
    assert main(["bench", f"{daemon.url}/elsewhere"]) == 69
    assert "/v1/models answers 404" in capsys.readouterr().err
    assert main(["bench", daemon.url, "--model", "other", "--warm-up", "1"]) == 1
    assert "model_not_found" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reports_what_was_measured_so_far(number: signal.Signals, daemon: Daemon) -> None:
    started = metric(daemon, "octavo_request_started_total")
    options = ["--requests", "100000", "--token-ids", "5-900", "--prompt-tokens", "9", "--output-tokens", "20"]
    command = [sys.executable, "-m", "octavo.server.cli", "bench", daemon.url, *options]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    ) as process:
        while metric(daemon, "octavo_request_started_total") < started + 3:
            time.sleep(0.01)
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "0 failed" in output
    sent = int(output.split()[0])
    assert 3 <= sent < 100000
    assert metric(daemon, "octavo_request_started_total") == started + sent


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_what_is_under_way_with_one_line(number: signal.Signals) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        command = [sys.executable, "-m", "octavo.server.cli", "bench", url, "--model", "m"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            connection, _ = silent.accept()
            while process.poll() is None:  # twice: the first is heard long before the second comes
                process.send_signal(number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=1)
            output, error = process.communicate()
            connection.close()
    assert (process.returncode, output, error) == (130, "", "octavo: interrupted\n")


def test_a_signal_before_the_first_request_is_answered_with_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        command = [sys.executable, "-m", "octavo.server.cli", "bench", url]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            connection, _ = silent.accept()  # for the names of models
            process.send_signal(signal.SIGTERM)
            output, error = process.communicate(timeout=60)
            connection.close()
    assert (process.returncode, output, error) == (130, "", "octavo: interrupted\n")


def test_a_signal_while_the_server_is_warmed_up_ends_the_command(daemon: Daemon) -> None:
    started = metric(daemon, "octavo_request_started_total")
    options = ["--warm-up", "100000", "--token-ids", "5-900", "--prompt-tokens", "9", "--output-tokens", "20"]
    command = [sys.executable, "-m", "octavo.server.cli", "bench", daemon.url, *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while metric(daemon, "octavo_request_started_total") < started + 3:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        output, error = process.communicate(timeout=60)
    assert (process.returncode, output) == (130, "")
    assert error.endswith("octavo: interrupted\n")
    assert "Traceback" not in error


def test_after_its_duration_a_load_sends_nothing_more(daemon: Daemon, capsys: Capture, tmp_path: Path) -> None:
    options = ["--requests", "100000", "--duration", "0.3", "--token-ids", "5-900", "--prompt-tokens", "9"]
    code, facts, _ = measured(capsys, tmp_path, daemon.url, *options, "--output-tokens", "5", "--concurrency", "2")
    assert code == 0
    assert 0 < facts["requests"] == facts["succeeded"] < 100000
