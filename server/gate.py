"""Refusals on sight of a request's head: they must cost next to nothing, and their answers must arrive."""

from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.server.errors import APIError, answer


class Gate:
    """Lets a request pass, or answers the APIError that `judge` raises."""

    def __init__(self, app: ASGIApp, judge: Callable[[Scope], None]) -> None:
        self._app = app
        self._judge = judge

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "http":
            try:
                self._judge(scope)
            except APIError as error:
                await _refuse(error, scope, receive, send)
                return
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
