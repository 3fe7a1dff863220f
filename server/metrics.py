"""Prometheus metrics: plain numbers here, turned into Prometheus' form when somebody asks."""

from octavo.scheduler.messages import Ready, StepReport


class Metrics:
    """Everything the server counts."""

    def engine_ready(self, ready: Ready) -> None:
        """The engine waits for requests."""

    def engine_lost(self) -> None:
        """The engine is gone: live requests end as errors."""

    def request_started(self, request: int, prompt_tokens: int) -> None:
        """A request was submitted."""

    def step(self, report: StepReport) -> None:
        """Take a report into account."""

    def rejected(self, reason: str) -> None:
        """A request was refused for lack of room: "queue_full" or "draining"."""

    def exposition(self) -> bytes:
        """Return the metrics in Prometheus' text format, version 0.0.4."""
        return b""
