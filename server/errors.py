"""Errors a client sees: in the shape of the API that it called, one line, no internals."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

import msgspec
from starlette.responses import Response

MESSAGES = "/v1/messages"
"""Where, and below which, errors have Anthropic's shape."""

MESSAGES_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
OVERLOADED = 529
"""Anthropic's status where others say 503."""

WANTED = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "finite_number": "a finite number",
    "float_type": "a number",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "int_from_float": "an integer",
    "int_type": "an integer",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "list_type": "a list",
    "literal_error": "{expected}",
    "model_attributes_type": "an object",
    "model_type": "an object",
    "string_pattern_mismatch": "a text of the form {pattern}",
    "string_too_long": "at most {max_length} characters",
    "string_too_short": "at least {min_length} characters",
    "string_type": "a string",
    "too_long": "at most {max_length} items",
    "too_short": "at least {min_length} items",
}
"""What a field takes, by pydantic's name of what is wrong with a value."""


@dataclass(eq=False)
class APIError(Exception):
    """An answer in OpenAI's error shape. The message is one line and holds no path, address or traceback."""

    status: int
    message: str
    _: KW_ONLY
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] | None = None

    def __str__(self) -> str:
        return self.message

    @property
    def kind(self) -> str:
        """OpenAI's `type`: who is to blame."""
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"

    def envelope(self) -> dict[str, Any]:
        """The body: all four keys are always there."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def messages_envelope(self) -> dict[str, Any]:
        """The body in Anthropic's shape."""
        kind = MESSAGES_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}


def invalid(param: str | None, message: str, code: str | None = "invalid_value") -> APIError:
    """A 400 that names the offending parameter."""
    return APIError(400, message, param=param, code=code)


def explain(kind: str, context: Mapping[str, Any], value: Any) -> str:
    """Say what a field takes and what it got; of the client's own data only numbers, types and lengths."""
    if kind == "value_error":
        return str(context["error"])
    if kind == "extra_forbidden":
        return "this server knows no such field"
    bounds = {name: f"{bound:g}" if isinstance(bound, float) else bound for name, bound in context.items()}
    return f"it must be {WANTED.get(kind, 'something else').format_map(bounds)}, not {_got(kind, value)}"


def _got(kind: str, value: Any) -> str:
    if kind in ("string_too_long", "string_too_short", "too_long", "too_short"):
        return str(len(value))
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value) if abs(value) < 10**18 else "a number so large"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str):
        return "this string" if kind in ("literal_error", "string_pattern_mismatch") else "a string"
    return {list: "a list", dict: "an object", type(None): "null"}.get(type(value), "this")


def internal_error() -> APIError:
    """A 500 with a fixed text: the details are in the server's log only."""
    return APIError(500, "The server met an internal error; see its log.", code="internal_error")


def engine_unavailable() -> APIError:
    """A 503 while no engine runs."""
    return APIError(503, "The engine is not running.", code="engine_dead", headers={"Retry-After": "5"})


def draining() -> APIError:
    """A 503 once the server has been told to end."""
    return APIError(503, "The server is shutting down.", code="draining", headers={"Retry-After": "5"})


def queue_full(limit: str) -> APIError:
    """A 429 while as much waits as may."""
    message = f"The queue is full ({limit}); try again later."
    return APIError(429, message, code="queue_full", headers={"Retry-After": "1"})


def is_messages(path: str) -> bool:
    """Whether a path belongs to Anthropic's API."""
    return path == MESSAGES or path.startswith(f"{MESSAGES}/")


def answer(error: APIError, scope: Mapping[str, Any]) -> Response:
    """The response that says so, in the shape of the API that was called, as far as that is known."""
    body, status = error.envelope(), error.status
    if is_messages(scope.get("path", "")):
        body = error.messages_envelope() | {"request_id": scope.get("state", {}).get("request_id")}
        status = OVERLOADED if status == 503 else status
    return Response(msgspec.json.encode(body), status, error.headers, "application/json")


def queue_timed_out() -> APIError:
    """A 503 to a request that waited too long for its turn."""
    message = "The server is too busy: the request waited too long to begin; try again later."
    return APIError(503, message, code="queue_timeout", headers={"Retry-After": "5"})


def request_timed_out() -> APIError:
    """A 504 to a request that took too long."""
    return APIError(504, "The request took longer than the server allows.", code="request_timeout")
