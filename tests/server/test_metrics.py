import math
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as PrometheusHistogram
from support.measuring import read_samples
from support.scripted_engine import ready as scripted_ready

from octavo.scheduler.messages import EngineConfig, EngineStats, FinishReason, StepReport, TokenEvent
from octavo.server.histogram import TOKEN_SECONDS, Histogram
from octavo.server.logs import ActivityLog
from octavo.server.metrics import Metrics

READY = scripted_ready(EngineConfig(model="scripted"), blocks=100)

NAMES = """
    requests_running requests_waiting requests_paused request_started_total request_success_total requests_resumed_total
    admission_rejections_total http_responses_total prompt_tokens_total prompt_tokens_cached_total
    generation_tokens_total prefix_cache_queries_total prefix_cache_hits_total preemptions_total
    computed_tokens_total engine_up engine_restarts_total steps_total failed_steps_total last_step_timestamp_seconds
    engine_heartbeat_age_seconds load_seconds batch_invariant build_info kv_blocks kv_cache_usage_ratio
    kv_bytes_per_token queued_tokens memory_bytes memory_budget_bytes
"""
HISTOGRAMS = """
    time_to_first_token_seconds inter_token_latency_seconds request_time_per_output_token_seconds
    e2e_request_latency_seconds request_queue_time_seconds request_prefill_time_seconds request_decode_time_seconds
    request_prompt_tokens request_generation_tokens step_schedule_seconds step_device_seconds step_commit_seconds
    step_tokens step_requests event_loop_lag_seconds
"""


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def samples(metrics: Metrics) -> dict[str, float]:
    return read_samples(metrics.exposition().decode())


def report(*events: TokenEvent, **stats: float) -> StepReport:
    return StepReport(events=events, stats=EngineStats(**stats))


def token(request: int, finish: FinishReason | None = None, **fields: object) -> TokenEvent:
    return TokenEvent(request=request, token=3, finish=finish, **fields)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def metrics(clock: Clock) -> Iterator[Metrics]:
    metrics = Metrics(clock)
    metrics.engine_ready(READY)
    return metrics


def test_g03_every_series_is_there_from_the_start_at_zero() -> None:
    fresh = Metrics()
    start = samples(fresh)
    parts = {f"{name}_{part}" for name in HISTOGRAMS.split() for part in ("bucket", "sum", "count")}
    assert {name.partition("{")[0] for name in start} == set(NAMES.split()) | parts
    assert [name.partition("{")[0] for name, value in start.items() if value != 0] == ["build_info"]
    fresh.engine_ready(READY)
    fresh.request_started(1, 10)
    fresh.step(report(token(1, "stop", first=True), steps_total=1))
    unlabelled = [{name for name in found if "version=" not in name} for found in (start, samples(fresh))]
    assert unlabelled[0] == unlabelled[1]


def test_a_request_is_counted_through_its_life(metrics: Metrics, clock: Clock) -> None:
    metrics.request_started(1, 20)
    metrics.request_started(2, 30)
    assert (metrics.running, metrics.waiting) == (0, 2)
    clock.now += 0.5
    metrics.step(report(token(1, first=True, queue_seconds=0.25, cached_tokens=16), running=1, waiting=1))
    assert (metrics.running, metrics.waiting) == (1, 1)
    clock.now += 0.02
    metrics.step(report(token(1), token(2, first=True), running=2))
    clock.now += 0.04
    metrics.step(report(token(1, "length"), TokenEvent(request=2, finish="abort"), running=0))
    found = samples(metrics)
    assert found["request_started_total"] == 2
    assert found["request_success_total{finished_reason=length}"] == 1
    assert found["request_success_total{finished_reason=abort}"] == 1
    assert found["prompt_tokens_total"] == 50
    assert found["prompt_tokens_cached_total"] == 16
    assert found["generation_tokens_total"] == 4
    assert found["time_to_first_token_seconds_sum"] == pytest.approx(0.5 + 0.52)
    assert found["inter_token_latency_seconds_count"] == 2
    assert found["inter_token_latency_seconds_sum"] == pytest.approx(0.06)
    assert found["inter_token_latency_seconds_bucket{le=0.02}"] == 1
    assert found["inter_token_latency_seconds_bucket{le=0.05}"] == 2
    assert found["e2e_request_latency_seconds_sum"] == pytest.approx(2 * 0.56)
    assert found["request_queue_time_seconds_sum"] == 0.25
    assert found["request_prefill_time_seconds_sum"] == pytest.approx(0.25 + 0.52)
    assert found["request_decode_time_seconds_sum"] == pytest.approx(0.06)
    assert found["request_time_per_output_token_seconds_sum"] == pytest.approx(0.03)
    assert found["request_time_per_output_token_seconds_count"] == 1
    assert found["request_prompt_tokens_sum"] == 50
    assert found["request_generation_tokens_sum"] == 4
    assert found["requests_running"] == found["requests_waiting"] == 0


