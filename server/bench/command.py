"""`octavo bench`: a run from the first request to the report."""

import argparse
import http.client
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import uvloop

from octavo.model.weights.progress import loading_progress
from octavo.server import __version__, logs
from octavo.server.bench.client import Address, Client
from octavo.server.bench.figures import Objective, samples, summary
from octavo.server.bench.load import Load, Outcome
from octavo.server.bench.plot import check_can_plot, draw
from octavo.server.bench.report import headline, markdown, text
from octavo.server.bench.workload import Call, Shape, read_trace
from octavo.server.values import OptionError

FIRST_WARM_UP = 1 << 40
"""Where the numbers of calls begin that warm a server up: their prompts are not measured again."""


class UnreachableError(Exception):
    """There is no server at the address."""

    exit_code = 69


class WarmUpError(Exception):
    """The server does not do what is to be measured."""

    exit_code = 1


class OutputError(OSError):
    """A file cannot be written."""

    exit_code = 73


def bench(parsed: argparse.Namespace) -> tuple[int, Iterator[str]]:
    """Run the load; return the exit code and the lines of the report. Every error it raises has an exit code."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if parsed.plot is not None:
        check_can_plot()
    logs.configure("info")
    address = Address.parse(parsed.url)
    key = parsed.api_key or os.environ.get("OPENAI_API_KEY")
    shape, calls = _calls(parsed)
    model = parsed.model or _served_model(address, key)
    load = _load(parsed, Client(address, _route(parsed), key, parsed.timeout), model)
    warming = replace(shape, rate=None).calls(parsed.warm_up, FIRST_WARM_UP)
    outcome = uvloop.run(_measure(load, warming, calls))
    facts = _facts(parsed, outcome, model)
    _write(parsed, outcome, facts)
    return (1 if facts["failed"] else 0), text(facts)


async def _measure(load: Load, warming: list[Call], calls: list[Call]) -> Outcome:
    if warming:
        outcome = await replace(load, concurrency=1).run(warming, loading_progress("warming up", "requests"))
        if fault := next((record for record in outcome.records if record.error), None):
            raise WarmUpError(f"a request that warms up failed: {fault.error} {fault.detail}")
        if outcome.interrupted:
            raise KeyboardInterrupt
    return await load.run(calls, loading_progress("sending", "requests"))


def _calls(parsed: argparse.Namespace) -> tuple[Shape, list[Call]]:
    """How calls look, and those to measure. Raises OptionError."""
    given = [name for name in ("concurrency", "rate", "trace") if getattr(parsed, name) is not None]
    if len(given) > 1:
        raise OptionError(f"--{given[0]} and --{given[1]} are different loads: give one of them")
    if parsed.token_ids is not None and parsed.chat:
        raise OptionError("--token-ids is for /v1/completions: leave --chat out")
    shape = Shape(
        parsed.prompt_tokens, parsed.output_tokens, parsed.shared_prefix, parsed.token_ids, parsed.rate, parsed.seed
    )
    calls = read_trace(parsed.trace, shape, chat=parsed.chat) if parsed.trace else shape.calls(parsed.requests)
    return shape, calls


def _load(parsed: argparse.Namespace, client: Client, model: str) -> Load:
    fields: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    fields |= {"temperature": 0} | ({} if parsed.allow_eos else {"ignore_eos": True}) | parsed.extra_body
    return Load(client, fields, parsed.chat, None if _open_loop(parsed) else parsed.concurrency or 1, parsed.duration)


def _open_loop(parsed: argparse.Namespace) -> bool:
    return parsed.rate is not None or parsed.trace is not None


def _route(parsed: argparse.Namespace) -> str:
    return "/v1/chat/completions" if parsed.chat else "/v1/completions"


def _facts(parsed: argparse.Namespace, outcome: Outcome, model: str) -> dict[str, Any]:
    """The figures, and what they are figures of."""
    objective = Objective(parsed.slo_ttft, parsed.slo_itl, parsed.slo_e2e)
    open_loop = _open_loop(parsed)
    return {
        "octavo": __version__,
        "url": parsed.url.rstrip("/").removesuffix("/v1") + _route(parsed),
        "model": model,
        "arrivals": _arrivals(parsed),
        "prompt_tokens_asked": None if parsed.trace else str(parsed.prompt_tokens),
        "output_tokens_asked": None if parsed.trace else str(parsed.output_tokens),
        "shared_prefix": parsed.shared_prefix,
        "seed": parsed.seed,
        "extra_body": parsed.extra_body,
        "objective": str(objective),
        **summary(outcome, objective, open_loop=open_loop),
    }


def _arrivals(parsed: argparse.Namespace) -> str:
    if parsed.trace is not None:
        return f"as {parsed.trace.name} says"
    return f"{parsed.rate:g} a second on average" if parsed.rate is not None else f"{parsed.concurrency or 1} at a time"


def _write(parsed: argparse.Namespace, outcome: Outcome, facts: dict[str, Any]) -> None:
    """Write the files that were asked for. Raises OutputError."""
    try:
        if parsed.json is not None:
            parsed.json.write_text(json.dumps(facts, indent=2) + "\n")
        if parsed.markdown is not None:
            parsed.markdown.write_text("\n".join(markdown(facts)) + "\n")
        if parsed.events is not None:
            parsed.events.write_text("".join(json.dumps(asdict(record)) + "\n" for record in outcome.records))
        if parsed.plot is not None:
            draw(parsed.plot, headline(facts), samples(outcome.records))
    except OSError as error:
        raise OutputError(f"the report cannot be written: {error}") from error


def _served_model(address: Address, key: str | None) -> str:
    """The first name the server lists. Raises UnreachableError."""
    kind = http.client.HTTPSConnection if address.tls else http.client.HTTPConnection
    connection = kind(address.host, address.port, timeout=30)
    try:
        connection.request(
            "GET", f"{address.path}/v1/models", headers={"Authorization": f"Bearer {key}"} if key else {}
        )
        response = connection.getresponse()
        answer = response.read()
        if response.status == 200:
            return str(json.loads(answer)["data"][0]["id"])
        problem = f"/v1/models answers {response.status}"
    except (OSError, http.client.HTTPException) as error:
        raise UnreachableError(f"{address.host} port {address.port} cannot be reached: {error}") from error
    except (ValueError, LookupError, TypeError):
        problem = "/v1/models lists no model"
    finally:
        connection.close()
    raise UnreachableError(f"{problem}: give --model, and a key with --api-key or OPENAI_API_KEY if one is needed")
