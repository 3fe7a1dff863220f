"""What becomes of one request to the engine, from its submission to its end."""

from dataclasses import dataclass
from typing import Self

from fastapi import Request

from octavo.scheduler.messages import FinishReason


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a request to the engine came from: one choice of one request over HTTP."""

    identity: str
    """The id of the HTTP request; with several choices, followed by the number of this one."""
    operation: str
    """As OpenTelemetry calls it: chat or text_completion."""
    model: str
    traceparent: str | None = None
    """The client's trace, as its header names it."""

    @classmethod
    def of(cls, request: Request, operation: str, model: str) -> Self:
        """Where what this HTTP request asks for comes from."""
        return cls(request.state.request_id, operation, model, request.headers.get("traceparent"))


@dataclass(slots=True)
class Life:
    """Times are seconds of the clock that the metrics go by."""

    submitted: float
    prompt_tokens: int
    queued_tokens: int
    """The prompt's tokens while it waits for its first admission; 0 from then on."""
    origin: Origin | None = None
    cached_tokens: int = 0
    admitted: float | None = None
    first_token: float | None = None
    last_token: float = 0.0
    paused: bool = False
    """Whether it waits for its client to read."""
    resumed: float = 0.0
    """When it last ceased to wait for that."""
    tokens: int = 0
    ended: float = 0.0
    finish: FinishReason | None = None