def test_an_engine_that_is_lost_ends_its_requests_as_errors(metrics: Metrics) -> None:
    assert samples(metrics)["engine_up"] == 1
    metrics.request_started(1, 5)
    metrics.engine_lost()
    metrics.step(report(token(1, "stop")))
    found = samples(metrics)
    assert found["engine_up"] == 0
    assert found["request_success_total{finished_reason=error}"] == 1
    assert found["request_success_total{finished_reason=stop}"] == 0


def test_the_engines_state_and_memory_are_shown(metrics: Metrics) -> None:
    stats = {"blocks_free": 70, "blocks_cached": 20, "blocks_referenced": 10, "steps_total": 3, "step_tokens": 40}
    rows = {"step_rows": 5, "step_decode_tokens": 4}
    metrics.step(report(**stats, **rows, preemptions_total=2, prefix_queries_total=9, prefix_hits_total=4))
    found = samples(metrics)
    assert [found[f"kv_blocks{{state={state}}}"] for state in ("used", "cached", "free")] == [10, 20, 70]
    assert found["kv_cache_usage_ratio"] == 0.1
    assert (found["steps_total"], found["step_tokens_sum"], found["step_requests_sum"]) == (3, 40, 5)
    assert [found[f"computed_tokens_total{{kind={kind}}}"] for kind in ("decode", "prefill")] == [4, 36]
    assert (found["preemptions_total"], found["prefix_cache_queries_total"], found["prefix_cache_hits_total"]) == (
        2,
        9,
        4,
    )
    assert found["batch_invariant"] == 1


def test_g03_no_counter_falls_when_an_engine_takes_the_place_of_another(metrics: Metrics) -> None:
    totals = {"steps_total": 5, "preemptions_total": 2, "prefix_queries_total": 9, "prefix_hits_total": 4}
    metrics.step(report(**totals))
    for _ in range(2):
        before = samples(metrics)
        metrics.engine_lost()
        assert samples(metrics)["steps_total"] == before["steps_total"]
        metrics.engine_ready(READY)
        assert samples(metrics)["steps_total"] == before["steps_total"]
        metrics.step(report(steps_total=1, prefix_queries_total=3))
        found = samples(metrics)
        assert found["steps_total"] == before["steps_total"] + 1
        assert found["prefix_cache_queries_total"] == before["prefix_cache_queries_total"] + 3
        assert (found["preemptions_total"], found["prefix_cache_hits_total"]) == (2, 4)


def test_responses_are_counted_by_status_from_a_fixed_set(metrics: Metrics) -> None:
    for status in (200, 200, 503, 418):
        metrics.responded(status)
    found = samples(metrics)
    assert [found[f"http_responses_total{{code={code}}}"] for code in (200, 503, 404, "other")] == [2, 1, 0, 1]


def test_the_engine_is_as_old_as_its_last_step_while_there_is_work(metrics: Metrics, clock: Clock) -> None:
    clock.now += 60
    assert metrics.heartbeat_age == 0
    metrics.request_started(1, 5)
    clock.now += 2
    metrics.request_started(2, 5)
    clock.now += 1
    assert samples(metrics)["engine_heartbeat_age_seconds"] == 3
    metrics.step(report(token(1, first=True), steps_total=1, running=2))
    clock.now += 4
    metrics.step(report(TokenEvent(request=1, finish="abort"), steps_total=1, running=1))
    assert metrics.heartbeat_age == 4
    metrics.step(report(token(2, "stop", first=True), steps_total=2))
    clock.now += 60
    assert metrics.heartbeat_age == 0


