"""Ten times the load that a server can take: how soon it refuses, how much it still serves, how soon it is well again.

    .venv/bin/python bench/overload.py                       # an engine without a model, 20 ms a step
    .venv/bin/python bench/overload.py --model smollm2       # the default model, with what belongs to it

Each request has 16 prompt tokens and 8 to 24 output tokens, by lot: if all were of one length, those that are asked for
at once would go on in step for ever, which is cheaper than the same work in any other order. At first one client is
alone, for the base latency. Then two phases take turns, because the speed of a machine drifts: as many clients as there
are slots and half as many places in the queue, each asking again at once, for the saturated throughput; and requests
that arrive at ten times that rate whatever becomes of them. At last one client is alone again.

A request goes out on a connection that is idle, or else on a new one, as from a proxy. The client takes time from a
server on the same machine: how much, is printed, and what the server takes.
"""

import argparse
import contextlib
import json
import os
import random
import re
import select
import socket
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from daemons import SCRIPTED, serving

SLOTS, QUEUE = 8, 16
PROMPT_TOKENS, OUTPUT_TOKENS = 16, range(8, 25)
BASE_REQUESTS = 20
OVERLOAD = 10
WELL_AGAIN = 1.5
"""Times the base latency."""

LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)


def spell(output_tokens: int) -> bytes:
    """A request."""
    prompt = [5 + number for number in range(PROMPT_TOKENS)]
    fields = {"model": "smollm2", "prompt": prompt, "max_tokens": output_tokens, "temperature": 0, "ignore_eos": True}
    body = json.dumps(fields).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % len(body) + body


REQUESTS = {tokens: spell(tokens) for tokens in OUTPUT_TOKENS}


@dataclass(frozen=True, slots=True)
class Reply:
    """Status, 0 if there is none; tokens asked for; seconds on the clock of this process."""

    status: int
    tokens: int
    sent: float
    received: float

    @property
    def latency(self) -> float:
        """From sending the request, or opening a connection for it, to the last byte."""
        return self.received - self.sent


@dataclass(slots=True)
class Connection:
    """Carries one request after another."""

    socket: socket.socket
    tokens: int = 0
    sent: float = 0.0
    answer: bytes = b""

    def ask(self, tokens: int) -> None:
        """Send a request."""
        self.tokens, self.sent, self.answer = tokens, time.perf_counter(), b""
        with contextlib.suppress(OSError):  # reading it tells, too
            self.socket.send(REQUESTS[tokens])

    def status(self) -> int | None:
        """Read what is there. The status of the answer once it is complete, 0 if it never will be."""
        try:
            data = self.socket.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            return 0
        self.answer += data
        head, _, body = self.answer.partition(b"\r\n\r\n")
        length = LENGTH.search(head)
        if length and len(body) >= int(length[1]):
            return int(head[9:12])
        return None


