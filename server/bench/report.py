"""The figures of a run as text for a terminal and as Markdown for a document."""

from collections.abc import Iterator, Mapping
from typing import Any

from octavo.server.bench.figures import LATENCIES, PERCENTILES

COLUMNS = ("mean", *(f"p{q}" for q in PERCENTILES), "max")

Facts = Mapping[str, Any]


def text(facts: Facts) -> Iterator[str]:
    """Lines for a terminal."""
    yield headline(facts)
    yield ""
    for name, value in _rows(facts):
        yield f"{name:<16}{value}"
    yield ""
    yield f"{'milliseconds':<16}" + "".join(f"{column:>11}" for column in COLUMNS)
    for name, values in _latencies(facts):
        yield f"{name:<16}" + "".join(f"{value:>11}" for value in values)
    yield from _notes(facts)


def markdown(facts: Facts) -> Iterator[str]:
    """The same as two tables."""
    yield headline(facts)
    yield ""
    yield "| figure | value |"
    yield "|---|---|"
    for name, value in _rows(facts):
        yield f"| {name} | {value} |"
    yield ""
    yield f"| milliseconds | {' | '.join(COLUMNS)} |"
    yield "|---" * (len(COLUMNS) + 1) + "|"
    for name, values in _latencies(facts):
        yield f"| {name} | {' | '.join(values)} |"
    notes = list(_notes(facts))
    if notes:
        yield ""
    for note in notes:
        yield f"- {note}"


def headline(facts: Facts) -> str:
    """What was sent, how, and what became of it."""
    return (
        f"{facts['requests']} requests to {facts['url']}, model {facts['model']}, {facts['arrivals']}: "
        f"{facts['succeeded']} succeeded, {facts['failed']} failed in {facts['seconds']:.2f} s"
    )


def _rows(facts: Facts) -> Iterator[tuple[str, str]]:
    yield "prompts", f"{facts['prompt_tokens']:,} tokens, {facts['cached_tokens']:,} of them found in a cache"
    yield "outputs", f"{facts['output_tokens']:,} tokens"
    rates = facts["requests_per_second"], facts["output_tokens_per_second"], facts["tokens_per_second"]
    yield "throughput", "{:.2f} requests/s, {:,.1f} output tokens/s, {:,.1f} tokens/s in all".format(*rates)
    if "goodput" in facts:
        good = facts["goodput"]
        share = f"{good['requests']} of {facts['requests']}, {good['share']:.1%}"
        yield "goodput", f"{good['requests_per_second']:.2f} requests/s within {facts['objective']}: {share}"
    if "latest_start_ms" in facts:
        yield "lateness", f"no request was sent more than {facts['latest_start_ms']:.1f} ms after it was due"
    yield "client", f"{facts['client_cores']:.2f} of a core"


def _latencies(facts: Facts) -> Iterator[tuple[str, list[str]]]:
    for key, name in LATENCIES.items():
        found = facts["latency_ms"][key]
        yield name, ["-" if found is None else f"{found[column]:,.2f}" for column in COLUMNS]


def _notes(facts: Facts) -> Iterator[str]:
    for fault in facts["errors"]:
        example = f", such as: {fault['example']}" if fault["example"] else ""
        yield f"failed: {fault['requests']} x {fault['error']}{example}"
    for remark in facts["remarks"]:
        yield f"note: {remark}"
