"""F7: what a client does not read is not computed, the rest of it is not lost, and nobody else notices."""

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.live import Live, engine_pid, live_server, story_command
from support.measuring import scrape
from support.raw import post

from octavo.scheduler.messages import EngineConfig
from octavo.server import listening
from octavo.server.health import READY

TOKENS = 1_500
"""With their log-probabilities, far more than fits between an engine and a client that does not read."""
SMALL_BUFFER = 16 << 10
NEIGHBOUR = 50
ABORTED = 'octavo_request_success_total{finished_reason="abort"}'
STREAM = {"model": "smollm2", "prompt": [5, 6], "max_tokens": TOKENS, "logprobs": 5, "return_token_ids": True}


def eventually(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


@contextlib.contextmanager
def serving(directory: Path, send_seconds: float) -> Iterator[Live]:
    """A server whose sockets hold little, with four slots."""
    config = EngineConfig(model="smollm2", max_num_seqs=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(listening, "SEND_BUFFER_BYTES", SMALL_BUFFER)
        with live_server(config, command=story_command(directory, {}), send_timeout=send_seconds) as live:
            yield live


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with serving(tmp_path_factory.mktemp("patient"), send_seconds=600) as live:
        yield live


@pytest.fixture(scope="module")
def expected(patient: Live) -> tuple[list[int], list[float]]:
    """Tokens and log-probabilities of an undisturbed answer."""
    [choice] = patient.completion(**STREAM)["choices"]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def at_rest(live: Live, choices: int) -> bool:
    """Whether so many requests are paused, and none of them is computed while a neighbour is.

    The gauge alone tells too little: reports that were under way are counted after it, and a pause may end again as
    long as the socket takes more. The engine hears of a pause before it hears of the neighbour.
    """
    before = live.metric("octavo_generation_tokens_total")
    live.completion(prompt=[7], max_tokens=1)
    computed = live.metric("octavo_generation_tokens_total") - before
    return computed == 1 and live.metric("octavo_requests_paused") == choices


@contextlib.contextmanager
def unread(live: Live, choices: int) -> Iterator[socket.socket]:
    """A stream that nobody reads, once all of its choices are paused."""
    host, port = live.url.removeprefix("http://").split(":")
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
        connection.connect((host, int(port)))
        connection.sendall(post("/v1/completions", {**STREAM, "n": choices, "stream": True}))
        eventually(lambda: at_rest(live, choices))
        yield connection


def read_to_the_end(connection: socket.socket) -> bytes:
    connection.settimeout(60)
    received = bytearray()
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(1 << 16):
            received += data
    return bytes(received)


def choices_of(answer: bytes) -> dict[int, tuple[list[int], list[float]]]:
    """Tokens and log-probabilities of each choice of a stream that has come to its end."""
    lines = [line.removeprefix(b"data: ") for line in answer.split(b"\n") if line.startswith(b"data: ")]
    assert lines.pop() == b"[DONE]"
    found: dict[int, tuple[list[int], list[float]]] = {}
    for choice in (choice for line in lines for choice in json.loads(line)["choices"]):
        ids, logprobs = found.setdefault(choice["index"], ([], []))
        ids.extend(choice["token_ids"])
        logprobs.extend(choice["logprobs"]["token_logprobs"])
    return found


@pytest.mark.parametrize("choices", [1, 3])
def test_f7_a_reader_that_pauses_gets_every_token_and_costs_its_neighbours_no_step(
    patient: Live, choices: int, expected: object
) -> None:
    with unread(patient, choices) as connection:
        before = scrape(patient.url)
        assert before["requests_running"] == choices
        for _ in range(3):
            answer = patient.completion(prompt=[7], max_tokens=NEIGHBOUR)
            assert answer["usage"]["completion_tokens"] == NEIGHBOUR
        after = scrape(patient.url)
        for name in ("generation_tokens_total", "steps_total", "step_requests_sum"):
            assert after[name] - before[name] == 3 * NEIGHBOUR, "nothing but the neighbour was computed"
        assert patient.service.condition() == READY
        assert choices_of(read_to_the_end(connection)) == dict.fromkeys(range(choices), expected)
    found = scrape(patient.url)
    assert found["requests_paused"] == found["requests_running"] == 0
    assert found["kv_blocks{state=used}"] == 0


def test_f7_a_paused_request_outlives_its_engine(patient: Live, expected: object) -> None:
    client = patient.service.client
    restarts = client.metrics.engine_restarts
    with unread(patient, 2) as connection:
        generated = client.metrics.generated_tokens
        os.kill(engine_pid(client), signal.SIGKILL)
        eventually(lambda: client.metrics.engine_restarts == restarts + 1)
        patient.completion(prompt=[7], max_tokens=NEIGHBOUR)
        assert client.metrics.generated_tokens == generated + NEIGHBOUR
        assert choices_of(read_to_the_end(connection)) == {0: expected, 1: expected}


def test_f7_paused_requests_keep_no_slot_that_others_wait_for(patient: Live, expected: object) -> None:
    with unread(patient, 4) as connection:
        together = patient.completion(prompt=[7], n=4, max_tokens=NEIGHBOUR)
        assert together["usage"]["completion_tokens"] == 4 * NEIGHBOUR
        assert patient.metric("octavo_preemptions_total") > 0
        assert choices_of(read_to_the_end(connection)) == dict.fromkeys(range(4), expected)


def test_f7_a_reader_that_never_reads_is_aborted_and_what_it_does_not_read_is_not_kept(tmp_path: Path) -> None:
    with serving(tmp_path, send_seconds=4) as live, unread(live, 2) as connection:
        found = scrape(live.url)
        assert found["kv_blocks{state=used}"] > 0
        eventually(lambda: live.metric(ABORTED) == 2)
        after = scrape(live.url)
        assert after["generation_tokens_total"] == found["generation_tokens_total"] < 2 * TOKENS
        assert after["kv_blocks{state=used}"] == after["requests_paused"] == live.service.client.live == 0
        answer = read_to_the_end(connection)
        assert b"[DONE]" not in answer
        assert len(answer) < 8 * SMALL_BUFFER