def test_a_paused_request_is_counted_among_the_others_and_is_no_work(metrics: Metrics, clock: Clock) -> None:
    for number in (1, 2):
        metrics.request_started(number, 5)
    metrics.step(report(token(1, first=True), token(2, first=True), steps_total=1, running=2))
    metrics.request_paused(1, True)
    metrics.request_paused(7, True)
    assert (metrics.running, metrics.waiting, samples(metrics)["requests_paused"]) == (2, 0, 1)
    clock.now += 3
    assert metrics.heartbeat_age == 3
    metrics.request_paused(2, True)
    assert (metrics.heartbeat_age, metrics.paused) == (0, 2)
    clock.now += 60
    metrics.request_paused(1, False)
    clock.now += 2
    assert (metrics.heartbeat_age, metrics.paused) == (2, 1)
    metrics.step(report(token(1), steps_total=2, running=2))
    assert samples(metrics)["inter_token_latency_seconds_sum"] == 2  # the time of the pause is the client's
    metrics.step(report(token(1, "stop"), TokenEvent(request=2, finish="abort"), steps_total=3))
    assert (metrics.heartbeat_age, metrics.paused) == (0, 0)
    assert samples(metrics)["request_decode_time_seconds_sum"] == 65


def test_a_report_without_a_step_is_no_step(metrics: Metrics) -> None:
    metrics.step(report(steps_total=1, device_seconds=0.5))
    metrics.step(report(steps_total=1))
    assert samples(metrics)["step_device_seconds_count"] == 1
    assert samples(metrics)["step_device_seconds_sum"] == 0.5


def test_refusals_are_counted_by_reason(metrics: Metrics) -> None:
    metrics.rejected("queue_full")
    assert samples(metrics)["admission_rejections_total{reason=queue_full}"] == 1
    assert samples(metrics)["admission_rejections_total{reason=draining}"] == 0


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["start", "run", "pause", "stop", "length", "abort", "error"]), st.integers(0, 9))
    )
)
def test_started_requests_are_always_running_waiting_or_finished(actions: list[tuple[str, int]]) -> None:
    metrics = Metrics()
    live: set[int] = set()
    for action, number in actions:
        if action == "start":
            live.add(metrics.started)
            metrics.request_started(metrics.started, 1)
        elif action == "run":
            metrics.step(report(running=number))
        elif action == "pause":
            metrics.request_paused(number, number % 2 == 0)
        elif live:
            metrics.step(report(TokenEvent(request=live.pop(), finish=action)))
        assert metrics.running >= 0
        assert metrics.waiting >= 0
        assert 0 <= metrics.paused <= len(live)
        assert metrics.started == metrics.running + metrics.waiting + sum(metrics.finished.values())


@settings(deadline=None)
@given(st.lists(st.one_of(st.floats(0, 20), st.sampled_from(TOKEN_SECONDS))))
def test_histograms_agree_with_those_of_the_prometheus_library(values: list[float]) -> None:
    registry = CollectorRegistry()
    theirs = PrometheusHistogram("h", "text", buckets=TOKEN_SECONDS, registry=registry)
    ours = Histogram(TOKEN_SECONDS)
    for value in values:
        theirs.observe(value)
        ours.observe(value)
    [family] = [metric for metric in registry.collect() if metric.type == "histogram"]
    expected = {(s.name, s.labels.get("le")): s.value for s in family.samples if not s.name.endswith("_created")}
    found = {(s.name, s.labels.get("le")): s.value for s in ours.family("h", "text").samples}
    assert found.keys() == expected.keys()
    assert all(math.isclose(found[key], expected[key]) for key in expected)


def test_the_activity_line_tells_rates_since_the_last_one_and_is_silent_when_idle(
    metrics: Metrics, clock: Clock
) -> None:
    activity = ActivityLog(metrics, clock)
    clock.now += 10
    assert activity.line() is None
    metrics.request_started(1, 50)
    metrics.request_started(2, 50)
    stats = {
        "running": 1,
        "blocks_free": 75,
        "blocks_referenced": 25,
        "prefix_queries_total": 8,
        "prefix_hits_total": 2,
    }
    for _ in range(20):
        metrics.step(report(token(1), **stats))
    for _ in range(3):
        metrics.responded(429)
    clock.now += 10
    assert activity.line() == (
        "Avg prompt throughput: 10.0 tokens/s, Avg generation throughput: 2.0 tokens/s, "
        "Running: 1 reqs, Waiting: 1 reqs, Refused: 3 reqs, KV cache usage: 25.0%, Prefix cache hit rate: 25.0%"
    )
    clock.now += 10
    assert "0.0 tokens/s, Running: 1 reqs, Waiting: 1 reqs, Refused: 0 reqs" in (activity.line() or "")
    metrics.engine_lost()
    clock.now += 10
    assert activity.line() is None
