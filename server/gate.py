"""What is done on sight of a request's head: it gets a name, and is perhaps refused.

Refusals must cost next to nothing, and their answers must arrive.
"""

import os
import re
from collections.abc import Callable, Iterable

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.server.errors import APIError, answer, is_messages

REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

Judge = Callable[[Scope], None]
"""Raises APIError for a request that is to be refused."""


class Gate:
    """Lets a request pass, or answers the APIError that `judge` raises."""

    def __init__(self, app: ASGIApp, judge: Judge) -> None:
        self._app = app
        self._judge = judge

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        try:
            self._judge(scope)
        except APIError as error:
            await _refuse(error, scope, receive, send)
        else:
            await self._app(scope, receive, send)


async def _refuse(error: APIError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer at once, and end the answer when the body has arrived: nothing of it is kept.

    A connection that is closed while bytes of it are unread is reset, and the answer may be lost with it.
    """
    response = answer(error, scope)
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.body"})


def lookout(judges: Iterable[Judge], responded: Callable[[int], None]) -> Callable[[Scope], Response | None]:
    """Make what tells the wire how to answer whom a full queue refuses, without the application; None: it must see it.

    `judges` in the order in which the application asks them. `responded` hears the status of each answer.
    """

    def look(scope: Scope) -> Response | None:
        try:
            for judge in judges:
                judge(scope)
        except APIError as error:
            if error.status == 429:
                responded(error.status)
                identification = identify(scope)
                response = answer(error, scope)
                response.raw_headers += identification
                return response
        return None

    return look


def identify(scope: Scope) -> list[tuple[bytes, bytes]]:
    """Name a request: the client's own id where it is harmless, else a new one. Returns the headers that say so."""
    given = (value.decode("latin-1") for name, value in scope["headers"] if name == b"x-request-id")
    identity = next(filter(REQUEST_ID.fullmatch, given), None) or os.urandom(16).hex()
    scope.setdefault("state", {})["request_id"] = identity
    names = (b"x-request-id", b"request-id") if is_messages(scope["path"]) else (b"x-request-id",)
    return [(name, identity.encode()) for name in names]
