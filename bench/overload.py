"""Ten times the load that a server can take: how soon it refuses, how much it still serves, how soon it is well again.

    .venv/bin/python bench/overload.py                       # an engine without a model, 20 ms a step
    .venv/bin/python bench/overload.py --model smollm2       # the default model, with what belongs to it

Four phases, each request of 16 prompt and 16 output tokens on a connection of its own: one client alone, for the base
latency; as many clients as there are slots and half as many places in the queue, each asking again at once, for the
saturated throughput; requests that arrive at ten times that rate whatever becomes of them; and one client alone again.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import time
from dataclasses import dataclass

from daemons import SCRIPTED, serving

SLOTS, QUEUE = 8, 16
PROMPT_TOKENS, OUTPUT_TOKENS = 16, 16
BASE_REQUESTS = 20
OVERLOAD = 10
WELL_AGAIN = 1.5
"""Times the base latency."""


@dataclass(frozen=True)
class Reply:
    """Seconds on the clock of this process."""

    status: int
    sent: float
    received: float

    @property
    def latency(self) -> float:
        """From opening the connection to the last byte."""
        return self.received - self.sent


def main() -> None:
    arguments = parse_arguments()
    command = [*SCRIPTED, "--step-seconds", arguments.step_seconds]
    if arguments.model is not None:
        command = [sys.executable, "-m", "octavo.server.cli", "serve", arguments.model]
    limits = ["--max-num-seqs", str(SLOTS), "--max-queued-requests", str(QUEUE)]
    with serving([*command, *limits]) as (port, _):
        asyncio.run(measure(port, arguments.seconds))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="serve this model instead of an engine without one")
    parser.add_argument("--step-seconds", default="0.02", help="of the engine without a model")
    parser.add_argument("--seconds", type=float, default=20.0, help="of saturation, and of the overload")
    return parser.parse_args()


async def measure(port: int, seconds: float) -> None:
    """Run the phases and print what they came to."""
    await asyncio.gather(*(ask(port) for _ in range(SLOTS)))  # warm
    base = statistics.median([(await ask(port)).latency for _ in range(BASE_REQUESTS)])
    start = time.perf_counter()
    rate, saturated = served(await saturate(port, seconds), start)
    start = time.perf_counter()
    replies = await overload(port, OVERLOAD * rate, seconds)
    _, goodput = served([reply for reply in replies if reply.received < start + seconds], start)
    recovery = await recover(port, base, start + seconds)
    refused = sorted(reply.latency for reply in replies if reply.status == 429)
    other = [reply.status for reply in replies if reply.status not in (200, 429)]
    print(f"base latency {base * 1e3:.0f} ms, saturated {saturated:.0f} output tokens/s ({rate:.1f} requests/s)")
    print(f"{len(replies)} requests at {len(replies) / seconds:.0f}/s: {len(refused)} refused, {len(other)} failed")
    print(f"refused in {percentile(refused, 50) * 1e3:.1f} ms (p50), {percentile(refused, 99) * 1e3:.1f} ms (p99)")
    print(f"goodput {goodput:.0f} output tokens/s, {goodput / saturated:.2f} of the saturated throughput")
    print(f"base latency again {recovery:.1f} s after the last arrival")


async def saturate(port: int, seconds: float) -> list[Reply]:
    """As many clients as keep the engine full, each asking again at once."""
    end = time.perf_counter() + seconds

    async def client() -> list[Reply]:
        replies = []
        while time.perf_counter() < end:
            replies.append(await ask(port))
        return replies

    found = await asyncio.gather(*(client() for _ in range(SLOTS + QUEUE // 2)))
    return [reply for replies in found for reply in replies if reply.received < end]


async def overload(port: int, rate: float, seconds: float) -> list[Reply]:
    """Requests that arrive at this rate, whatever becomes of those before them."""
    start, tasks = time.perf_counter(), []
    for number in range(int(rate * seconds)):
        await asyncio.sleep(max(0.0, start + number / rate - time.perf_counter()))
        tasks.append(asyncio.create_task(ask(port)))
    return await asyncio.gather(*tasks)


async def recover(port: int, base: float, end: float) -> float:
    """Seconds from `end` to the beginning of the first request that takes no longer than it should."""
    while True:
        reply = await ask(port)
        if reply.status == 200 and reply.latency <= WELL_AGAIN * base:
            return max(reply.sent - end, 0.0)


async def ask(port: int) -> Reply:
    """One request, on a connection of its own."""
    prompt = [5 + number for number in range(PROMPT_TOKENS)]
    fields = {"model": "smollm2", "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True}
    body = json.dumps(fields).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    )
    sent, status = time.perf_counter(), 0
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"{head}Connection: close\r\n\r\n".encode() + body)
        answer = await reader.read()
        status = int(answer.split(b" ", 2)[1]) if answer else 0
        writer.close()
    return Reply(status, sent, time.perf_counter())


def served(replies: list[Reply], start: float) -> tuple[float, float]:
    """Requests and output tokens a second, up to the last answer: those begun together end together, a step's worth."""
    ends = [reply.received for reply in replies if reply.status == 200]
    count = len(ends) / (max(ends) - start) if ends else 0.0
    return count, count * OUTPUT_TOKENS


def percentile(values: list[float], percent: int) -> float:
    """Of sorted values."""
    return values[min(len(values) * percent // 100, len(values) - 1)] if values else float("nan")


if __name__ == "__main__":
    main()
