"""Connections that are slow or many: they are ended, and nobody else notices."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from support.live import Live, live_server, story_command
from support.raw import get, post, status_of
from support.story_engine import SLOW

from octavo.server import listening

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def address(live: Live) -> tuple[str, int]:
    host, port = live.url.removeprefix("http://").split(":")
    return host, int(port)


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def read_to_the_end(connection: socket.socket) -> bytes:
    connection.settimeout(30)
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(65536):
            received += data
    return received


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    settings = {"receive_timeout": 0.5, "send_timeout": 0.5, "max_connections": 800}
    with live_server(command=story_command(tmp_path_factory.mktemp("hasty"), {}), **settings) as live:
        yield live


def drip(connection: socket.socket, data: bytes) -> None:
    """Send a byte every now and then until the other end has had enough."""
    with contextlib.suppress(OSError):
        for position in range(len(data)):
            connection.sendall(data[position : position + 1])
            time.sleep(0.05)


@pytest.mark.parametrize("start", [b"POST /v1", HEAD, HEAD + b"Content-Length: 1000\r\n\r\n{", b"\r\n"])
def test_f8_a_request_that_drips_in_is_answered_408_and_closed(hasty: Live, start: bytes) -> None:
    with socket.create_connection(address(hasty)) as connection:
        connection.sendall(start)
        dripping = threading.Thread(target=drip, args=(connection, b"\r\n" * 500 if start == b"\r\n" else b"x" * 1000))
        dripping.start()
        answer = read_to_the_end(connection)
        assert status_of(answer) == 408
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
    dripping.join()


def test_f8_a_connection_that_sends_nothing_is_closed(hasty: Live) -> None:
    with socket.create_connection(address(hasty)) as connection:
        assert status_of(read_to_the_end(connection)) == 408


def test_f8_a_connection_that_drips_after_an_answer_is_closed(hasty: Live) -> None:
    with socket.create_connection(address(hasty)) as connection:
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200 OK" in connection.recv(65536)
        dripping = threading.Thread(target=drip, args=(connection, b"\r\n" * 500))
        dripping.start()
        assert b"408" in read_to_the_end(connection)
    dripping.join()


def test_a_long_answer_is_not_cut_off_by_the_time_to_receive(hasty: Live) -> None:
    chunks = hasty.stream("/v1/completions", prompt=[SLOW], max_tokens=150)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_f8_five_hundred_dripping_connections_hold_nobody_up(hasty: Live) -> None:
    async def flood() -> int:
        async def one() -> bool:
            reader, writer = await asyncio.open_connection(*address(hasty))
            with contextlib.suppress(ConnectionError):
                for byte in HEAD:
                    writer.write(bytes([byte]))
                    await writer.drain()
                    await asyncio.sleep(0.1)
                    if reader.at_eof():
                        break
            with contextlib.suppress(ConnectionError):
                answer = await reader.read()
                writer.close()
                return answer.startswith(b"HTTP/1.1 408")
            return True

        async def ask() -> int:
            async with httpx.AsyncClient(timeout=30) as client:
                await asyncio.sleep(0.1)
                body = {"model": "smollm2", "prompt": [5], "max_tokens": 2}
                return (await client.post(f"{hasty.url}/v1/completions", json=body)).status_code

        *closed, status = await asyncio.gather(*(one() for _ in range(500)), ask())
        assert all(closed)
        return status

    assert asyncio.run(flood()) == 200


def test_more_connections_than_allowed_are_answered_503_and_closed(tmp_path: Path) -> None:
    with live_server(command=story_command(tmp_path, {}), max_connections=3) as live, contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(socket.create_connection(address(live)))
        with socket.create_connection(address(live)) as connection:
            answer = read_to_the_end(connection)
        assert status_of(answer) == 503
        assert b"too_many_connections" in answer
        stack.close()
        eventually(lambda: httpx.get(f"{live.url}/version").status_code == 200)


def test_f7_a_client_that_does_not_read_is_cut_off_and_others_go_on(hasty: Live) -> None:
    aborted = 'octavo_request_success_total{finished_reason="abort"}'
    before = hasty.metric(aborted)
    fields = {"model": "smollm2", "prompt": [5], "max_tokens": 1900, "logprobs": 5, "stream": True, "n": 8}
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(address(hasty))
        connection.sendall(post("/v1/completions", fields))
        assert hasty.completion(prompt=[6], max_tokens=20)["usage"]["completion_tokens"] == 20
        eventually(lambda: hasty.metric(aborted) == before + 8)
        assert b"[DONE]" not in read_to_the_end(connection)


def test_f7_a_closed_connection_whose_last_bytes_nobody_reads_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "SEND_BUFFER_BYTES", 16 << 10)
    settings = {"send_timeout": 0.5, "max_connections": 1}
    with live_server(command=story_command(tmp_path, {}), **settings) as live, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(address(live))
        connection.sendall(get("/openapi.json", "Host: localhost"))
        eventually(lambda: httpx.get(f"{live.url}/version").status_code == 200)


def test_f8_a_body_behind_a_long_answer_has_its_time_when_it_is_its_turn(hasty: Live) -> None:
    long = {"model": "smollm2", "prompt": [SLOW], "max_tokens": 150, "stream": True}
    late = post("/v1/completions", {"model": "smollm2", "prompt": [5], "max_tokens": 1})
    with socket.create_connection(address(hasty)) as connection:
        connection.sendall(post("/v1/completions", long).replace(b"Connection: close\r\n", b"") + late[:-1])
        received = b""
        while b"[DONE]" not in received:
            data = connection.recv(65536)
            assert data, received
            received += data
        connection.sendall(late[-1:])
        assert b"HTTP/1.1 408" not in received
        assert b"HTTP/1.1 200" in read_to_the_end(connection)
