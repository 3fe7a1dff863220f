"""Answers on the wire: server-sent events, and noticing that a client has left."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.server.body import JSONBody
from octavo.server.choice import Choice
from octavo.server.errors import APIError, internal_error

log = logging.getLogger(__name__)

T = TypeVar("T")

KEEP_ALIVE_SECONDS = 15.0
"""Proxies close streams that stay silent; a comment line is ignored by clients."""

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


class ClientGoneError(Exception):
    """The client closed its connection before the answer was complete."""


def event(payload: Any) -> bytes:
    """One server-sent event: a line of JSON."""
    return b"data: " + msgspec.json.encode(payload) + b"\n\n"


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`, cancelling it when the client leaves. Raises ClientGoneError then."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        for future in (task, watcher):
            future.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await future


async def answer_whole(
    receive: Receive, choices: Sequence[Choice], work: Coroutine[Any, Any, dict[str, Any]], headers: Mapping[str, str]
) -> Response:
    """Answer with what `work` makes of the choices. Nothing is left running when the client has gone."""
    try:
        return JSONBody(await while_connected(receive, work), headers=dict(headers))
    except ClientGoneError:
        return Response(status_code=499)
    finally:
        for choice in choices:
            choice.generation.abort()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def named_event(payload: Mapping[str, Any]) -> bytes:
    """One server-sent event that carries its type as its name, too."""
    return f"event: {payload['type']}\n".encode() + event(payload)


class Framing(NamedTuple):
    """How a stream is spelled."""

    encode: Callable[[dict[str, Any]], bytes] = event
    failure: Callable[[APIError], dict[str, Any]] = APIError.envelope
    """What tells of an error that comes after the headers; nothing follows it."""
    end: bytes = DONE


class EventStream(Response):
    """A stream of chunks. Whatever ends it - the last chunk, an error, a client that leaves - ends its choices."""

    media_type = "text/event-stream"

    def __init__(
        self,
        source: AsyncGenerator[dict[str, Any]],
        choices: Sequence[Choice],
        headers: Mapping[str, str],
        framing: Framing = Framing(),  # noqa: B008 - it is immutable
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        del self.headers["content-length"]
        self._source = source
        self._choices = choices
        self._framing = framing
        self._last = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Send the chunks until the source ends or the client leaves."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        keeper = asyncio.ensure_future(self._keep_alive(send))
        try:
            await while_connected(receive, self._send_all(send))
        except ClientGoneError:
            return
        finally:
            keeper.cancel()
            for choice in self._choices:
                choice.generation.abort()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_all(self, send: Send) -> None:
        try:
            async for chunk in self._source:
                await self._send(send, self._framing.encode(chunk))
            await self._send(send, self._framing.end)
        except APIError as error:
            await self._send_failure(send, error)
        except Exception:
            log.exception("a stream failed")
            await self._send_failure(send, internal_error())
        finally:
            await self._source.aclose()

    async def _send_failure(self, send: Send, error: APIError) -> None:
        await self._send(send, self._framing.encode(self._framing.failure(error)))

    async def _send(self, send: Send, body: bytes) -> None:
        self._last = asyncio.get_running_loop().time()
        await send({"type": "http.response.body", "body": body, "more_body": True})

    async def _keep_alive(self, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        self._last = self._last or clock()
        while True:
            await asyncio.sleep(max(0.1, self._last + KEEP_ALIVE_SECONDS - clock()))
            if clock() >= self._last + KEEP_ALIVE_SECONDS:
                await self._send(send, KEEP_ALIVE)
