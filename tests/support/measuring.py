"""What /metrics says, what a client measures, and what must agree between them after any load."""

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx
from prometheus_client.parser import text_string_to_metric_families

FINISH_REASONS = ("stop", "length", "abort", "error")


def read_samples(text: str) -> dict[str, float]:
    """Every sample by its name and labels, as `name{label=value}` without the prefix."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{label}={value}" for label, value in sample.labels.items())
            name = sample.name.removeprefix("octavo_")
            assert name != sample.name
            found[f"{name}{{{labels}}}" if labels else name] = sample.value
    return found


def scrape(url: str) -> dict[str, float]:
    return read_samples(httpx.get(f"{url}/metrics").text)


@dataclass
class Measured:
    """One stream as its client saw it: seconds since it was sent."""

    first_token: float | None = None
    last_token: float = 0.0
    end: float = 0.0
    events: list[dict] = field(default_factory=list)


def stream_all(url: str, bodies: Sequence[dict], key: str = "none") -> list[Measured]:
    """Stream completions at the same time, one thread each."""
    results = [Measured() for _ in bodies]

    headers = {"Authorization": f"Bearer {key}"}
    client = httpx.Client(timeout=120, headers=headers)  # made before any clock starts: it reads certificates

    def stream(body: dict, measured: Measured) -> None:
        fields = {"model": "smollm2", "stream": True, "stream_options": {"include_usage": True}, **body}
        started = time.perf_counter()
        with client.stream("POST", f"{url}/v1/completions", json=fields) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    measured.events.append(json.loads(line.removeprefix("data: ")))
                    if measured.events[-1]["choices"] and measured.events[-1]["choices"][0]["text"]:
                        measured.last_token = time.perf_counter() - started
                        measured.first_token = measured.first_token or measured.last_token
        measured.end = time.perf_counter() - started

    threads = [threading.Thread(target=stream, args=pair) for pair in zip(bodies, results, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    client.close()
    return results


def usage(measured: Sequence[Measured], name: str) -> int:
    return sum(one.events[-1]["usage"][name] for one in measured)


def check_identities(found: dict[str, float]) -> None:
    """What holds between the metrics of a server without requests, whatever it has been through."""
    finished = sum(found[f"request_success_total{{finished_reason={reason}}}"] for reason in FINISH_REASONS)
    assert found["requests_running"] == found["requests_waiting"] == 0
    assert found["request_started_total"] == finished
    assert found["e2e_request_latency_seconds_count"] == finished
    assert found["request_generation_tokens_count"] == found["request_prompt_tokens_count"] == finished
    assert found["request_generation_tokens_sum"] == found["generation_tokens_total"]
    assert found["request_prompt_tokens_sum"] == found["prompt_tokens_total"]
    first_tokens = found["time_to_first_token_seconds_count"]
    assert first_tokens <= finished
    assert found["request_prefill_time_seconds_count"] == found["request_decode_time_seconds_count"] == first_tokens
    assert found["inter_token_latency_seconds_count"] == found["generation_tokens_total"] - first_tokens
    assert found["request_decode_time_seconds_sum"] - found["inter_token_latency_seconds_sum"] < 1e-6
    computed = sum(found[f"computed_tokens_total{{kind={kind}}}"] for kind in ("prefill", "decode"))
    assert computed == found["step_tokens_sum"]
    steps = [found[f"step_{part}_count"] for part in ("schedule_seconds", "device_seconds", "commit_seconds", "tokens")]
    assert set(steps) == {found["steps_total"]}
    assert found["prefix_cache_hits_total"] <= found["prefix_cache_queries_total"]
    assert found["kv_blocks{state=used}"] == 0
