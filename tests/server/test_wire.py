"""HTTP that no client library sends: each case is answered or dropped, and the next ordinary request succeeds."""

import json
import logging
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.live import Live, engine_pid, live_server, story_command
from support.raw import exchange

from octavo.server.access import AccessRules

BODY = json.dumps({"model": "smollm2", "prompt": [5], "max_tokens": 1}).encode()
POST = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nConnection: close\r\n"
GET = b"GET /health HTTP/1.1\r\nHost: a\r\n"
CLOSE = b"Connection: close\r\n\r\n"
SMUGGLED = b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n"


def chunked(*chunks: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in (*chunks, b""))


def sized(length: bytes, body: bytes = BODY) -> bytes:
    return POST + b"Content-Length: " + length + b"\r\n\r\n" + body


def coded(coding: bytes, body: bytes) -> bytes:
    return POST + b"Transfer-Encoding: " + coding + b"\r\n\r\n" + body


EXACT = b"%d" % len(BODY)

REFUSED = {
    "a TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
    "no target": b"GET\r\n\r\n",
    "no version, as before HTTP/1.0": b"GET /health\r\n\r\n",
    "a version that is none": b"GET /health HTTP/9.9\r\nHost: a\r\n" + CLOSE,
    "a method that is none": b"FETCH /health HTTP/1.1\r\nHost: a\r\n" + CLOSE,
    "a method in small letters": b"get /health HTTP/1.1\r\nHost: a\r\n" + CLOSE,
    "the preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a tunnel": b"CONNECT a:80 HTTP/1.1\r\nHost: a:80\r\n\r\n",
    "a space before the colon": GET + b"X-A : b\r\n" + CLOSE,
    "a header without a colon": GET + b"X-A\r\n" + CLOSE,
    "a header without a name": GET + b": b\r\n" + CLOSE,
    "a NUL in a header": GET + b"X-A: b\x00c\r\n" + CLOSE,
    "a lone CR in a header": GET + b"X-A: b\rX-B: c\r\n" + CLOSE,
    "a folded header": GET + b"X-A: b\r\n c\r\n" + CLOSE,
    "a NUL in the target": b"GET /hea\x00lth HTTP/1.1\r\nHost: a\r\n" + CLOSE,
    "a letter beyond ASCII in the target": "GET /v1/models/é HTTP/1.1\r\nHost: a\r\n".encode() + CLOSE,
    "a negative length": sized(b"-1"),
    "a length with a sign": sized(b"+" + EXACT),
    "a length in hexadecimal": sized(b"0x10"),
    "a length that is no number": sized(b"many"),
    "a list of lengths": sized(EXACT + b"," + EXACT),
    "a length beyond 64 bits": sized(b"9" * 30),
    "an empty length": sized(b""),
    "two lengths": POST + b"Content-Length: 3\r\nContent-Length: " + EXACT + b"\r\n\r\n" + BODY,
    "a length and a coding": POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked(BODY),
    "a coding and a length": POST + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n" + chunked(BODY),
    "a coding that is not the last": coded(b"chunked, identity", chunked(BODY)),
    "a coding that is unknown": coded(b"xchunked", chunked(BODY)),
    "two codings": POST + b"Transfer-Encoding: identity\r\nTransfer-Encoding: xchunked\r\n\r\n" + chunked(BODY),
    "a chunk's size that is no number": coded(b"chunked", b"zz\r\n" + BODY),
    "a chunk of negative size": coded(b"chunked", b"-1\r\n" + BODY),
    "a chunk's size beyond 64 bits": coded(b"chunked", b"f" * 17 + b"\r\n" + BODY),
    "a chunk longer than it says": coded(b"chunked", b"2\r\n" + BODY + b"\r\n0\r\n\r\n"),
}
"""Answered with 400 or, where it looks like the end of an HTTP/0.9 request, not at all."""


@pytest.fixture
def steadfast(live: Live) -> Iterator[Live]:
    """A server whose engine is the same afterwards, and answers."""
    process = engine_pid(live.service.client)
    yield live
    assert live.completion(prompt=[5], max_tokens=1)["usage"]["completion_tokens"] == 1
    assert engine_pid(live.service.client) == process


def statuses(response: bytes) -> list[int]:
    """Of all answers on a connection."""
    return [int(status) for status in re.findall(rb"(?:^|(?<=[\n}]))HTTP/1\.1 (\d{3}) ", response)]


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_http_is_refused_and_the_connection_closed(steadfast: Live, case: str) -> None:
    response = exchange(steadfast.url, REFUSED[case] + SMUGGLED, end=True)
    found = statuses(response)
    assert found[-1] == 400, response
    assert len(found) == 1, "what follows is not taken for a request"
    assert b"smollm2" not in response
    head, _, body = response.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    assert json.loads(body)["error"].keys() == {"message", "type", "param", "code"}


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_the_way_bytes_are_divided_changes_nothing(steadfast: Live, size: int) -> None:
    for request in (sized(EXACT), coded(b"chunked", chunked(*(BODY[i : i + 1] for i in range(len(BODY)))))):
        parts = [request[start : start + size] for start in range(0, len(request), size)]
        assert statuses(exchange(steadfast.url, parts)) == [200]


