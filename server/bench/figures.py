"""What the records of a run say: latencies, throughput, goodput and faults.

Latencies are milliseconds here, because that is how people read them.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.server.bench.client import Record
from octavo.server.bench.load import Outcome

PERCENTILES = (50, 90, 95, 99)
LATENCIES = {
    "first_token": "first token",
    "inter_token": "inter-token",
    "between_chunks": "between chunks",
    "whole_request": "whole request",
}
BUSY_CLIENT = 0.8
"""Above this share of a core the client may delay what it measures."""

Samples = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Objective:
    """What counts as good service of one request, in milliseconds; None: anything does."""

    first_token: float | None = None
    inter_token: float | None = None
    """Of the request's mean gap between tokens."""
    whole_request: float | None = None

    def __str__(self) -> str:
        """What there is to meet; empty if nothing."""
        named = {"TTFT": self.first_token, "ITL": self.inter_token, "whole": self.whole_request}
        return ", ".join(f"{name} {limit:g} ms" for name, limit in named.items() if limit is not None)

    def met(self, record: Record) -> bool:
        """Whether a request succeeded within all limits."""
        if record.error is not None:
            return False
        gaps = inter_token(record)
        first = first_token(record)
        limits = [
            (self.first_token, np.inf if first is None else first),
            (self.inter_token, float(gaps.mean()) if len(gaps) else 0.0),
            (self.whole_request, whole_request(record)),
        ]
        return all(limit is None or value <= limit for limit, value in limits)


def tokens_of_chunks(record: Record) -> list[int]:
    """Tokens that each chunk with text brought.

    The server's own counts where it sends them. Else each chunk brings one, and what the total of the server is above
    that is shared out by the length of their texts: a chunk of several tokens must not count as one long wait.
    """
    if record.token_counts and all(record.token_counts):
        return record.token_counts
    chunks = len(record.characters)
    silent = 1 if record.finish_reason == "stop" else 0  # the EOS or stop token counts and has no text
    surplus = max(0, output_tokens(record) - silent - chunks)
    return [1 + share for share in _shared(surplus, record.characters)]


def output_tokens(record: Record) -> int:
    """Tokens generated, as the server counted them, or else one for each chunk."""
    return len(record.arrivals) if record.output_tokens is None else record.output_tokens


def first_token(record: Record) -> float | None:
    """From the beginning of a request to its first text."""
    return 1e3 * (record.arrivals[0] - record.sent) if record.arrivals else None


def whole_request(record: Record) -> float:
    """From the beginning of a request to its end."""
    return 1e3 * (record.ended - record.sent)


def between_chunks(record: Record) -> Samples:
    """What a reader of the stream waits."""
    return 1e3 * np.diff(np.array(record.arrivals))


def inter_token(record: Record) -> Samples:
    """One gap for each token after the first chunk: that of its chunk, shared among the chunk's tokens."""
    counts = tokens_of_chunks(record)[1:]
    return np.repeat(between_chunks(record) / np.array(counts), counts) if counts else np.empty(0)


def samples(records: Sequence[Record]) -> dict[str, Samples]:
    """The latencies of the requests that succeeded."""
    good = [record for record in records if record.error is None]
    return {
        "first_token": np.array([first for record in good if (first := first_token(record)) is not None]),
        "inter_token": _joined(map(inter_token, good)),
        "between_chunks": _joined(map(between_chunks, good)),
        "whole_request": np.array([whole_request(record) for record in good]),
    }


def distribution(values: Samples) -> dict[str, float | int] | None:
    """Mean, percentiles (interpolated linearly) and maximum."""
    if not len(values):
        return None
    percentiles = np.percentile(values, PERCENTILES)
    named = {f"p{q}": float(value) for q, value in zip(PERCENTILES, percentiles, strict=True)}
    return {"count": len(values), "mean": float(values.mean()), **named, "max": float(values.max())}


def summary(outcome: Outcome, objective: Objective, *, open_loop: bool) -> dict[str, Any]:
    """Everything a report says about a run, under stable names."""
    records, seconds = outcome.records, max(outcome.seconds, 1e-9)
    good = [record for record in records if record.error is None]
    prompt, output = sum(record.prompt_tokens or 0 for record in good), sum(map(output_tokens, good))
    found: dict[str, Any] = {
        "requests": len(records),
        "succeeded": len(good),
        "failed": len(records) - len(good),
        "errors": errors(records),
        "seconds": outcome.seconds,
        "prompt_tokens": prompt,
        "cached_tokens": sum(record.cached_tokens for record in good),
        "output_tokens": output,
        "requests_per_second": len(good) / seconds,
        "output_tokens_per_second": output / seconds,
        "tokens_per_second": (prompt + output) / seconds,
        "latency_ms": {name: distribution(values) for name, values in samples(records).items()},
        "client_cores": outcome.client_cores,
        "remarks": list(_remarks(outcome, good)),
    }
    if open_loop:
        found["latest_start_ms"] = 1e3 * max((record.sent - record.due for record in records), default=0.0)
    if str(objective):
        met = sum(map(objective.met, records))
        found["goodput"] = {"requests": met, "share": met / max(1, len(records)), "requests_per_second": met / seconds}
    return found


def errors(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Every kind of fault: how often, and one example of what the server said."""
    faults = [record for record in records if record.error is not None]
    counts = Counter(record.error for record in faults)
    examples = {record.error: record.detail for record in reversed(faults)}
    return [{"error": kind, "requests": count, "example": examples[kind]} for kind, count in counts.most_common()]


def _remarks(outcome: Outcome, good: Sequence[Record]) -> Iterable[str]:
    """What a reader must know to read the figures rightly."""
    uncounted = sum(record.output_tokens is None for record in good)
    if uncounted:
        yield f"{uncounted} requests came without usage: their tokens are counted by chunks, their prompts not at all"
    shared = sum(not all(record.token_counts) and max(tokens_of_chunks(record), default=1) > 1 for record in good)
    if shared:
        yield f"in {shared} requests chunks brought several tokens, which share the chunk's gap by estimate"
    short = sum(output_tokens(record) < record.asked_tokens for record in good)
    if short:
        yield f"{short} requests generated fewer tokens than were asked for"
    if outcome.client_cores > BUSY_CLIENT:
        yield f"this client took {outcome.client_cores:.2f} of a core: it may be what limits the figures"


def _shared(total: int, weights: Sequence[int]) -> list[int]:
    """Divide a whole number in proportion to weights, to whole numbers with the same sum (largest remainders)."""
    if not total or not weights:
        return [0] * len(weights)
    whole = sum(weights) or 1
    exact = [total * weight / whole for weight in weights] if sum(weights) else [0.0] * len(weights)
    shares = [int(part) for part in exact]
    order = sorted(range(len(weights)), key=lambda i: exact[i] - shares[i], reverse=True)
    for step in range(total - sum(shares)):
        shares[order[step % len(order)]] += 1
    return shares


def _joined(parts: Iterable[Samples]) -> Samples:
    return np.concatenate([np.empty(0), *parts])
