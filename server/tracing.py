"""OpenTelemetry traces: one span for each request to the engine, and in it the queue, the prefill and the decoding.

Attributes follow OpenTelemetry's semantic conventions for generative AI. Nothing of a prompt or an answer is exported.
"""

import time
from collections.abc import Callable, Iterator

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from octavo.server import __version__
from octavo.server.life import Life, Origin

EXPORT_SECONDS = 3
"""How long a collector may take to answer. A server that ends waits no longer than that for it."""


class Tracing:
    """Turns the lives of requests into spans, once they are over."""

    def __init__(self, processor: SpanProcessor, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._provider = TracerProvider(resource=Resource({"service.name": "octavo", "service.version": __version__}))
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("octavo", __version__)

    @classmethod
    def to(cls, endpoint: str) -> "Tracing":
        """Export to a collector, with OTLP over HTTP, from a thread of its own."""
        return cls(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_SECONDS)))

    def close(self) -> None:
        """Export what is left."""
        self._provider.shutdown()

    def hear(self, life: Life) -> None:
        """Export the spans of a request that has ended."""
        if life.origin is None:
            return
        offset = time.time() - self._clock()

        def nanoseconds(moment: float) -> int:
            return int((moment + offset) * 1e9)

        span = self._tracer.start_span(
            f"{life.origin.operation} {life.origin.model}",
            context=_parent(life.origin),
            kind=SpanKind.SERVER,
            start_time=nanoseconds(life.submitted),
            attributes=_attributes(life, life.origin),
        )
        inside = set_span_in_context(span)
        for name, start, end in _phases(life):
            phase = self._tracer.start_span(name, context=inside, start_time=nanoseconds(start))
            phase.end(nanoseconds(end))
        if life.finish == "error":
            span.set_status(Status(StatusCode.ERROR))
            span.set_attribute("error.type", "engine_error")
        span.end(nanoseconds(life.ended))


def _parent(origin: Origin) -> Context | None:
    """The client's span, where its header names one that is well-formed."""
    if origin.traceparent is None:
        return None
    return TraceContextTextMapPropagator().extract({"traceparent": origin.traceparent}, Context())


def _attributes(life: Life, origin: Origin) -> dict[str, str | int | float | list[str]]:
    attributes: dict[str, str | int | float | list[str]] = {
        "gen_ai.operation.name": origin.operation,
        "gen_ai.provider.name": "octavo",
        "gen_ai.request.model": origin.model,
        "gen_ai.response.model": origin.model,
        "gen_ai.response.id": origin.identity,
        "gen_ai.usage.input_tokens": life.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": life.cached_tokens,
        "gen_ai.usage.output_tokens": life.tokens,
        "gen_ai.response.finish_reasons": [str(life.finish)],
    }
    if life.first_token is not None:
        attributes["gen_ai.server.time_to_first_token"] = life.first_token - life.submitted
    return attributes


def _phases(life: Life) -> Iterator[tuple[str, float, float]]:
    """Yield name, start and end of each phase that the request reached."""
    admitted = life.ended if life.admitted is None else life.admitted
    yield "queue", life.submitted, admitted
    if life.admitted is not None:
        first_token = life.ended if life.first_token is None else life.first_token
        yield "prefill", admitted, first_token
        if life.first_token is not None:
            yield "decode", first_token, life.last_token
