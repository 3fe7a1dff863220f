"""Refusals on sight of the head: nothing of the body is needed for them, and nothing of it breaks their answers."""

import contextlib
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.live import NO_TLS, Live, live_server, story_command
from support.raw import exchange, post, status_of
from support.story_engine import SLOW

from octavo.scheduler.messages import EngineConfig
from octavo.server import app as app_module
from octavo.server import service as service_module
from octavo.server.access import AccessRules

KEY = {"Authorization": "Bearer key"}
GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses")
MEGABYTE = 1 << 20


HEALTH = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with full_server(tmp_path_factory.mktemp("full")) as live:
        yield live


@contextlib.contextmanager
def full_server(directory: Path, **options: object) -> Iterator[Live]:
    """A server with a key that computes the one request it has room for, all the time."""
    config = EngineConfig(model="smollm2", max_num_seqs=1)
    command, rules = story_command(directory, {}), AccessRules(("key",))
    with live_server(config, command=command, max_queued_requests=0, rules=rules, **options) as live:
        body = {"model": "smollm2", "prompt": [SLOW], "max_tokens": 2000, "stream": True}
        url = f"{live.url}/v1/completions"
        with httpx.stream("POST", url, json=body, headers=KEY, timeout=60, verify=NO_TLS) as answer:
            assert answer.status_code == 200
            yield live


def connect(live: Live) -> socket.socket:
    host, port = live.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def head(length: int, *headers: str, path: str = "/v1/completions", key: str = "key") -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: a", f"Authorization: Bearer {key}", f"Content-Length: {length}", *headers]
    return "".join(line + "\r\n" for line in (*lines, "Content-Type: application/json", "")).encode()


def count(live: Live, metric: str) -> int:
    lines = httpx.get(f"{live.url}/metrics", headers=KEY).text.splitlines()
    return int(float(next(line for line in lines if line.startswith(metric)).split()[-1]))


