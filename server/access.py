"""Who may ask for what: API keys, and Host headers that are what they seem.

Both look at `scope["path"]`, by which routes are matched; an URL put together from headers of
the client's choice decides nothing.
"""

import hmac
import re
from collections.abc import Iterable
from hashlib import sha256

from starlette.types import Scope

from octavo.server.errors import APIError

HOST = re.compile(rb"([A-Za-z0-9._~-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")


def check_host(scope: Scope) -> None:
    """Raise 400 for a Host header that is missing, doubled, or no host."""
    hosts = _values(scope, b"host")
    old = scope.get("http_version") == "1.0" and not hosts
    if not old and (len(hosts) != 1 or not HOST.fullmatch(hosts[0])):
        raise APIError(400, "The request needs exactly one Host header, with a host and perhaps a port.")


class AccessRules:
    """Asks for a key on every path but /health and those below it. Without any key, all may ask for everything."""

    def __init__(self, keys: Iterable[str] = (), *, metrics_open: bool = False, metrics_key: str | None = None) -> None:
        """`metrics_open`: whether /metrics needs no key. `metrics_key`: a key for /metrics alone."""
        self._keys = _digests(keys)
        self._metrics_keys = self._keys + _digests((metrics_key,) if metrics_key else ())
        self._metrics_open = metrics_open

    def check(self, scope: Scope) -> None:
        """Raise 401 for a request without the key that it needs."""
        if not self._allows(scope):
            raise APIError(
                401,
                "A valid API key is needed: send the header 'Authorization: Bearer KEY' or 'x-api-key: KEY'.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _allows(self, scope: Scope) -> bool:
        path = scope["path"]
        if path == "/health" or path.startswith("/health/") or (path == "/metrics" and self._metrics_open):
            return True
        keys = self._metrics_keys if path == "/metrics" else self._keys
        return not keys or _is_among(_given_key(scope), keys)


def _digests(keys: Iterable[str]) -> tuple[bytes, ...]:
    return tuple(sha256(key.encode()).digest() for key in keys)


def _is_among(given: bytes, digests: Iterable[bytes]) -> bool:
    """Compare with all of them, so that the time tells nothing about any."""
    digest = sha256(given).digest()
    return sum(hmac.compare_digest(digest, known) for known in digests) > 0


def _given_key(scope: Scope) -> bytes:
    """The key a client sends: as OpenAI's clients do, or in Anthropic's header."""
    bearers = _values(scope, b"authorization")
    if len(bearers) == 1:
        scheme, _, key = bearers[0].partition(b" ")
        return key.strip() if scheme.lower() == b"bearer" else b""
    others = _values(scope, b"x-api-key")
    return others[0] if len(others) == 1 and not bearers else b""


def _values(scope: Scope, name: bytes) -> list[bytes]:
    return [value for header, value in scope["headers"] if header == name]