def test_a_body_shorter_than_it_says_is_waited_for_and_then_dropped(steadfast: Live) -> None:
    started = steadfast.metric("octavo_request_started_total")
    assert statuses(exchange(steadfast.url, sized(b"1000"), end=True)) in ([], [400])
    assert statuses(exchange(steadfast.url, coded(b"chunked", b"ff\r\n" + BODY), end=True)) in ([], [400])
    assert steadfast.metric("octavo_request_started_total") == started


def test_a_body_longer_than_it_says_is_no_second_request(steadfast: Live) -> None:
    short = BODY[:-1]
    response = exchange(steadfast.url, sized(b"%d" % len(short)) + SMUGGLED, end=True)
    assert statuses(response)[0] == 400
    assert b"smollm2" not in response
    assert statuses(exchange(steadfast.url, sized(EXACT) + SMUGGLED)) == [200], "the first asked to close"


def test_a_declared_body_that_is_too_large_is_not_waited_for(steadfast: Live) -> None:
    assert statuses(exchange(steadfast.url, sized(b"999999999", b""))) == [413]


def test_pipelined_requests_are_answered_in_order(steadfast: Live) -> None:
    version = b"GET /version HTTP/1.1\r\nHost: a\r\n\r\n"
    response = exchange(steadfast.url, GET + b"\r\n" + version + b"GET /nowhere HTTP/1.1\r\nHost: a\r\n" + CLOSE)
    assert statuses(response) == [200, 200, 404]
    broken = exchange(steadfast.url, GET + b"\r\n" + b"nonsense\r\n\r\n")
    assert statuses(broken)[-1] == 400


def test_many_small_chunks_make_one_body(steadfast: Live) -> None:
    spaces = b" " * 20_000
    body = chunked(*(spaces[:1] for _ in spaces), BODY)
    assert statuses(exchange(steadfast.url, coded(b"chunked", body))) == [200]


@pytest.mark.parametrize("start", [b"0\r\nX: ", b"0\r\n", b"5;x="], ids=["trailer", "trailers", "extension"])
def test_what_comes_beside_a_body_has_an_end(steadfast: Live, start: bytes) -> None:
    piece = (b"a: b\r\n" if start == b"0\r\n" else b"a") * (1 << 16)
    host, port = steadfast.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(coded(b"chunked", start))
        with pytest.raises(ConnectionError):
            connection.sendall(piece * ((64 << 20) // len(piece)))


def test_an_upgrade_is_not_taken_up(
    steadfast: Live, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("uvicorn.error"), "handlers", [caplog.handler])
    upgrade = b"Upgrade: websocket\r\nSec-WebSocket-Key: x\r\nConnection: Upgrade, close\r\n\r\n"
    assert statuses(exchange(steadfast.url, GET + upgrade)) == [200]
    h2c = b"Upgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\nConnection: Upgrade, HTTP2-Settings, close\r\n\r\n"
    assert statuses(exchange(steadfast.url, GET + h2c)) == [200]
    assert not caplog.records


def test_a_client_that_expects_to_be_told_to_continue_is(steadfast: Live) -> None:
    head = POST + b"Expect: 100-continue\r\nContent-Length: " + EXACT + b"\r\n\r\n"
    assert statuses(exchange(steadfast.url, [head, BODY])) in ([100, 200], [200])
    refused = POST.replace(b"application/json", b"text/plain") + b"Expect: 100-continue\r\nContent-Length: 5\r\n\r\n"
    assert statuses(exchange(steadfast.url, refused, end=True)) == [415]


@pytest.mark.parametrize(
    ("target", "status"),
    [
        (b"http://a/health", 200),
        (b"http://b:99/health", 200),
        (b"//health", 404),
        (b"/health?x=/v1/models", 200),
        (b"/%68ealth", 200),
        (b"/health%00", 404),
        (b"/v1/models/..%2f..%2fetc%2fpasswd", 404),
        (b"/v1/models/%ff", 404),
        (b"/v1/models/%0d%0aX-A:%20b", 404),
        (b"/../../etc/passwd", 404),
        (b"/;/health", 404),
    ],
)
def test_a_target_means_its_path_and_nothing_else(steadfast: Live, target: bytes, status: int) -> None:
    response = exchange(steadfast.url, b"GET " + target + b" HTTP/1.1\r\nHost: a\r\n" + CLOSE)
    assert statuses(response) == [status]
    assert b"x-a: b" not in response.lower()
    assert b"root:" not in response


def test_a_target_without_a_path_is_no_route(steadfast: Live) -> None:
    response = exchange(steadfast.url, b"OPTIONS * HTTP/1.1\r\nHost: a\r\n" + CLOSE)
    assert statuses(response)[0] in (400, 404)


def test_headers_that_come_after_a_body_open_nothing(tmp_path: Path) -> None:
    body = chunked(BODY)[:-2]
    with live_server(command=story_command(tmp_path, {}), rules=AccessRules(("key",))) as live:
        for trailer in (b"Authorization: Bearer key\r\n", b"x-api-key: key\r\n"):
            response = exchange(live.url, coded(b"chunked", body + trailer + b"\r\n"))
            assert statuses(response) == [401]
        host = exchange(
            live.url,
            POST.replace(b"Host: a\r\n", b"") + b"Transfer-Encoding: chunked\r\n\r\n" + body + b"Host: a\r\n\r\n",
        )
        assert statuses(host) == [400]
