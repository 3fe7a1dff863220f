import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from octavo.scheduler.messages import EngineStats, FinishReason, StepReport, TokenEvent
from octavo.server.life import Origin
from octavo.server.metrics import Metrics
from octavo.server.tracing import Tracing

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Server:
    """Metrics that report to a tracing with an exporter in memory, and a clock."""

    def __init__(self) -> None:
        self.now = 100.0
        self.exporter = InMemorySpanExporter()
        self.metrics = Metrics(lambda: self.now)
        tracing = Tracing(SimpleSpanProcessor(self.exporter), lambda: self.now)
        self.metrics.observers.append(tracing.hear)

    def submit(self, traceparent: str | None = None) -> None:
        self.metrics.request_started(1, 20)
        self.metrics.originates(1, Origin("r-1", "chat", "smollm2", traceparent))

    def after(self, seconds: float, **event: object) -> None:
        self.now += seconds
        self.metrics.step(StepReport(events=(TokenEvent(request=1, **event),), stats=EngineStats()))

    def finish(self, reason: FinishReason, seconds: float) -> None:
        self.after(seconds, token=4, finish=reason)

    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self.exporter.get_finished_spans()}


def seconds(span: ReadableSpan) -> float:
    return (span.end_time - span.start_time) / 1e9


def test_a_request_is_a_span_with_its_phases() -> None:
    server = Server()
    server.submit(PARENT)
    server.after(0.5, token=3, first=True, queue_seconds=0.2, cached_tokens=16)
    server.finish("stop", 0.3)
    spans = server.spans()
    assert set(spans) == {"chat smollm2", "queue", "prefill", "decode"}
    whole = spans["chat smollm2"]
    assert whole.kind == SpanKind.SERVER
    assert [round(seconds(spans[name]), 6) for name in ("queue", "prefill", "decode")] == [0.2, 0.3, 0.3]
    assert seconds(whole) == pytest.approx(0.8, abs=1e-6)
    assert format(whole.context.trace_id, "032x") == PARENT.split("-")[1]
    assert format(whole.parent.span_id, "016x") == PARENT.split("-")[2]
    for name in ("queue", "prefill", "decode"):
        assert spans[name].parent.span_id == whole.context.span_id
        assert whole.start_time <= spans[name].start_time <= spans[name].end_time <= whole.end_time
    assert dict(whole.attributes) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "octavo",
        "gen_ai.request.model": "smollm2",
        "gen_ai.response.model": "smollm2",
        "gen_ai.response.id": "r-1",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 20,
        "gen_ai.usage.cache_read.input_tokens": 16,
        "gen_ai.usage.output_tokens": 2,
        "gen_ai.server.time_to_first_token": 0.5,
    }


def test_a_request_that_waited_in_vain_has_one_phase() -> None:
    server = Server()
    server.submit()
    server.after(0.5, finish="abort")
    assert set(server.spans()) == {"chat smollm2", "queue"}
    assert seconds(server.spans()["queue"]) == pytest.approx(0.5, abs=1e-6)


def test_an_engine_that_is_lost_leaves_spans_with_an_error() -> None:
    server = Server()
    server.submit("no traceparent at all")
    server.metrics.engine_lost()
    whole = server.spans()["chat smollm2"]
    assert whole.status.status_code == StatusCode.ERROR
    assert whole.attributes["error.type"] == "engine_error"
    assert whole.parent is None


def test_spans_carry_the_time_of_day() -> None:
    import time

    before = time.time_ns()
    server = Server()
    server.submit()
    server.finish("length", 1.0)
    span = server.spans()["chat smollm2"]
    assert before <= span.end_time <= time.time_ns()
