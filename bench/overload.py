"""Ten times the load that a server can take: how soon it refuses, how much it still serves, how soon it is well again.

    .venv/bin/python bench/overload.py                       # an engine without a model, 20 ms a step
    .venv/bin/python bench/overload.py --model smollm2       # the default model, with what belongs to it

Four phases, each request of 16 prompt and 16 output tokens: one client alone, for the base latency; as many clients as
there are slots and half as many places in the queue, each asking again at once, for the saturated throughput; requests
that arrive at ten times that rate whatever becomes of them; and one client alone again.

A request goes out on a connection that is idle, or else on a new one, as from a proxy. The client takes time from a
server on the same machine: how much, is printed.
"""

import argparse
import asyncio
import json
import re
import statistics
import sys
import time
from dataclasses import dataclass

import uvloop
from daemons import SCRIPTED, serving

SLOTS, QUEUE = 8, 16
PROMPT_TOKENS, OUTPUT_TOKENS = 16, 16
BASE_REQUESTS = 20
OVERLOAD = 10
WELL_AGAIN = 1.5
"""Times the base latency."""

FIELDS = {"max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True}
BODY = json.dumps({"model": "smollm2", "prompt": [5 + number for number in range(PROMPT_TOKENS)], **FIELDS}).encode()
REQUEST = (
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
    % (len(BODY), BODY)
)
LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)


@dataclass(frozen=True)
class Reply:
    """Seconds on the clock of this process."""

    status: int
    sent: float
    received: float

    @property
    def latency(self) -> float:
        """From sending the request, or opening a connection for it, to the last byte."""
        return self.received - self.sent


class Connection(asyncio.Protocol):
    """Carries one request after another."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep what to write to."""
        self.transport = transport

    def ask(self) -> asyncio.Future[int]:
        """The status of the answer, 0 if there is none."""
        self._answer, self._status = b"", asyncio.get_running_loop().create_future()
        self.transport.write(REQUEST)
        return self._status

    def data_received(self, data: bytes) -> None:
        """Look whether the answer is complete."""
        self._answer += data
        head, _, body = self._answer.partition(b"\r\n\r\n")
        length = LENGTH.search(head)
        if length and len(body) >= int(length[1]):
            self._status.set_result(int(head[9:12]))

    def connection_lost(self, _: Exception | None) -> None:
        """Without an answer, that is the answer."""
        if not self._status.done():
            self._status.set_result(0)


class Client:
    """Asks on connections that it keeps."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: list[Connection] = []

    async def ask(self) -> Reply:
        """One request."""
        sent = time.perf_counter()
        try:
            connection = await self._connection()
        except OSError:
            return Reply(0, sent, time.perf_counter())
        status = await connection.ask()
        self._idle.append(connection)
        return Reply(status, sent, time.perf_counter())

    async def _connection(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.transport.is_closing():
                return connection
        return (await asyncio.get_running_loop().create_connection(Connection, "127.0.0.1", self._port))[1]


def main() -> None:
    arguments = parse_arguments()
    command = [*SCRIPTED, "--step-seconds", arguments.step_seconds]
    if arguments.model is not None:
        command = [sys.executable, "-m", "octavo.server.cli", "serve", arguments.model]
    limits = ["--max-num-seqs", str(SLOTS), "--max-queued-requests", str(QUEUE)]
    with serving([*command, *limits]) as (port, _):
        uvloop.run(measure(Client(port), arguments.seconds))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="serve this model instead of an engine without one")
    parser.add_argument("--step-seconds", default="0.02", help="of the engine without a model")
    parser.add_argument("--seconds", type=float, default=20.0, help="of saturation, and of the overload")
    return parser.parse_args()


async def measure(client: Client, seconds: float) -> None:
    """Run the phases and print what they came to."""
    await asyncio.gather(*(client.ask() for _ in range(SLOTS)))  # warm
    base = statistics.median([(await client.ask()).latency for _ in range(BASE_REQUESTS)])
    start = time.perf_counter()
    rate, saturated = served(await saturate(client, seconds), start)
    start, own = time.perf_counter(), time.process_time()
    replies = await overload(client, OVERLOAD * rate, seconds)
    own = (time.process_time() - own) / len(replies)
    _, goodput = served([reply for reply in replies if reply.received < start + seconds], start)
    recovery = await recover(client, base, start + seconds)
    refused = sorted(reply.latency for reply in replies if reply.status == 429)
    other = [reply.status for reply in replies if reply.status not in (200, 429)]
    print(f"base latency {base * 1e3:.0f} ms, saturated {saturated:.0f} output tokens/s ({rate:.1f} requests/s)")
    print(f"{len(replies)} requests at {len(replies) / seconds:.0f}/s: {len(refused)} refused, {len(other)} failed")
    print(f"each took {own * 1e3:.2f} ms of the client's CPU time")
    print(f"refused in {percentile(refused, 50) * 1e3:.1f} ms (p50), {percentile(refused, 99) * 1e3:.1f} ms (p99)")
    print(f"goodput {goodput:.0f} output tokens/s, {goodput / saturated:.2f} of the saturated throughput")
    print(f"base latency again {recovery:.1f} s after the last arrival")


async def saturate(client: Client, seconds: float) -> list[Reply]:
    """As many clients as keep the engine full, each asking again at once."""
    end = time.perf_counter() + seconds

    async def asking() -> list[Reply]:
        replies = []
        while time.perf_counter() < end:
            replies.append(await client.ask())
        return replies

    found = await asyncio.gather(*(asking() for _ in range(SLOTS + QUEUE // 2)))
    return [reply for replies in found for reply in replies if reply.received < end]


async def overload(client: Client, rate: float, seconds: float) -> list[Reply]:
    """Requests that arrive at this rate, whatever becomes of those before them."""
    start, tasks = time.perf_counter(), []
    for number in range(int(rate * seconds)):
        await asyncio.sleep(max(0.0, start + number / rate - time.perf_counter()))
        tasks.append(asyncio.create_task(client.ask()))
    return await asyncio.gather(*tasks)


async def recover(client: Client, base: float, end: float) -> float:
    """Seconds from `end` to the beginning of the first request that takes no longer than it should."""
    while True:
        reply = await client.ask()
        if reply.status == 200 and reply.latency <= WELL_AGAIN * base:
            return max(reply.sent - end, 0.0)


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
