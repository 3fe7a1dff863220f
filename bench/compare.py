"""Octavo beside other servers on this machine: same model, same client, workload by workload in turn.

    .venv/bin/python bench/compare.py --rounds 3 \\
        --peer "llama.cpp Q8_0=llama-server -m models/q8_0.gguf --port {port} -np 32 -c 65536" \\
        --peer "vLLM bf16=vllm serve models/hf --port {port} --max-model-len 4096"

Every server is started once and then stopped (SIGSTOP) but while it is measured, so that all of them are measured in
the same minutes, a workload of one after the same workload of another. The client is `octavo bench`. Figures are
medians over the rounds; each round has prompts of its own, so that no cache answers but within workload e. A peer
whose program is not there is left out, and said to be. bench/peer_models.py writes the model for them.
"""

import argparse
import contextlib
import json
import os
import platform
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from bandwidth import read_bandwidth

OCTAVO = str(Path(sys.executable).parent / "octavo")
WORKLOADS = {
    "a": "--concurrency 1 --requests 8 --prompt-tokens 128 --output-tokens 128",
    "b": "--concurrency 8 --requests 32 --prompt-tokens 128 --output-tokens 128",
    "c": "--concurrency 32 --requests 64 --prompt-tokens 128 --output-tokens 128",
    "d": "--concurrency 4 --requests 8 --prompt-tokens 1500 --output-tokens 64",
    "e": "--concurrency 4 --requests 16 --prompt-tokens 1064 --shared-prefix 1000 --output-tokens 32",
}
MEANING = {
    "a": "1 stream, 128 in / 128 out",
    "b": "8 streams, 128 in / 128 out",
    "c": "32 streams, 128 in / 128 out",
    "d": "4 streams, 1,500 in / 64 out",
    "e": "4 streams, 1,000 common + 64 own in / 32 out",
}
INTERRUPTED = (
    {"timestamp": 0.0, "prompt_tokens": 64, "output_tokens": 160},
    {"timestamp": 1.0, "prompt_tokens": 1500, "output_tokens": 1},
)
"""A stream, and a long prompt that arrives while it is read: how long does the stream stand still?"""


@dataclass
class Server:
    """One of those that are compared."""

    name: str
    command: list[str]
    ours: bool = False
    process: subprocess.Popen[bytes] | None = None
    url: str = ""
    start_seconds: float = 0.0
    memory_bytes: int = 0
    once: str = ""
    """Workloads that are measured in the first round only."""
    never: str = ""
    """Workloads that are not measured."""
    rates: dict[str, list[float]] = field(default_factory=dict)
    gaps: list[float] = field(default_factory=list)

    def start(self, log: Path, timeout: float) -> None:
        """Start it and wait for its first token."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [part.replace("{port}", str(port)) for part in self.command]
        started = time.monotonic()
        with log.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        while time.monotonic() - started < timeout:
            if self.process.poll() is not None:
                raise SystemExit(f"{self.name} ended at start; see {log}")
            with contextlib.suppress(httpx.HTTPError, KeyError, IndexError, ValueError):
                model = httpx.get(f"{self.url}/v1/models", timeout=5).raise_for_status().json()["data"][0]["id"]
                body = {"model": model, "prompt": "Once", "max_tokens": 1, "stream": False}
                if httpx.post(f"{self.url}/v1/completions", json=body, timeout=60).status_code == 200:
                    self.start_seconds = time.monotonic() - started
                    return
            time.sleep(0.05)
        raise SystemExit(f"{self.name} gave no answer within {timeout:g} s; see {log}")

    def signal(self, number: int) -> None:
        """Send a signal to every process of the server, its children first to be continued and last to be stopped."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def processes(self) -> list[int]:
        """The process and all its descendants."""
        found = [self.process.pid] if self.process else []
        for pid in found:
            with contextlib.suppress(OSError):
                children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
                found += [int(child) for child in children]
        return found

    def take_priority(self) -> None:
        """Go before everything else on this machine; needs root."""
        for pid in self.processes():
            Path(f"/proc/{pid}/autogroup").write_text("-20")

    def rate(self, workload: str) -> float:
        """Median output tokens per second; 0 where it was not measured."""
        return statistics.median(self.rates.get(workload, [0.0]))

    def measure_memory(self) -> None:
        """Remember the largest proportional share of memory that its processes had together."""
        total = 0
        for pid in self.processes():
            with contextlib.suppress(OSError):
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                total += next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
        self.memory_bytes = max(self.memory_bytes, total)