class Client:
    """Asks on connections that it keeps; all it ever waits for are the next answers."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._lots = random.Random(0)
        self._epoll = select.epoll()
        self._connections: dict[int, Connection] = {}
        """By their file descriptors."""
        self._idle: list[int] = []
        self.asked = 0
        """Requests whose answers are still to come."""

    def ask(self, tokens: int | None = None) -> None:
        """Send a request."""
        self.asked += 1
        connection = self._connections[self._idle.pop() if self._idle else self._connect()]
        connection.ask(tokens or self._lots.choice(OUTPUT_TOKENS))

    def replies(self, end: float) -> list[Reply]:
        """The next answers; none if nothing comes until `end`."""
        found = []
        for descriptor, _ in self._epoll.poll(max(0.0, end - time.perf_counter())):
            connection = self._connections[descriptor]
            status = connection.status()
            if status is None:
                continue
            if descriptor not in self._idle:
                self.asked -= 1
                self._idle.append(descriptor)
                found.append(Reply(status, connection.tokens, connection.sent, time.perf_counter()))
            if status == 0:
                self._idle.remove(descriptor)
                self._connections.pop(descriptor).socket.close()
        return found

    def alone(self) -> Reply:
        """One request of middle length, while there is no other."""
        self.ask(OUTPUT_TOKENS[len(OUTPUT_TOKENS) // 2])
        (reply,) = self.rest()
        return reply

    def rest(self) -> list[Reply]:
        """All answers that are still to come."""
        found = []
        while self.asked:
            found += self.replies(time.perf_counter() + 1)
        return found

    def _connect(self) -> int:
        connection = socket.create_connection(("127.0.0.1", self._port))
        connection.setblocking(False)
        self._connections[connection.fileno()] = Connection(connection)
        self._epoll.register(connection, select.EPOLLIN)
        return connection.fileno()


@dataclass(frozen=True, slots=True)
class Phase:
    """What a load came to: its length and all replies, on the clock of this process, and CPU seconds."""

    start: float
    end: float
    replies: list[Reply]
    client: float
    server: float

    @property
    def rate(self) -> float:
        """Requests served a second."""
        return len(self._served) / (self.end - self.start)

    @property
    def throughput(self) -> float:
        """Output tokens a second."""
        return sum(reply.tokens for reply in self._served) / (self.end - self.start)

    @property
    def _served(self) -> list[Reply]:
        return [reply for reply in self.replies if reply.status == 200 and reply.received < self.end]


Load = Callable[[Client, float], list[Reply]]
"""Asks until a moment. Returns the replies that have come."""


def main() -> None:
    arguments = parse_arguments()
    command = [*SCRIPTED, "--step-seconds", arguments.step_seconds]
    if arguments.model is not None:
        command = [sys.executable, "-m", "octavo.server.cli", "serve", arguments.model]
    limits = ["--max-num-seqs", str(SLOTS), "--max-queued-requests", str(QUEUE)]
    with serving([*command, *limits]) as (port, process):
        measure(Client(port), process, arguments.rounds, arguments.seconds)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="serve this model instead of an engine without one")
    parser.add_argument("--step-seconds", default="0.02", help="of the engine without a model")
    parser.add_argument("--rounds", type=int, default=14, help="each of a saturated phase and an overloaded one")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each phase")
    return parser.parse_args()


def measure(client: Client, process: int, rounds: int, seconds: float) -> None:
    """Run the phases and print what they came to."""
    for _ in range(SLOTS):  # warm
        client.ask()
    client.rest()
    base = statistics.median(client.alone().latency for _ in range(BASE_REQUESTS))
    print(f"base latency {base * 1e3:.0f} ms")
    saturated, overloaded, shares = [], [], []
    for _ in range(rounds):
        saturated.append(run(saturate, client, process, seconds))
        overloaded.append(run(partial(overload, OVERLOAD * saturated[-1].rate), client, process, seconds))
        full, served = saturated[-1].throughput, overloaded[-1].throughput
        shares.append(served / full)
        print(f"saturated {full:.0f} output tokens/s, overloaded {served:.0f}: {shares[-1]:.2f}", flush=True)
    recovery = recover(client, base, overloaded[-1].end)
    full, served = (statistics.median(phase.throughput for phase in phases) for phases in (saturated, overloaded))
    print(
        f"saturated {full:.0f} output tokens/s, goodput {served:.0f}, {statistics.median(shares):.2f} of it (medians)"
    )
    report(saturated, overloaded)
    print(f"base latency again {recovery:.1f} s after the last arrival")


def run(load: Load, client: Client, process: int, seconds: float) -> Phase:
    """One phase, and then the rest of its answers."""
    start, own, server = time.perf_counter(), time.process_time(), cpu_seconds(process)
    replies = load(client, start + seconds)
    own, server = time.process_time() - own, cpu_seconds(process) - server
    return Phase(start, start + seconds, replies + client.rest(), own, server)


def saturate(client: Client, end: float) -> list[Reply]:
    """As many clients as keep the engine full, each asking again at once."""
    replies = []
    for _ in range(SLOTS + QUEUE // 2):
        client.ask()
    while time.perf_counter() < end:
        found = client.replies(end)
        for _ in found:
            client.ask()
        replies += found
    return replies


def overload(rate: float, client: Client, end: float) -> list[Reply]:
    """Requests that arrive at this rate, whatever becomes of those before them."""
    replies, due = [], time.perf_counter()
    while (now := time.perf_counter()) < end:
        if now < due:
            replies += client.replies(min(due, end))
        else:
            client.ask()
            due += 1 / rate
    return replies


def recover(client: Client, base: float, end: float) -> float:
    """Seconds from `end` to the beginning of the first request that takes no longer than it should."""
    while True:
        reply = client.alone()
        if reply.status == 200 and reply.latency <= WELL_AGAIN * base:
            return max(reply.sent - end, 0.0)


def report(saturated: list[Phase], overloaded: list[Phase]) -> None:
    """Print what became of the requests of all rounds, and what a refusal cost."""
    replies = [reply for phase in overloaded for reply in phase.replies]
    seconds = sum(phase.end - phase.start for phase in overloaded)
    refused = sorted(reply.latency for reply in replies if reply.status == 429)
    failed = sum(reply.status not in (200, 429) for reply in replies)
    print(f"{len(replies)} requests at {len(replies) / seconds:.0f}/s: {len(refused)} refused, {failed} failed")
    print(f"refused in {percentile(refused, 50) * 1e3:.1f} ms (p50), {percentile(refused, 99) * 1e3:.1f} ms (p99)")
    for name in ("client", "server"):
        base, more = (sum(getattr(phase, name) for phase in phases) for phases in (saturated, overloaded))
        each = (more - base) / len(refused)
        cores = f"{base / seconds:.1%} of a core, overloaded {more / seconds:.1%}"
        print(f"CPU time of the {name}: {cores}, {each * 1e3:.2f} ms a refusal")


def cpu_seconds(process: int) -> float:
    """What a process has taken."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def percentile(values: list[float], percent: int) -> float:
    """Of sorted values."""
    return values[min(len(values) * percent // 100, len(values) - 1)] if values else float("nan")


if __name__ == "__main__":
    main()
