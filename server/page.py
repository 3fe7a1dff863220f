"""The live page at /: one static file, which asks /health, /info and /metrics from the browser.

It holds no data, so it needs no key; what it asks for does, and its reader is asked for one where the server wants it.
"""

import re
from base64 import b64encode
from hashlib import sha256
from importlib.resources import files

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send


class Page:
    """Answers GET and HEAD of / itself, loading or not, and passes everything else on."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        text = files("octavo.server").joinpath("page.html").read_text(encoding="utf-8")
        self._response = Response(text, media_type="text/html", headers=_headers(text))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or pass the request on."""
        asked = scope["path"] == "/" and scope["method"] in ("GET", "HEAD")
        await (self._response if asked else self._app)(scope, receive, send)


def _headers(page: str) -> dict[str, str]:
    """Let the browser run the page's own script and style and nothing else, and ask this server and no other."""
    policy = {
        "default-src": "'none'",
        "script-src": _digest(page, "script"),
        "style-src": _digest(page, "style"),
        "connect-src": "'self'",
        "img-src": "data:",  # the empty icon
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }


def _digest(page: str, element: str) -> str:
    """The source expression of the one inline element of this name, as Content Security Policy 3 defines it."""
    [content] = re.findall(f"<{element}>(.*?)</{element}>", page, re.DOTALL)
    return f"'sha256-{b64encode(sha256(content.encode()).digest()).decode()}'"
