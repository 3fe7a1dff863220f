"""Bodies of requests and answers: JSON, read within limits and written quickly."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from octavo.server.errors import APIError

T = TypeVar("T")

INLINE_BYTES = 64 << 10
"""Larger bodies are parsed in a thread, so that the event loop goes on answering."""


async def read(request: Request, limit: int, parse: Callable[[bytes], T]) -> T:
    """Read a JSON body of at most `limit` bytes and parse it.

    Raises 413 or 415, 499 if the client leaves meanwhile, and what `parse` raises.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise APIError(415, "The body must be JSON: send the header 'Content-Type: application/json'.")
    too_large = APIError(413, f"The body is larger than {limit} bytes.")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise too_large
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > limit:
                raise too_large
    except ClientDisconnect:
        raise APIError(499, "The client left before its request was complete.") from None
    if len(body) <= INLINE_BYTES:
        return parse(bytes(body))
    return await asyncio.to_thread(parse, bytes(body))


class JSONBody(Response):
    """An answer in JSON, encoded many times faster than by the standard library: long lists hold up nobody else."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Encode anything that JSON can say; bytes are taken as encoded already."""
        return content if isinstance(content, bytes) else msgspec.json.encode(content)
