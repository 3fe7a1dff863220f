"""Builds dashboards/octavo.json, which Grafana reads: `python deploy/grafana/build.py`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

OUTPUT = Path(__file__).parent / "dashboards" / "octavo.json"
DATASOURCE = {"type": "prometheus", "uid": "prometheus"}
WIDTH = 24
HEIGHT = 8

Panel = dict[str, Any]


def sel(name: str, **labels: str) -> str:
    """A metric of the chosen instances; each label is matched with an expression such as `cache|activations`."""
    chosen = "".join(f', {label}=~"{value}"' for label, value in labels.items())
    return f'octavo_{name}{{instance=~"$instance"{chosen}}}'


def rate(name: str, by: str = "", **labels: str) -> str:
    """Growth a second, summed over the chosen instances."""
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({sel(name, **labels)}[$__rate_interval]))"


def graph(title: str, unit: str, *series: tuple[str, str], stack: bool = False, help_text: str = "") -> Panel:
    """Lines over time; each series is an expression and its legend."""
    custom = {"fillOpacity": 60 if stack else 8, "lineWidth": 1, "showPoints": "never"}
    custom["stacking"] = {"mode": "normal" if stack else "none"}
    defaults = {"unit": unit, "min": 0, "custom": custom}
    legend = {"displayMode": "table", "placement": "bottom", "calcs": ["lastNotNull", "max"]}
    return {
        "type": "timeseries",
        "title": title,
        "description": help_text,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}},
        "targets": [_target(*pair) for pair in series],
    }


def quantiles(title: str, name: str, help_text: str = "", unit: str = "s") -> Panel:
    """The 50th, 95th and 99th percentile of a histogram."""
    series = [
        (f"histogram_quantile({share}, {rate(f'{name}_bucket', 'le')})", f"p{round(share * 100)}")
        for share in (0.5, 0.95, 0.99)
    ]
    return graph(title, unit, *series, help_text=help_text)


def heat_map(title: str, name: str, unit: str = "s") -> Panel:
    """How a histogram moves over time."""
    expression = f"sum by (le) (increase({sel(f'{name}_bucket')}[$__rate_interval]))"
    return {
        "type": "heatmap",
        "title": title,
        "options": {
            "calculate": False,
            "yAxis": {"unit": unit},
            "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64},
            "cellGap": 1,
        },
        "targets": [_target(expression, "{{le}}") | {"format": "heatmap"}],
    }


def number(title: str, unit: str, expression: str, **thresholds: float) -> Panel:
    """One figure; `red` and `orange` are the values from which it takes that colour."""
    steps = [{"color": "green", "value": None}]
    steps += [
        {"color": colour, "value": value} for colour, value in sorted(thresholds.items(), key=lambda pair: pair[1])
    ]
    return {
        "type": "stat",
        "title": title,
        "fieldConfig": {
            "defaults": {"unit": unit, "thresholds": {"mode": "absolute", "steps": steps}},
            "overrides": [],
        },
        "options": {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value", "graphMode": "area"},
        "targets": [_target(expression, "")],
    }


def _target(expression: str, legend: str) -> dict[str, Any]:
    return {"datasource": DATASOURCE, "expr": expression, "legendFormat": legend}


def overview() -> Iterator[Panel]:
    """The figures to look at first."""
    hits = f"{rate('prefix_cache_hits_total')} / ({rate('prefix_cache_queries_total')} > 0)"
    yield number("Engines up", "none", f"sum({sel('engine_up')})")
    yield number("Running", "none", f"sum({sel('requests_running')})")
    yield number("Waiting", "none", f"sum({sel('requests_waiting')})", orange=10, red=100)
    yield number("Tokens generated", "short", rate("generation_tokens_total"))
    first_token = rate("time_to_first_token_seconds_bucket", "le")
    yield number("First token, p95", "s", f"histogram_quantile(0.95, {first_token})", orange=2, red=10)
    between = rate("inter_token_latency_seconds_bucket", "le")
    yield number("Between tokens, p95", "s", f"histogram_quantile(0.95, {between})", orange=0.1, red=0.5)
    yield number("KV cache held", "percentunit", f"max({sel('kv_cache_usage_ratio')})", orange=0.8, red=0.95)
    yield number("Prefix hits", "percentunit", hits)


def latency() -> Iterator[Panel]:
    """What a client waits for."""
    yield quantiles("Time to first token", "time_to_first_token_seconds", "From submission to the first token.")
    yield quantiles("Between tokens", "inter_token_latency_seconds", "Between two tokens of a request.")
    yield quantiles("In the queue", "request_queue_time_seconds", "From arrival in the engine to admission.")
    yield heat_map("Time to first token", "time_to_first_token_seconds")
    yield heat_map("Between tokens", "inter_token_latency_seconds")
    yield heat_map("In the queue", "request_queue_time_seconds")
    yield quantiles("Whole request", "e2e_request_latency_seconds")
    yield quantiles("Prefill", "request_prefill_time_seconds", "From admission to the first token.")
    yield quantiles("Decode", "request_decode_time_seconds", "From the first token to the last.")


def throughput() -> Iterator[Panel]:
    """What is served."""
    yield graph(
        "Tokens a second",
        "short",
        (rate("prompt_tokens_total"), "prompt"),
        (rate("prompt_tokens_cached_total"), "prompt, from the cache"),
        (rate("generation_tokens_total"), "generated"),
    )
    yield graph(
        "Requests",
        "none",
        (f"sum({sel('requests_running')})", "running"),
        (f"sum({sel('requests_waiting')})", "waiting"),
        (f"sum({sel('requests_paused')})", "paused"),
    )
    finished = (rate("request_success_total", "finished_reason"), "{{finished_reason}}")
    yield graph("Finished a second, by reason", "reqps", finished, stack=True)
    yield heat_map("Prompt tokens", "request_prompt_tokens", "none")
    yield heat_map("Generated tokens", "request_generation_tokens", "none")
    yield quantiles("Time per output token, mean of a request", "request_time_per_output_token_seconds")


def memory() -> Iterator[Panel]:
    """Three buckets and what lies beside them."""
    buckets = f"sum by (bucket) ({sel('memory_bytes', bucket='weights|cache|activations', kind='allocated')})"
    used = f"sum by (bucket) ({sel('memory_bytes', bucket='cache|activations', kind='used')})"
    peak = f"sum({sel('memory_bytes', bucket='activations', kind='peak')})"
    beside = f"sum by (bucket, kind) ({sel('memory_bytes', bucket='runtime|host', kind='allocated|planned')})"
    budget = graph("Memory by bucket", "bytes", (buckets, "{{bucket}}"), stack=True)
    budget["targets"].append(_target(f"sum({sel('memory_budget_bytes')})", "budget"))
    line = {"stacking": {"mode": "none"}, "fillOpacity": 0, "lineWidth": 2}
    properties = [{"id": f"custom.{name}", "value": value} for name, value in line.items()]
    override = {"matcher": {"id": "byName", "options": "budget"}, "properties": properties}
    budget["fieldConfig"]["overrides"].append(override)
    yield budget
    yield graph("KV blocks by state", "none", (f"sum by (state) ({sel('kv_blocks')})", "{{state}}"), stack=True)
    yield graph(
        "In use",
        "bytes",
        (used, "{{bucket}}"),
        (peak, "activations, high water"),
        help_text="Of what is allocated: blocks that requests hold, and the part of the arena that the last step used.",
    )
    yield graph("KV cache held by requests", "percentunit", (sel("kv_cache_usage_ratio"), "{{instance}}"))
    hits = f"{rate('prefix_cache_hits_total')} / ({rate('prefix_cache_queries_total')} > 0)"
    yield graph("Prefix hit rate", "percentunit", (hits, "tokens found in the cache"))
    yield graph("Beside the buckets", "bytes", (beside, "{{bucket}}, {{kind}}"))


def batches() -> Iterator[Panel]:
    """What the steps are made of, and where their time goes."""
    computed = (rate("computed_tokens_total", "kind"), "{{kind}}")
    yield graph("Tokens computed a second", "short", computed, stack=True)
    yield quantiles("Tokens in a step", "step_tokens", unit="none")
    yield quantiles("Requests in a step", "step_requests", unit="none")
    parts = [
        (f"{rate(f'step_{part}_seconds_sum')} / ({rate('steps_total')} > 0)", part)
        for part in ("schedule", "device", "commit")
    ]
    yield graph("Time of a step by part, mean", "s", *parts, stack=True)
    yield graph("Preemptions a second", "short", (rate("preemptions_total"), "put back for lack of blocks"))
    yield graph("Steps a second", "short", (rate("steps_total"), "steps"))


def health() -> Iterator[Panel]:
    """What goes wrong."""
    yield graph("HTTP responses a second", "reqps", (rate("http_responses_total", "code"), "{{code}}"), stack=True)
    yield graph(
        "Refused and failed a second",
        "reqps",
        (rate("admission_rejections_total", "reason"), "refused: {{reason}}"),
        (rate("request_success_total", finished_reason="error"), "failed"),
    )
    yield graph(
        "Engine restarts",
        "none",
        (f"sum(increase({sel('engine_restarts_total')}[$__rate_interval]))", "restarts"),
        (f"sum(increase({sel('requests_resumed_total')}[$__rate_interval]))", "requests resumed"),
        (f"sum(increase({sel('failed_steps_total')}[$__rate_interval]))", "steps undone"),
    )
    yield graph("Age of the last step, with work", "s", (sel("engine_heartbeat_age_seconds"), "{{instance}}"))
    yield quantiles("Lag of the event loop", "event_loop_lag_seconds")
    invariant = (sel("batch_invariant"), "{{instance}}")
    yield graph("Batch-invariant", "bool_yes_no", invariant, help_text="The self-test at start-up.")


ROWS = {
    "Now": (overview, 3, 4),
    "Latency": (latency, 8, HEIGHT),
    "Throughput": (throughput, 8, HEIGHT),
    "Memory and cache": (memory, 8, HEIGHT),
    "Batches": (batches, 8, HEIGHT),
    "Health": (health, 8, HEIGHT),
}


def layout() -> Iterator[Panel]:
    """All panels from left to right and from top to bottom."""
    top = identity = 0
    for title, (panels, width, height) in ROWS.items():
        identity += 1
        place = {"x": 0, "y": top, "w": WIDTH, "h": 1}
        yield {"id": identity, "type": "row", "title": title, "gridPos": place, "collapsed": False, "panels": []}
        left, top = 0, top + 1
        for panel in panels():
            identity += 1
            if left == WIDTH:
                left, top = 0, top + height
            place = {"x": left, "y": top, "w": width, "h": height}
            yield {"id": identity, "datasource": DATASOURCE, "gridPos": place, **panel}
            left += width
        top += height


def variable(name: str, label: str, query: str) -> dict[str, Any]:
    """A choice offered above the panels."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def dashboard() -> dict[str, Any]:
    """The whole dashboard."""
    return {
        "uid": "octavo",
        "title": "Octavo",
        "tags": ["octavo"],
        "schemaVersion": 39,
        "editable": False,
        "refresh": "5s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [
                variable("model", "Model", "label_values(octavo_build_info, model)"),
                variable("instance", "Instance", 'label_values(octavo_build_info{model=~"$model"}, instance)'),
            ]
        },
        "panels": list(layout()),
    }


if __name__ == "__main__":
    OUTPUT.write_text(json.dumps(dashboard(), indent=1) + "\n")
