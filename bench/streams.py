"""How decoding scales: output tokens per second of one stream and of several, against a server this script starts.

    .venv/bin/python bench/streams.py                       # default model, 1 and 8 streams
    .venv/bin/python bench/streams.py --streams 1 8 32 --model MODEL --output-tokens 128

Every stream sends its requests one after another (a closed loop) with prompts of its own, greedy, to a fixed length.
"""

import argparse
import asyncio
import itertools
import json
import random
import sys
import time

import httpx
from daemons import serving


def main() -> None:
    arguments = parse_arguments()
    with serving([sys.executable, "-m", "octavo.server.cli", "serve", arguments.model]) as (port, _):
        url = f"http://127.0.0.1:{port}"
        vocabulary = range(1000, 20_000)
        rates: dict[int, float] = {}
        for round_number in range(arguments.rounds):
            for streams in arguments.streams:
                rng = random.Random(f"{round_number} {streams}")
                prompts = [
                    [rng.choice(vocabulary) for _ in range(arguments.prompt_tokens)]
                    for _ in range(streams * arguments.requests)
                ]
                seconds, gap = asyncio.run(load(url, prompts, streams, arguments.output_tokens))
                rate = len(prompts) * arguments.output_tokens / seconds
                rates[streams] = max(rate, rates.get(streams, 0.0))
                print(f"{streams:3d} streams: {rate:7.1f} tokens/s, median gap {gap * 1e3:6.1f} ms", flush=True)
    base = min(arguments.streams)
    for streams in arguments.streams:
        print(f"best of {arguments.rounds}: {streams} streams {rates[streams]:.1f} tokens/s", end="")
        print(f" = {rates[streams] / rates[base]:.2f} x {base} stream" if streams != base else "")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="what to serve (default: %(default)s)")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8], help="concurrent streams to compare")
    parser.add_argument("--requests", type=int, default=2, help="requests of each stream (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3, help="the best round counts (default: %(default)s)")
    return parser.parse_args()


async def load(url: str, prompts: list[list[int]], streams: int, output_tokens: int) -> tuple[float, float]:
    """Send all prompts over `streams` connections. Returns seconds in all and the median gap between tokens."""
    queue = list(prompts)
    gaps: list[float] = []
    async with httpx.AsyncClient(timeout=600) as client:
        model = (await client.get(f"{url}/v1/models")).json()["data"][0]["id"]

        async def stream() -> None:
            while queue:
                body = {
                    "model": model,
                    "prompt": queue.pop(),
                    "max_tokens": output_tokens,
                    "temperature": 0,
                    "ignore_eos": True,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                }
                gaps.extend(await one(client, url, body, output_tokens))

        start = time.perf_counter()
        await asyncio.gather(*(stream() for _ in range(streams)))
        seconds = time.perf_counter() - start
    return seconds, sorted(gaps)[len(gaps) // 2]


async def one(client: httpx.AsyncClient, url: str, body: dict[str, object], expected: int) -> list[float]:
    """Run one streaming request and return the gaps between its chunks."""
    arrivals: list[float] = []
    usage = {}
    async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                arrivals.append(time.perf_counter())
                usage = json.loads(line[6:]).get("usage") or usage
    if usage.get("completion_tokens") != expected:
        sys.exit(f"the server generated {usage} tokens, not {expected}")
    return [later - earlier for earlier, later in itertools.pairwise(arrivals)]


if __name__ == "__main__":
    main()
