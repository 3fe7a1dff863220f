"""`octavo bench`: its options, and a run from the first request to the report."""

import argparse
import http.client
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from octavo.model.weights.progress import loading_progress
from octavo.server import __version__
from octavo.server.bench.client import Address, Client
from octavo.server.bench.figures import Objective, samples, summary
from octavo.server.bench.load import Load, Outcome
from octavo.server.bench.plot import check_can_plot, draw
from octavo.server.bench.report import headline, markdown, text
from octavo.server.bench.workload import Call, Shape, Span, read_trace
from octavo.server.values import OptionError, count, option, seconds

HELP = """\
Send load to any server that speaks OpenAI's API and report throughput and latencies, as a client sees them.

  octavo bench                                            64 requests to 127.0.0.1:8000, one at a time
  octavo bench http://node:8000 --concurrency 16          a closed loop: 16 at a time
  octavo bench --rate 4 --requests 500                    an open loop: 4 a second on average (Poisson)
  octavo bench --trace day.jsonl --chat --json out.json   each line when its timestamp says

Two runs with one --seed send the same prompts, which a prefix cache then knows: change it to measure cold prompts.
"""
EXIT_CODES = """\
exit codes:
   0  every request succeeded, up to a Ctrl-C or SIGTERM if one came
   1  a request failed; the report says how many, and why
  64  an option or the trace is wrong
  69  the server cannot be reached
  73  a file of the report cannot be written
 130  a second Ctrl-C or SIGTERM came, or one before the first request: nothing is reported
"""


TRACE_HELP = (
    "Open loop: one JSON object a line, with timestamp in seconds; prompt, messages or prompt_tokens; output_tokens."
)
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `octavo bench`."""
    whole, duration = option(count(1)), option(seconds)
    parser.add_argument("url", metavar="URL", nargs="?", default="http://127.0.0.1:8000", help="Default: %(default)s.")
    parser.add_argument("--model", metavar="NAME", help="Default: the first of the server's /v1/models.")
    parser.add_argument("--api-key", metavar="KEY", help="Default: the variable OPENAI_API_KEY.")
    parser.add_argument("--chat", action="store_true", help="/v1/chat/completions in place of /v1/completions.")
    parser.add_argument("--extra-body", metavar="JSON", type=option(_object), default={}, help="More fields to send.")
    load = parser.add_argument_group("Load")
    load.add_argument("--concurrency", metavar="N", type=whole, help="Closed loop: requests at a time. Default: 1.")
    load.add_argument("--rate", metavar="N", type=option(_positive), help="Open loop: requests a second, on average.")
    load.add_argument("--trace", metavar="FILE", type=Path, help=TRACE_HELP)
    load.add_argument("--requests", metavar="N", type=whole, default=64, help="How many in all. Default: 64.")
    load.add_argument("--duration", metavar="SECONDS", type=duration, help="Send nothing after so long.")
    load.add_argument("--warm-up", metavar="N", type=option(count(0)), default=0, help="Unmeasured requests first.")
    load.add_argument("--timeout", metavar="SECONDS", type=duration, default=600.0, help="Of a request. Default: 600.")
    load.add_argument("--seed", metavar="N", type=option(count(0)), default=0, help="Of all that is drawn. Default: 0.")
    shape = parser.add_argument_group("Prompts and outputs")
    span, default = option(Span.parse), Span(128, 128)
    shape.add_argument("--prompt-tokens", metavar="N|N-N", type=span, default=default, help="Words. Default: 128.")
    shape.add_argument("--output-tokens", metavar="N|N-N", type=span, default=default, help="Default: 128.")
    shape.add_argument("--shared-prefix", metavar="N", type=option(count(0)), default=0, help="Common to all prompts.")
    shape.add_argument("--token-ids", metavar="N-N", type=span, help="Send ids from this range in place of words.")
    shape.add_argument("--allow-eos", action="store_true", help="Do not send ignore_eos, which OpenAI does not know.")
    goal = parser.add_argument_group("Goodput: requests within these limits, in milliseconds")
    goal.add_argument("--slo-ttft", metavar="MS", type=option(_positive), help="Of the first token.")
    goal.add_argument("--slo-itl", metavar="MS", type=option(_positive), help="Of a request's mean gap between tokens.")
    goal.add_argument("--slo-e2e", metavar="MS", type=option(_positive), help="Of the whole request.")
    output = parser.add_argument_group("Output")
    for name, what in (("json", "the figures"), ("markdown", "the report"), ("plot", "a PNG of the distributions")):
        output.add_argument(f"--{name}", metavar="FILE", type=Path, help=f"Write {what} to a file.")
    output.add_argument("--events", metavar="FILE", type=Path, help="Write one JSON object for each request.")


def bench(parsed: argparse.Namespace) -> tuple[int, Iterator[str]]:
    """Run the load; return the exit code and the lines of the report. Every error it raises has an exit code."""
    # Imported late, as for `octavo serve`: the command line starts without them.
    import uvloop  # noqa: PLC0415

    from octavo.server import logs  # noqa: PLC0415

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


def _object(given: str) -> dict[str, Any]:
    value = json.loads(given)
    if not isinstance(value, dict):
        raise ValueError("give a JSON object")  # noqa: TRY004
    return value


def _positive(given: str) -> float:
    value = float(given)
    if not 0 < value < 1e9:
        raise ValueError("give a number above 0")
    return value
