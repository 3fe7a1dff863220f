"""Histograms, and the bounds of their buckets: what is quick on a small model still falls into several of them."""

from bisect import bisect_left
from collections.abc import Sequence

from prometheus_client.core import HistogramMetricFamily

TOKEN_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05),
    *(0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0),
)
FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
REQUEST_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0),
    *(10.0, 15.0, 30.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0),
)
LAG_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
REQUEST_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
STEP_TOKENS = tuple(float(2**power) for power in range(15))
HISTOGRAMS = {
    "time_to_first_token_seconds": ("From submission to the first token.", FIRST_TOKEN_SECONDS),
    "inter_token_latency_seconds": ("Between two tokens of a request.", TOKEN_SECONDS),
    "request_time_per_output_token_seconds": ("The mean of these over a request.", TOKEN_SECONDS),
    "e2e_request_latency_seconds": ("From submission to the end.", REQUEST_SECONDS),
    "request_queue_time_seconds": ("From arrival in the engine to admission.", REQUEST_SECONDS),
    "request_prefill_time_seconds": ("From admission to the first token.", REQUEST_SECONDS),
    "request_decode_time_seconds": ("From the first token to the last.", REQUEST_SECONDS),
    "request_prompt_tokens": ("Prompt tokens of finished requests.", REQUEST_TOKENS),
    "request_generation_tokens": ("Generated tokens of finished requests.", REQUEST_TOKENS),
    "step_schedule_seconds": ("Choosing what a step computes.", TOKEN_SECONDS),
    "step_device_seconds": ("Computing a step, as the engine waits for it.", TOKEN_SECONDS),
    "step_commit_seconds": ("Taking a step's results into account.", TOKEN_SECONDS),
    "step_tokens": ("Tokens computed by a step.", STEP_TOKENS),
    "step_requests": ("Requests computed by a step.", STEP_TOKENS),
    "event_loop_lag_seconds": ("How late the server's event loop comes back to a timer.", LAG_SECONDS),
}
"""What the server counts in histograms: name without prefix, text, bounds."""


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
