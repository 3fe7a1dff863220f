"""Prometheus metrics: plain numbers here, turned into Prometheus' form when somebody asks.

The latter half of each name is the one vLLM uses, in base units, so a dashboard ports by replacing the prefix. Every
series exists from the start, at 0. At any time: started = running + waiting + the sum of finished requests.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE
from prometheus_client.registry import Collector

from octavo.scheduler.messages import EngineStats, FinishReason, MemoryLine, Ready, StepReport, TokenEvent
from octavo.server import __version__
from octavo.server.memory import MemoryAccounts

__all__ = ["CONTENT_TYPE", "Histogram", "Metrics"]

TOKEN_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05),
    *(0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0),
)
FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
REQUEST_BUCKETS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0),
    *(10.0, 15.0, 30.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0),
)
MEMORY_KINDS = ("planned", "allocated", "used", "peak")
REJECTIONS = ("queue_full", "queue_tokens", "draining")


class Histogram:
    """Counts of observations by upper bound; much cheaper to add to than a locked Prometheus metric."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one observation."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self, name: str, text: str) -> HistogramMetricFamily:
        """Return cumulative buckets and the sum, as Prometheus wants them."""
        total = 0
        buckets = []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else repr(bound), float(total)))
        family = HistogramMetricFamily(name, text)
        family.add_metric([], buckets, self._sum)
        return family


@dataclass(slots=True)
class _Clock:
    """When a request was submitted and when its last token came, in seconds of the monotonic clock."""

    submitted: float
    queued_tokens: int
    """Its prompt's tokens while it waits for its first admission; 0 from then on."""
    last_token: float | None = None


