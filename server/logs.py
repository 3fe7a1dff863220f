"""Logging: one short line to stderr for whatever happens, and one every ten seconds while there is work."""

import logging
import sys
import time
from collections.abc import Callable
from typing import Any

from octavo.scheduler.log_format import formatter
from octavo.server.life import Life
from octavo.server.metrics import Metrics

INTERVAL_SECONDS = 10.0

_QUIET_ROUTES = frozenset({"/health", "/health/live", "/health/ready", "/health/startup", "/metrics"})


_log = logging.getLogger(__name__)


def configure(level: str, log_format: str = "text") -> None:
    """Log Octavo's own messages from this level on, and warnings of everything else."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(log_format, "server"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("octavo").setLevel(level.upper())
    access = logging.getLogger("uvicorn.access")
    access.setLevel(level.upper())
    access.addFilter(is_worth_a_line)


def is_worth_a_line(record: logging.LogRecord) -> bool:
    """Whether an access is logged: probes and scrapes, which come every few seconds for ever, are not.

    Nor are refusals by a full queue, each of which takes time from what is computed: `ActivityLog` counts them.

    uvicorn's arguments are the client's address, method, path with query, HTTP version and status.
    """
    arguments = record.args
    if not isinstance(arguments, tuple) or len(arguments) < 5:
        return True
    return arguments[4] != 429 and str(arguments[2]).partition("?")[0] not in _QUIET_ROUTES


def log_request(life: Life) -> None:
    """Log the end of a request to the engine. Neither its prompt nor its answer is logged."""
    if life.origin is None:
        return
    fields: dict[str, Any] = {
        "request_id": life.origin.identity,
        "operation": life.origin.operation,
        "model": life.origin.model,
        "finish_reason": life.finish,
        "prompt_tokens": life.prompt_tokens,
        "cached_tokens": life.cached_tokens,
        "generated_tokens": life.tokens,
        "queue_seconds": _seconds(life, life.admitted),
        "first_token_seconds": _seconds(life, life.first_token),
        "seconds": _seconds(life, life.ended),
    }
    text = (
        "request {request_id}: {finish_reason}, {prompt_tokens} prompt tokens, {cached_tokens} of them cached, "
        "{generated_tokens} generated; queue {queue_seconds}, first token {first_token_seconds}, all {seconds}"
    )
    spelt = {name: _spelt(value) if name.endswith("seconds") else value for name, value in fields.items()}
    _log.info("%s", text.format_map(spelt), extra={"fields": fields})


def _spelt(seconds: Any) -> str:
    return "-" if seconds is None else f"{seconds} s"


def _seconds(life: Life, moment: float | None) -> float | None:
    return None if moment is None else round(moment - life.submitted, 4)


class ActivityLog:
    """Throughput since the last line, and the state of the engine."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._last = (clock(), metrics.prompt_tokens, metrics.generated_tokens, metrics.refused)

    def line(self) -> str | None:
        """Return the next line; None if nothing has happened since the last one and nothing runs."""
        metrics = self._metrics
        now = (self._clock(), metrics.prompt_tokens, metrics.generated_tokens, metrics.refused)
        elapsed, prompt, generated, refused = (new - old for new, old in zip(now, self._last, strict=True))
        self._last = now
        if not (prompt or generated or metrics.running or metrics.waiting):
            return None
        stats = metrics.stats
        hit_rate = stats.prefix_hits_total / max(1, stats.prefix_queries_total)
        return (
            f"Avg prompt throughput: {prompt / elapsed:.1f} tokens/s, "
            f"Avg generation throughput: {generated / elapsed:.1f} tokens/s, "
            f"Running: {metrics.running} reqs, Waiting: {metrics.waiting} reqs, Refused: {refused} reqs, "
            f"KV cache usage: {metrics.cache_usage:.1%}, Prefix cache hit rate: {hit_rate:.1%}"
        )