def main() -> None:
    arguments = parse_arguments()
    servers = present(arguments)
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        trace = folder / "trace.jsonl"
        trace.write_text("".join(json.dumps(line) + "\n" for line in INTERRUPTED))
        try:
            for number, server in enumerate(tuple(servers)):
                try:
                    server.start(folder / f"{number}.log", arguments.start_timeout)
                except SystemExit as error:
                    if server.ours:
                        raise
                    print(f"{server.name} is left out: {error}", flush=True)
                    server.signal(signal.SIGKILL)
                    servers.remove(server)
                    continue
                if arguments.priority:
                    server.take_priority()
                server.signal(signal.SIGSTOP)
                print(f"{server.name}: first answer after {server.start_seconds:.1f} s", flush=True)
            bandwidths = [run_round(servers, number, arguments.workloads, trace) for number in range(arguments.rounds)]
        except SystemExit:
            for log in folder.glob("*.log"):
                sys.stderr.write(f"--- {log.name}\n{log.read_text(errors='replace')[-2000:]}\n")
            raise
        finally:
            for server in servers:
                server.signal(signal.SIGCONT)
                server.signal(signal.SIGKILL)
    write_report(servers, bandwidths, arguments)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND", help="with {port} in it")
    parser.add_argument(
        "--octavo", action="append", metavar="OPTIONS", help='of serve; default: "" (the embedded model)'
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--once", action="append", default=[], metavar="NAME=WORKLOADS", help="measure these in the first round only"
    )
    parser.add_argument(
        "--never",
        action="append",
        default=[],
        metavar="NAME=WORKLOADS",
        help="do not measure these, as it takes minutes",
    )
    parser.add_argument("--workloads", default="abcde", help="which of them (default: %(default)s)")
    parser.add_argument("--start-timeout", type=float, default=300)
    parser.add_argument("--priority", action="store_true", help="let servers go before all else here (needs root)")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    parser.add_argument("--plot", type=Path, help="write a bar chart to this PNG")
    return parser.parse_args()


def present(arguments: argparse.Namespace) -> list[Server]:
    """Octavo as asked for, and the peers whose programs exist."""
    servers = []
    for options in arguments.octavo or [""]:
        command = [OCTAVO, "serve", *shlex.split(options), "--port", "{port}", "--log-level", "warning"]
        servers.append(Server(f"Octavo {options}".strip(), command, ours=True))
    for peer in arguments.peer:
        name, separator, command = peer.partition("=")
        words = shlex.split(command)
        if not separator or not words or "{port}" not in command:
            raise SystemExit(f"--peer {peer!r}: expected NAME=COMMAND, with {{port}} in the command")
        program = next(word for word in words if word != "env" and "=" not in word)
        if shutil.which(program) is None:
            print(f"{name} is left out: there is no {program}")
            continue
        servers.append(Server(name, words))
    once, never = (dict(item.split("=") for item in given) for given in (arguments.once, arguments.never))
    for server in servers:
        server.once, server.never = once.get(server.name, ""), never.get(server.name, "")
    return servers


def run_round(servers: list[Server], number: int, workloads: str, trace: Path) -> float:
    """Measure every workload once on every server; return the read bandwidth of the minute, bytes per second."""
    bandwidth = read_bandwidth()
    print(f"round {number + 1}: this machine reads {bandwidth / 1e9:.1f} GB/s", flush=True)
    for workload in workloads:
        options = WORKLOADS[workload].split()
        turn = number % len(servers)
        for server in servers[turn:] + servers[:turn]:
            if workload in server.never or (number and workload in server.once):
                continue
            facts = bench(server, [*options, "--seed", str(1000 * number + ord(workload))])
            server.rates.setdefault(workload, []).append(facts["output_tokens_per_second"])
            print(f"  {workload}  {server.name:36} {facts['output_tokens_per_second']:8.1f} tokens/s", flush=True)
    for server in servers:
        server.gaps.append(
            bench(server, ["--trace", str(trace), "--seed", str(number)])["latency_ms"]["between_chunks"]["max"]
        )
        print(f"  gap  {server.name:34} {server.gaps[-1]:8.0f} ms", flush=True)
    return bandwidth


