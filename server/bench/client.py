"""One streaming request over a connection of its own, and the moments at which its tokens arrived.

Written on asyncio's protocols and the C parser of uvicorn, because the client must cost less than the server it
measures: at 20,000 tokens a second there are 50 microseconds for each. See docs/performance.md for what it takes.
"""

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from octavo.server.values import OptionError

MAX_ERROR_BYTES = 64 * 1024
"""Of an error's body, as much is kept."""


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: dict[str, Any] | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None

    @property
    def gained(self) -> str:
        """Text, of whichever endpoint and kind."""
        delta = self.delta
        return self.text or (delta and (delta.content or delta.reasoning_content)) or ""


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is."""

    host: str
    port: int
    path: str
    """What comes before /v1; usually nothing."""
    tls: bool

    @classmethod
    def parse(cls, url: str) -> "Address":
        """Read a base URL, with or without /v1 at its end. Raises OptionError."""
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise OptionError(f"{url[:80]!r} is no URL of a server: give one such as http://127.0.0.1:8000")
        tls = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if tls else 80), path, tls)


@dataclass(slots=True)
class Record:
    """What became of one request. Times are seconds of one monotonic clock."""

    due: float = 0.0
    sent: float = 0.0
    """When it began, its connection included."""
    connected: float | None = None
    arrivals: list[float] = field(default_factory=list)
    """When a chunk with text or tokens came; one entry a chunk."""
    characters: list[int] = field(default_factory=list)
    """Characters in each of them."""
    token_counts: list[int] = field(default_factory=list)
    """Tokens in each of them, where the server says so; else 0."""
    ended: float = 0.0
    prompt_tokens: int | None = None
    cached_tokens: int = 0
    output_tokens: int | None = None
    """As the server counted them."""
    asked_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None
    """What went wrong, in words that do not differ between requests with the same fault."""
    detail: str = ""


class Stream(asyncio.Protocol):
    """Sends one request and fills a record with what comes back. `done` is set when nothing more will come."""

    def __init__(self, request: bytes, record: Record, clock: Callable[[], float]) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._record = record
        self._clock = clock
        self._parser = httptools.HttpResponseParser(self)
        self._now = 0.0
        self._rest = b""
        self._status = 0
        self._counted = self._pending = 0
        """Of a server that sends usage with every chunk: tokens so far, and those whose text is still to come."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        self._record.connected = self._clock()
        cast("asyncio.Transport", transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        """Note the time before anything is done with the bytes."""
        self._now = self._clock()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail("the answer is not HTTP", str(error))

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing more will come: where the response says no length, this is how it ends."""
        self._over(str(exc or ""))

    def on_headers_complete(self) -> None:
        """For the parser: the status is known."""
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """For the parser: take the lines that are complete."""
        if self._status != 200:
            self._rest = (self._rest + body)[:MAX_ERROR_BYTES]
            return
        lines = (self._rest + body).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip())

    def on_message_complete(self) -> None:
        """For the parser: the response is over."""
        self._over()

    def _over(self, detail: str = "") -> None:
        if self._status in (0, 200):
            self._end(detail)
        else:
            code, message = _explained(self._rest)
            self._fail(f"HTTP {self._status} {code}".strip(), message)

    def _event(self, data: bytes) -> None:
        if self.done.done():
            return
        if data == b"[DONE]":
            self._end()
            return
        try:
            chunk = _decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self._fail("a chunk is not what it should be", str(error))
            return
        if chunk.error:
            code, message = _explained(data)
            self._fail(f"error in the stream {code}".strip(), message)
            return
        if chunk.usage is not None:
            self._usage(chunk.usage)
        for choice in chunk.choices:
            self._choice(choice)

    def _choice(self, choice: _Choice) -> None:
        record, text, ids = self._record, choice.gained, choice.token_ids
        if text or ids:
            record.arrivals.append(self._now)
            record.characters.append(len(text))
            record.token_counts.append(len(ids) if ids else self._pending)
            self._pending = 0
        record.finish_reason = choice.finish_reason or record.finish_reason

    def _usage(self, usage: _Usage) -> None:
        record = self._record
        record.prompt_tokens = usage.prompt_tokens
        record.output_tokens = usage.completion_tokens
        record.cached_tokens = (usage.prompt_tokens_details or {}).get("cached_tokens") or 0
        added = (usage.completion_tokens or 0) - self._counted
        self._counted += added
        self._pending += added

    def _end(self, detail: str = "") -> None:
        """The stream is over: well only if its choice has finished."""
        if self._record.finish_reason is None:
            self._fail("the stream ended early", detail)
        self._set_done()

    def _fail(self, fault: str, detail: str) -> None:
        if not self.done.done():
            self._record.error, self._record.detail = fault, detail[:300]
        self._set_done()

    def _set_done(self) -> None:
        if not self.done.done():
            self._record.ended = self._now or self._clock()
            self.done.set_result(None)


class Client:
    """Sends requests to one route of one server."""

    def __init__(self, address: Address, route: str, api_key: str | None, timeout: float) -> None:
        self._address = address
        self._timeout = timeout
        self._tls = ssl.create_default_context() if address.tls else None
        host = f"[{address.host}]" if ":" in address.host else address.host
        lines = [
            f"POST {address.path}{route} HTTP/1.1",
            f"Host: {host}:{address.port}",
            "Content-Type: application/json",
            "Accept: text/event-stream",
            "Connection: close",
            *([f"Authorization: Bearer {api_key}"] if api_key else []),
        ]
        self._head = "\r\n".join([*lines, "Content-Length: "]).encode()

    async def send(self, body: bytes, record: Record, clock: Callable[[], float]) -> None:
        """Run one request to its end. Whatever goes wrong is in the record."""
        request = self._head + str(len(body)).encode() + b"\r\n\r\n" + body
        address, loop = self._address, asyncio.get_running_loop()
        record.sent = clock()
        transport: asyncio.BaseTransport | None = None
        try:
            async with asyncio.timeout(self._timeout):
                transport, stream = await loop.create_connection(
                    lambda: Stream(request, record, clock), address.host, address.port, ssl=self._tls
                )
                await stream.done
        except TimeoutError:
            record.error = f"not finished within {self._timeout:g} s"
        except OSError as error:
            record.error, record.detail = "cannot connect", str(error)[:300]
        finally:
            record.ended = record.ended or clock()
            if transport is not None:
                transport.close()


def _explained(body: bytes) -> tuple[str, str]:
    """Code and message of an error body, whatever server wrote it."""
    try:
        answer = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return "", body[:300].decode("utf-8", "replace")
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    if not isinstance(error, dict):
        return "", str(error)
    return str(error.get("code") or error.get("type") or ""), str(error.get("message") or error)
