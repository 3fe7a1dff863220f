"""The options of `octavo bench`. Imports little: every command's parser has them."""

import argparse
import json
from pathlib import Path
from typing import Any

from octavo.server.bench.workload import Span
from octavo.server.values import count, option, seconds

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
 130  a second Ctrl-C or SIGTERM came, or one before the first measured request: nothing is reported
"""
TRACE_HELP = (
    "Open loop: one JSON object a line, with timestamp in seconds; prompt, messages or prompt_tokens; output_tokens."
)


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
