"""What the front end costs: tokens streamed per second of one core's time, on an engine that computes nothing.

    .venv/bin/python bench/front_end.py                      # 64 streams, 500 and 1,900 tokens each
    .venv/bin/python bench/front_end.py --endpoint completions --streams 8

The server's process does what it always does (HTTP, detokenising, SSE, metrics); only the engine's tokens are made up.
The figure is tokens divided by the CPU time of that one process, so the engine and this client do not count.
"""

import argparse
import asyncio
import json
import os
import time
from pathlib import Path

from daemons import SCRIPTED, serving

ENDPOINTS = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Go on."}]}),
    "completions": ("/v1/completions", {"prompt": [5, 6, 7]}),
}


def main() -> None:
    arguments = parse_arguments()
    limits = ["--max-num-seqs", str(arguments.streams), "--max-num-batched-tokens", "512", "--kv-blocks", "16384"]
    with serving([*SCRIPTED, *limits, "--step-seconds", str(arguments.step_seconds)]) as (port, pid):
        for endpoint in arguments.endpoint:
            asyncio.run(load(port, endpoint, arguments.streams, 20))
            for length in arguments.output_tokens:
                before, start = cpu_seconds(pid), time.perf_counter()
                chunks = asyncio.run(load(port, endpoint, arguments.streams, length))
                spent, wall = cpu_seconds(pid) - before, time.perf_counter() - start
                tokens = arguments.streams * length
                print(
                    f"{endpoint}, {arguments.streams} x {length} tokens: {tokens / spent:,.0f} tokens/s of one core, "
                    f"{tokens / wall:,.0f} tokens/s of wall time, {spent / chunks * 1e6:.0f} us a chunk, "
                    f"{tokens / chunks:.2f} tokens a chunk",
                    flush=True,
                )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--endpoint", nargs="+", choices=tuple(ENDPOINTS), default=list(ENDPOINTS))
    parser.add_argument("--streams", type=int, default=64, help="connections at a time (default: %(default)s)")
    parser.add_argument(
        "--output-tokens", type=int, nargs="+", default=[500, 1900], help="of each stream; the cost must not grow"
    )
    parser.add_argument(
        "--step-seconds",
        type=float,
        default=0.004,
        help="of the engine, so that tokens come one at a time; 0: flat out",
    )
    return parser.parse_args()


def cpu_seconds(pid: int) -> float:
    """User and system time of one process, its threads included and its children not."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def load(port: int, endpoint: str, streams: int, tokens: int) -> int:
    """Stream from so many connections at once; return the number of chunks."""
    counts = await asyncio.gather(*(stream(port, endpoint, tokens) for _ in range(streams)))
    return sum(counts)


async def stream(port: int, endpoint: str, tokens: int) -> int:
    """Read one stream to its end; return the number of chunks."""
    path, fields = ENDPOINTS[endpoint]
    options = {"model": "smollm2", "max_tokens": tokens, "stream": True, "stream_options": {"include_usage": True}}
    body = json.dumps(fields | options).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    writer.write(f"{head}Connection: close\r\n\r\n".encode() + body)
    text = await reader.read()
    writer.close()
    if f'"completion_tokens":{tokens}'.encode() not in text:
        raise SystemExit(f"a stream did not end well: {text[-500:]!r}")
    return text.count(b"data: {")


if __name__ == "__main__":
    main()
