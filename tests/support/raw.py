"""HTTP as bytes on a socket, for requests that no client library would send."""

import json
import socket
from collections.abc import Iterable, Mapping


def exchange(url: str, request: bytes | Iterable[bytes], *, end: bool = False) -> bytes:
    """Send bytes, or several parts of them, to a server; return all that it answers until it closes the connection."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        for part in [request] if isinstance(request, bytes) else request:
            connection.sendall(part)
        if end:
            connection.shutdown(socket.SHUT_WR)
        received = bytearray()
        try:
            while data := connection.recv(1 << 16):
                received += data
        except ConnectionResetError:  # it closed while bytes of ours were unread
            pass
        return bytes(received)


def get(path: str, *headers: str) -> bytes:
    """The bytes of a GET that asks for the connection to be closed."""
    lines = [f"GET {path} HTTP/1.1", "Connection: close", *headers]
    return "".join(line + "\r\n" for line in (*lines, "")).encode("latin-1")


def post(path: str, fields: Mapping[str, object]) -> bytes:
    """The bytes of a POST of JSON that asks for the connection to be closed."""
    body = json.dumps(fields).encode()
    lines = ["Host: localhost", "Connection: close", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "".join(line + "\r\n" for line in (f"POST {path} HTTP/1.1", *lines, "")).encode() + body


def status_of(response: bytes) -> int:
    """The status of the first response."""
    return int(response.split(b" ", 2)[1])