def receive_answer(connection: socket.socket) -> tuple[int, dict[str, str], dict]:
    """Status, headers and body of the next answer on a connection."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += connection.recv(1 << 16)
    start, _, body = received.partition(b"\r\n\r\n")
    lines = start.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
    while len(body) < int(headers["content-length"]):
        body += connection.recv(1 << 16)
    return status_of(start), headers, json.loads(body)


@pytest.mark.parametrize("path", GENERATING)
def test_f17_a_full_server_answers_before_the_body_has_come_and_the_connection_goes_on(full: Live, path: str) -> None:
    with connect(full) as connection:
        for number in range(2):
            connection.sendall(head(3 * MEGABYTE, f"X-Request-Id: mine-{number}", path=path) + b"{")
            status, headers, body = receive_answer(connection)
            assert (status, headers["retry-after"], headers["x-request-id"]) == (429, "1", f"mine-{number}")
            assert body["error"]["type"] == "rate_limit_error"
            assert "connection" not in headers
            connection.sendall(b" " * (3 * MEGABYTE - 1))
        connection.sendall(HEALTH)
        assert receive_answer(connection)[0] == 200


def test_f17_a_refusal_arrives_though_the_connection_is_closed_after_it(full: Live) -> None:
    """Bytes that are unread when a socket is closed would reset it, and take the answer with them."""
    for key, expected in (("key", 429), ("wrong", 401)):
        with connect(full) as connection:
            connection.sendall(head(3 * MEGABYTE, "Connection: close", key=key))
            for _ in range(3):
                connection.sendall(b" " * MEGABYTE)
            status, headers, _ = receive_answer(connection)
            assert (status, headers["connection"]) == (expected, "close")
            assert connection.recv(1) == b"", "the end, not a reset"


def test_a_refusal_to_a_client_that_waits_to_be_told_to_go_on_asks_for_no_body(full: Live) -> None:
    with connect(full) as connection:
        connection.sendall(head(MEGABYTE, "Expect: 100-continue"))
        assert receive_answer(connection)[0] == 429


def test_a_full_server_does_not_parse_and_counts_what_it_refuses(full: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    async def read(*_: object) -> None:
        raise AssertionError("read")

    monkeypatch.setattr(service_module, "read", read)
    names = ('octavo_admission_rejections_total{reason="queue_full"}', 'octavo_http_responses_total{code="429"}')
    before = [count(full, name) for name in names]
    for path in GENERATING:
        refused = httpx.post(full.url + path, content=b"no JSON", headers=KEY)
        assert refused.status_code == 429
        assert "The queue is full (0 requests)" in refused.text
    assert [count(full, name) - start for name, start in zip(names, before, strict=True)] == [4, 4]


def test_a_full_server_asks_for_a_key_first_and_answers_what_computes_nothing(full: Live) -> None:
    for path in GENERATING:
        assert httpx.post(full.url + path, json={}).status_code == 401
        assert httpx.get(full.url + path, headers=KEY).status_code == 405
    assert status_of(exchange(full.url, post("/v1/completions", {}).replace(b"Host: localhost", b"Host: a b"))) == 400
    assert httpx.post(f"{full.url}/tokenize", json={"model": "smollm2", "prompt": "a"}, headers=KEY).status_code == 200
    assert httpx.get(f"{full.url}/health").status_code == 200


def test_the_application_does_not_hear_of_what_is_refused(full: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    async def hear(*_: object) -> None:
        raise AssertionError("heard")

    monkeypatch.setattr(app_module.RequestContext, "__call__", hear)
    response = httpx.post(f"{full.url}/v1/completions", content=b"x", headers=KEY)
    assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")
    assert re.fullmatch("[0-9a-f]{32}", response.headers["x-request-id"])


@pytest.mark.parametrize("before", [b"", HEALTH])
def test_refusals_in_a_row_are_all_answered_in_the_same_way_and_nothing_after_the_last(
    full: Live, before: bytes
) -> None:
    """Behind another request, the application refuses all but the last; without one, the wire refuses."""
    response = exchange(full.url, before + head(0) * 500 + head(0, "Connection: close") + HEALTH)
    found = re.findall(rb"HTTP/1\.1 (\d{3}) [^\r]*\r\n(.*?)\r\n\r\n", response, re.DOTALL)
    assert [int(status) for status, _ in found] == [200] * bool(before) + [429] * 501
    names = [
        [line.partition(b":")[0] for line in headers.split(b"\r\n")] for status, headers in found if status == b"429"
    ]
    assert {b"date", b"content-length", b"content-type", b"retry-after", b"x-request-id"} <= set(names[0])
    assert all(sorted(each) == sorted(names[0]) for each in names[:-1])
    assert sorted(names[-1]) == sorted([*names[0], b"connection"])


def test_a_server_that_is_full_and_ends_says_that_it_ends(full: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    metric = 'octavo_admission_rejections_total{reason="draining"}'
    before = count(full, metric)
    monkeypatch.setattr(full.service, "draining", True)
    response = httpx.post(f"{full.url}/v1/completions", content=b"x", headers=KEY)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "draining")
    assert count(full, metric) == before + 1


def test_a_page_may_read_that_the_queue_is_full(tmp_path: Path) -> None:
    with full_server(tmp_path, origins=("https://example.org",)) as live:
        response = httpx.post(f"{live.url}/v1/completions", json={}, headers=KEY | {"Origin": "https://example.org"})
        assert response.status_code == 429
        assert response.headers["access-control-allow-origin"] == "https://example.org"


def test_f8_a_body_that_drips_in_after_its_refusal_is_cut_off_without_a_second_answer(tmp_path: Path) -> None:
    with full_server(tmp_path, receive_timeout=0.5) as live, connect(live) as connection:
        connection.sendall(head(MEGABYTE) + b"{")
        assert receive_answer(connection)[0] == 429
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""