class Metrics(Collector):
    """Everything the server counts. Used by one event loop."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._live: dict[int, _Clock] = {}
        self._ready: Ready | None = None
        self._memory = MemoryAccounts()
        self._engine_up = False
        self._last_step_timestamp = 0.0
        self._heartbeat = 0.0
        self.stats = EngineStats()
        self.started = 0
        self.finished = dict.fromkeys(get_args(FinishReason), 0)
        self.rejections = dict.fromkeys(REJECTIONS, 0)
        self.prompt_tokens = 0
        self.queued_tokens = 0
        """Prompt tokens of requests that the engine has not admitted yet."""
        self.cached_tokens = 0
        self.generated_tokens = 0
        self._first_token = Histogram(FIRST_TOKEN_BUCKETS)
        self._between_tokens = Histogram(TOKEN_BUCKETS)
        self._whole_request = Histogram(REQUEST_BUCKETS)
        self._queue = Histogram(REQUEST_BUCKETS)
        self._schedule = Histogram(TOKEN_BUCKETS)
        self._device = Histogram(TOKEN_BUCKETS)
        self._commit = Histogram(TOKEN_BUCKETS)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    @property
    def running(self) -> int:
        """Requests the engine computes, as of its last report."""
        return min(self.stats.running, len(self._live))

    @property
    def waiting(self) -> int:
        """Requests submitted that the engine does not compute yet, or not at the moment."""
        return len(self._live) - self.running

    @property
    def heartbeat_age(self) -> float:
        """Seconds since the last finished step, or since there is work if that is shorter; 0 while there is none."""
        return self._clock() - self._heartbeat if self._live else 0.0

    @property
    def cache_usage(self) -> float:
        """Share of the pool that live requests hold, 0 .. 1."""
        total = self.stats.blocks_free + self.stats.blocks_cached + self.stats.blocks_referenced
        return self.stats.blocks_referenced / total if total else 0.0

    def engine_ready(self, ready: Ready) -> None:
        """The engine waits for requests."""
        self._ready = ready
        self._memory.engine_ready(ready)
        self._engine_up = True
        self._heartbeat = self._clock()
        self.stats = EngineStats(blocks_free=ready.blocks)

    def engine_lost(self) -> None:
        """The engine is gone: live requests end as errors."""
        self._engine_up = False
        for request in tuple(self._live):
            self._finish(request, "error", self._clock())

    def request_started(self, request: int, prompt_tokens: int) -> None:
        """A request was submitted."""
        self.started += 1
        self.prompt_tokens += prompt_tokens
        self.queued_tokens += prompt_tokens
        if not self._live:
            self._heartbeat = self._clock()
        self._live[request] = _Clock(self._clock(), prompt_tokens)

    def rejected(self, reason: str) -> None:
        """A request was refused for lack of room; the reason is one of REJECTIONS."""
        self.rejections[reason] += 1

    def step(self, report: StepReport) -> None:
        """Take a report into account."""
        now = self._clock()
        stats = report.stats
        if stats.steps_total != self.stats.steps_total:
            self._last_step_timestamp = time.time()
            self._heartbeat = now
            self._schedule.observe(stats.schedule_seconds)
            self._device.observe(stats.device_seconds)
            self._commit.observe(stats.commit_seconds)
        self.stats = stats
        for event in report.events:
            self._event(event, now)

    def memory(self) -> list[MemoryLine]:
        """Return the ledger as it is now."""
        return self._memory.lines(self.stats)

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format, of the content type CONTENT_TYPE."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        """Yield every metric. Called by the Prometheus library."""
        yield from self._request_metrics()
        yield from self._token_metrics()
        yield from self._latency_metrics()
        yield from self._engine_metrics()
        yield from self._memory_metrics()

    def _event(self, event: TokenEvent, now: float) -> None:
        clock = self._live.get(event.request)
        if clock is None:
            return
        if event.first:
            self._leave_queue(clock)
            self.cached_tokens += event.cached_tokens
            self._queue.observe(event.queue_seconds)
        if event.token is not None:
            self.generated_tokens += 1
            if clock.last_token is None:
                self._first_token.observe(now - clock.submitted)
            else:
                self._between_tokens.observe(now - clock.last_token)
            clock.last_token = now
        if event.finish is not None:
            self._finish(event.request, event.finish, now)

    def _finish(self, request: int, reason: FinishReason, now: float) -> None:
        clock = self._live.pop(request)
        self._leave_queue(clock)
        self._whole_request.observe(now - clock.submitted)
        self.finished[reason] += 1

    def _leave_queue(self, clock: _Clock) -> None:
        self.queued_tokens -= clock.queued_tokens
        clock.queued_tokens = 0

    def _request_metrics(self) -> Iterator[Metric]:
        yield _gauge("requests_running", "Requests being computed.", self.running)
        yield _gauge("requests_waiting", "Requests submitted and not being computed.", self.waiting)
        yield _gauge("queued_tokens", "Prompt tokens of requests not admitted yet.", self.queued_tokens)
        yield _counter("request_started", "Requests submitted to the engine, one for each choice.", self.started)
        finished = CounterMetricFamily("octavo_request_success", "Finished requests.", labels=["finished_reason"])
        for reason, count in self.finished.items():
            finished.add_metric([reason], count)
        yield finished
        rejected = CounterMetricFamily("octavo_admission_rejections", "Refused requests.", labels=["reason"])
        for reason, count in self.rejections.items():
            rejected.add_metric([reason], count)
        yield rejected

    def _token_metrics(self) -> Iterator[Metric]:
        stats = self.stats
        yield _counter(
            "prompt_tokens", "Prompt tokens of submitted requests, cached ones included.", self.prompt_tokens
        )
        yield _counter("prompt_tokens_cached", "Prompt tokens whose KV was found in the cache.", self.cached_tokens)
        yield _counter("generation_tokens", "Generated tokens.", self.generated_tokens)
        yield _counter("prefix_cache_queries", "Tokens looked up in the prefix cache.", stats.prefix_queries_total)
        yield _counter("prefix_cache_hits", "Tokens found in the prefix cache.", stats.prefix_hits_total)
        yield _counter("preemptions", "Requests put back for lack of KV blocks.", stats.preemptions_total)

    def _latency_metrics(self) -> Iterator[Metric]:
        yield self._first_token.family("octavo_time_to_first_token_seconds", "From submission to the first token.")
        yield self._between_tokens.family("octavo_inter_token_latency_seconds", "Between tokens of one request.")
        yield self._whole_request.family("octavo_e2e_request_latency_seconds", "From submission to the end.")
        yield self._queue.family("octavo_request_queue_time_seconds", "From arrival in the engine to admission.")
        yield self._schedule.family("octavo_step_schedule_seconds", "Choosing what a step computes.")
        yield self._device.family("octavo_step_device_seconds", "Computing a step, as the engine waits for it.")
        yield self._commit.family("octavo_step_commit_seconds", "Taking a step's results into account.")

    def _engine_metrics(self) -> Iterator[Metric]:
        stats, ready = self.stats, self._ready
        yield _gauge("engine_up", "Whether the engine takes requests.", self._engine_up)
        yield _counter("steps", "Steps computed.", stats.steps_total)
        yield _gauge("step_tokens", "Tokens computed by the last step.", stats.step_tokens)
        yield _gauge("batch_size", "Requests computed by the last step.", stats.step_rows)
        yield _gauge("last_step_timestamp_seconds", "Unix time of the last step.", self._last_step_timestamp)
        yield _gauge("engine_heartbeat_age_seconds", "Since the last step; 0 without work.", self.heartbeat_age)
        yield _gauge("load_seconds", "Time the engine took to load.", ready.load_seconds if ready else 0)
        yield _gauge(
            "batch_invariant",
            "Whether a request's tokens are independent of what else is computed.",
            bool(ready and ready.batch_invariant),
        )
        names = ["version", "architecture", "device", "dtype", "kernels"]
        info = GaugeMetricFamily("octavo_build_info", "What runs here; always 1.", labels=names)
        engine = [ready.architecture, ready.device, ready.dtype, ready.kernels] if ready else [""] * 4
        info.add_metric([__version__, *engine], 1)
        yield info

    def _memory_metrics(self) -> Iterator[Metric]:
        stats, ready = self.stats, self._ready
        blocks = GaugeMetricFamily("octavo_kv_blocks", "Blocks of the KV pool.", labels=["state"])
        blocks.add_metric(["used"], stats.blocks_referenced)
        blocks.add_metric(["cached"], stats.blocks_cached)
        blocks.add_metric(["free"], stats.blocks_free)
        yield blocks
        yield _gauge("kv_cache_usage_ratio", "Share of the pool that live requests hold.", self.cache_usage)
        yield _gauge("kv_bytes_per_token", "K and V of one token.", ready.kv_bytes_per_token if ready else 0)
        text = "Memory by bucket: as planned before loading, as allocated, in use, and the most that was in use."
        memory = GaugeMetricFamily("octavo_memory_bytes", text, labels=["bucket", "kind"])
        for line in self.memory():
            for kind in MEMORY_KINDS:
                memory.add_metric([line.bucket, kind], getattr(line, kind))
        yield memory
        yield _gauge("memory_budget_bytes", "What the buckets may take.", ready.memory_budget if ready else 0)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"octavo_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"octavo_{name}", text, value=value)
