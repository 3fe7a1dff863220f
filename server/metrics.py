"""Prometheus metrics: plain numbers here, turned into Prometheus' form when somebody asks.

The latter half of each name is the one vLLM uses, in base units, so a dashboard ports by replacing the prefix. Every
series exists from the start, at 0. At any time: started = running + waiting + the sum of finished requests.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE
from prometheus_client.registry import Collector

from octavo.scheduler.messages import EngineStats, FinishReason, MemoryLine, Ready, StepReport, TokenEvent
from octavo.server import __version__
from octavo.server.histogram import HISTOGRAMS, Histogram
from octavo.server.life import Life, Origin
from octavo.server.memory import MemoryAccounts

__all__ = ["CONTENT_TYPE", "Metrics"]

MEMORY_KINDS = ("planned", "allocated", "used", "peak")
REJECTIONS = ("queue_full", "queue_tokens", "draining")
STATUSES = (200, 400, 401, 404, 405, 408, 413, 415, 429, 499, 500, 503, 504)
"""Of HTTP responses; whatever else there may be is counted as "other"."""


class Metrics(Collector):
    """Everything the server counts. Used by one event loop."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter, model: str = "") -> None:
        self._clock = clock
        self._model = model
        self._live: dict[int, Life] = {}
        self._ready: Ready | None = None
        self._memory = MemoryAccounts()
        self._engine_up = False
        self._last_step_timestamp = 0.0
        self._heartbeat = 0.0
        self.observers: list[Callable[[Life], None]] = []
        """Told of each request that has ended."""
        self.stats = EngineStats()
        self._past = EngineStats()
        """The totals of engines that are gone, so that no counter ever falls."""
        self.started = 0
        self.finished = dict.fromkeys(get_args(FinishReason), 0)
        self.rejections = dict.fromkeys(REJECTIONS, 0)
        self.prompt_tokens = 0
        self.queued_tokens = 0
        """Prompt tokens of requests that the engine has not admitted yet."""
        self.cached_tokens = 0
        self.generated_tokens = 0
        self.computed_tokens = {"prefill": 0, "decode": 0}
        self.engine_restarts = 0
        self.requests_resumed = 0
        self._responses: dict[int | str, int] = dict.fromkeys((*STATUSES, "other"), 0)
        self._histograms = {name: Histogram(bounds) for name, (_, bounds) in HISTOGRAMS.items()}
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
        return self._clock() - self._heartbeat if self._working else 0.0

    @property
    def paused(self) -> int:
        """Requests that wait for their clients to read."""
        return sum(life.paused for life in self._live.values())

    @property
    def _working(self) -> bool:
        """Whether the engine has something to compute."""
        return any(not life.paused for life in self._live.values())

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
        totals = {name: self._total(name) for name in EngineStats.__struct_fields__ if name.endswith("_total")}
        self._past = EngineStats(**totals)
        self.stats = EngineStats(blocks_free=ready.blocks)

    def engine_died(self) -> None:
        """The engine is gone; another is being started for the live requests."""
        self._engine_up = False

    def engine_replaced(self, requests: int) -> None:
        """An engine goes on with so many requests of one that died."""
        self.engine_restarts += 1
        self.requests_resumed += requests

    def engine_lost(self) -> None:
        """The engine is gone for good: live requests end as errors."""
        self._engine_up = False
        for request in tuple(self._live):
            self._finish(request, "error", self._clock())

    def request_started(self, request: int, prompt_tokens: int) -> None:
        """A request was submitted."""
        self.started += 1
        self.prompt_tokens += prompt_tokens
        self.queued_tokens += prompt_tokens
        if not self._working:
            self._heartbeat = self._clock()
        self._live[request] = Life(self._clock(), prompt_tokens, queued_tokens=prompt_tokens)

    def request_paused(self, request: int, paused: bool) -> None:
        """A request waits for its client to read, or does no longer; nothing happens if it has ended."""
        life = self._live.get(request)
        if life is None:
            return
        if not paused:
            life.resumed = self._clock()
            if not self._working:
                self._heartbeat = life.resumed
        life.paused = paused

    def originates(self, request: int, origin: Origin) -> None:
        """Note where a request that was just submitted came from."""
        self._live[request].origin = origin

    def rejected(self, reason: str) -> None:
        """A request was refused for lack of room; the reason is one of REJECTIONS."""
        self.rejections[reason] += 1

    def responded(self, status: int) -> None:
        """An HTTP response begins."""
        self._responses[status if status in self._responses else "other"] += 1

    @property
    def refused(self) -> int:
        """Requests that were answered 429."""
        return self._responses[429]

    def lagged(self, seconds: float) -> None:
        """The event loop came back to something this much later than it should have."""
        self._observe("event_loop_lag_seconds", seconds)

    def step(self, report: StepReport) -> None:
        """Take a report into account."""
        now = self._clock()
        stats = report.stats
        if stats.steps_total != self.stats.steps_total:
            self._last_step_timestamp = time.time()
            self._heartbeat = now
            self._observe("step_schedule_seconds", stats.schedule_seconds)
            self._observe("step_device_seconds", stats.device_seconds)
            self._observe("step_commit_seconds", stats.commit_seconds)
            self._observe("step_tokens", stats.step_tokens)
            self._observe("step_requests", stats.step_rows)
            self.computed_tokens["decode"] += stats.step_decode_tokens
            self.computed_tokens["prefill"] += stats.step_tokens - stats.step_decode_tokens
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
        for name, (text, _) in HISTOGRAMS.items():
            yield self._histograms[name].family(f"octavo_{name}", text)
        yield from self._engine_metrics()
        yield from self._memory_metrics()

    def _event(self, event: TokenEvent, now: float) -> None:
        life = self._live.get(event.request)
        if life is None:
            return
        if event.first:
            self._leave_queue(life)
            self.cached_tokens += event.cached_tokens
            life.cached_tokens = event.cached_tokens
            self._observe("request_queue_time_seconds", event.queue_seconds)
            life.admitted = life.submitted + event.queue_seconds
        if event.token is not None:
            self.generated_tokens += 1
            life.tokens += 1
            if life.first_token is None:
                life.first_token = now
                self._observe("time_to_first_token_seconds", now - life.submitted)
                self._observe("request_prefill_time_seconds", now - (life.admitted or life.submitted))
            else:
                self._observe("inter_token_latency_seconds", now - max(life.last_token, life.resumed))
            life.last_token = now
        if event.finish is not None:
            self._finish(event.request, event.finish, now)

    def _finish(self, request: int, reason: FinishReason, now: float) -> None:
        life = self._live.pop(request)
        self._leave_queue(life)
        life.finish, life.ended = reason, now
        self.finished[reason] += 1
        self._observe("e2e_request_latency_seconds", now - life.submitted)
        self._observe("request_prompt_tokens", life.prompt_tokens)
        self._observe("request_generation_tokens", life.tokens)
        if life.first_token is not None:
            decoding = life.last_token - life.first_token
            self._observe("request_decode_time_seconds", decoding)
            if life.tokens > 1:
                self._observe("request_time_per_output_token_seconds", decoding / (life.tokens - 1))
        for hear in self.observers:
            hear(life)

    def _total(self, name: str) -> int:
        """A total over all engines there have been."""
        return int(getattr(self._past, name) + getattr(self.stats, name))

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

    def _leave_queue(self, life: Life) -> None:
        self.queued_tokens -= life.queued_tokens
        life.queued_tokens = 0

    def _request_metrics(self) -> Iterator[Metric]:
        yield _gauge("requests_running", "Requests being computed.", self.running)
        yield _gauge("requests_waiting", "Requests submitted and not being computed.", self.waiting)
        text = "Requests, running or waiting, that go on once their clients have read what there is."
        yield _gauge("requests_paused", text, self.paused)
        yield _gauge("queued_tokens", "Prompt tokens of requests not admitted yet.", self.queued_tokens)
        yield _counter("request_started", "Requests submitted to the engine, one for each choice.", self.started)
        yield _counters("request_success", "Finished requests.", "finished_reason", self.finished)
        yield _counters("admission_rejections", "Requests refused for lack of room.", "reason", self.rejections)
        yield _counter("requests_resumed", "Requests that went on in a new engine.", self.requests_resumed)
        yield _counters("http_responses", "HTTP responses, by status.", "code", self._responses)

    def _token_metrics(self) -> Iterator[Metric]:
        yield _counter(
            "prompt_tokens", "Prompt tokens of submitted requests, cached ones included.", self.prompt_tokens
        )
        yield _counter("prompt_tokens_cached", "Prompt tokens whose KV was found in the cache.", self.cached_tokens)
        yield _counter("generation_tokens", "Generated tokens.", self.generated_tokens)
        yield _counter(
            "prefix_cache_queries", "Tokens looked up in the prefix cache.", self._total("prefix_queries_total")
        )
        yield _counter("prefix_cache_hits", "Tokens found in the prefix cache.", self._total("prefix_hits_total"))
        yield _counter("preemptions", "Requests put back for lack of KV blocks.", self._total("preemptions_total"))
        text = "Tokens computed by steps, in rows of one token (decode) and in longer ones (prefill)."
        yield _counters("computed_tokens", text, "kind", self.computed_tokens)

    def _engine_metrics(self) -> Iterator[Metric]:
        ready = self._ready
        yield _gauge("engine_up", "Whether the engine takes requests.", self._engine_up)
        yield _counter("engine_restarts", "Engines started in place of one that was lost.", self.engine_restarts)
        yield _counter("steps", "Steps computed.", self._total("steps_total"))
        failed = self._total("failed_steps_total")
        yield _counter("failed_steps", "Steps undone after a fault, to find who is to blame.", failed)
        yield _gauge("last_step_timestamp_seconds", "Unix time of the last step.", self._last_step_timestamp)
        yield _gauge("engine_heartbeat_age_seconds", "Since the last step; 0 without work.", self.heartbeat_age)
        yield _gauge("load_seconds", "Time the engine took to load.", ready.load_seconds if ready else 0)
        yield _gauge(
            "batch_invariant",
            "Whether a request's tokens are independent of what else is computed.",
            bool(ready and ready.batch_invariant),
        )
        names = ["version", "model", "architecture", "device", "dtype", "kernels"]
        info = GaugeMetricFamily("octavo_build_info", "What runs here; always 1.", labels=names)
        engine = [ready.architecture, ready.device, ready.dtype, ready.kernels] if ready else [""] * 4
        info.add_metric([__version__, self._model, *engine], 1)
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


def _counters(name: str, text: str, label: str, values: Mapping[Any, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(f"octavo_{name}", text, labels=[label])
    for value, count in values.items():
        family.add_metric([str(value)], count)
    return family


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"octavo_{name}", text, value=value)