def bench(server: Server, options: list[str]) -> dict[str, Any]:
    """Run the client once while only this server runs."""
    server.signal(signal.SIGCONT)
    try:
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            command = [OCTAVO, "bench", server.url, *options, "--json", file.name]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"{server.name}: the client failed: {done.stdout[-1000:]}{done.stderr[-1000:]}")
            server.measure_memory()
            return dict(json.loads(Path(file.name).read_text()))
    finally:
        server.signal(signal.SIGSTOP)


def write_report(servers: list[Server], bandwidths: list[float], arguments: argparse.Namespace) -> None:
    """Print the table, and write it where it was asked for."""
    lines = list(table(servers, arguments.workloads))
    words = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    ]
    cpu = words[0] if words else ""
    reads = f"{min(bandwidths) / 1e9:.1f} to {max(bandwidths) / 1e9:.1f} GB/s"
    machine = f"{os.cpu_count()} cores of {cpu or platform.machine()}, reading {reads}"
    lines += ["", f"{time.strftime('%Y-%m-%d')}, {machine}; medians of {len(bandwidths)}."]
    if once := [f"{server.name} at {', '.join(server.once)}" for server in servers if server.once]:
        lines[-1] += f" Measured once only: {'; '.join(once)}."
    print("\n" + "\n".join(lines))
    if arguments.markdown:
        arguments.markdown.write_text("\n".join(lines) + "\n")
    if arguments.json:
        facts = [
            {key: value for key, value in vars(server).items() if key not in {"process", "command", "url"}}
            for server in servers
        ]
        arguments.json.write_text(json.dumps({"servers": facts, "read_bandwidths": bandwidths}, indent=1))
    if arguments.plot:
        plot(servers, arguments.workloads, arguments.plot)


def table(servers: list[Server], workloads: str) -> list[str]:
    """One row a workload: output tokens per second of each server, and our ratios to the best peer."""
    peers = [server for server in servers if not server.ours]
    names = [server.name for server in servers]
    lines = [f"| output tokens/s | {' | '.join(names)} | ratio |", "|---" * (len(names) + 2) + "|"]
    for workload in workloads:
        best = max((peer.rate(workload) for peer in peers), default=0.0)
        ratio = ", ".join(f"{server.rate(workload) / best:.2f}" for server in servers if server.ours) if best else "-"
        rates = [f"{server.rate(workload):.1f}" if server.rate(workload) else "-" for server in servers]
        lines.append(f"| {workload}: {MEANING[workload]} | {' | '.join(rates)} | {ratio} |")
    gaps = [f"{statistics.median(server.gaps):.0f}" for server in servers]
    lines.append(f"| worst gap while a 1,500-token prompt arrives, ms | {' | '.join(gaps)} | |")
    lines.append(f"| start to first answer, s | {' | '.join(f'{server.start_seconds:.1f}' for server in servers)} | |")
    memory = [f"{server.memory_bytes / 2**30:.2f}" for server in servers]
    lines.append(f"| memory while serving (PSS), GiB | {' | '.join(memory)} | |")
    return lines


def plot(servers: list[Server], workloads: str, target: Path) -> None:
    """Draw the rates as bars, each workload scaled to its best server."""
    import matplotlib.pyplot as plt  # noqa: PLC0415  (an extra; needed for the chart alone)

    figure, axes = plt.subplots(figsize=(9, 4))
    width = 0.8 / len(servers)
    for index, server in enumerate(servers):
        medians = [server.rate(workload) for workload in workloads]
        best = [max(other.rate(workload) for other in servers) for workload in workloads]
        places = [place + index * width for place in range(len(workloads))]
        bars = axes.bar(
            places, [value / most for value, most in zip(medians, best, strict=True)], width, label=server.name
        )
        axes.bar_label(bars, [f"{value:.0f}" for value in medians], fontsize=6)
    axes.set_xticks([place + 0.4 - width / 2 for place in range(len(workloads))], list(workloads))
    axes.set_ylabel("output tokens/s, of the best")
    axes.legend(fontsize=7, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    figure.savefig(target, dpi=150, bbox_inches="tight")


if __name__ == "__main__":
    main()
