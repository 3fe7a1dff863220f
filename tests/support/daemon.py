"""A daemon of its own process with a scripted engine, for tests of how it starts, ends and logs."""

import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from support import scripted_daemon


@dataclass
class Daemon:
    """A running daemon with a scripted engine, and what it has logged."""

    process: subprocess.Popen[str]
    url: str = ""
    log: list[str] = field(default_factory=list)

    def request(self, prompt: list[int], max_tokens: int, *, stream: bool = False) -> httpx.Response:
        body = {"model": "smollm2", "prompt": prompt, "max_tokens": max_tokens, "stream": stream}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=60)

    def in_background(self, prompt: list[int], max_tokens: int, *, stream: bool = False) -> "Background":
        """Send a request and return once the engine computes it."""
        before = self.running()
        background = Background(self, prompt, max_tokens, stream)
        background.start()
        while self.running() == before:
            assert background.is_alive()
            time.sleep(0.01)
        return background

    def running(self) -> int:
        text = httpx.get(f"{self.url}/metrics").text
        return int(float(re.search(r"^octavo_requests_running (.*)$", text, re.MULTILINE)[1]))

    def engine(self) -> int:
        """The process id of the engine."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        [pid] = [int(child) for child in children if "scripted_engine" in Path(f"/proc/{child}/cmdline").read_text()]
        return pid

    def wait(self) -> int:
        return self.process.wait(60)


class Background(threading.Thread):
    def __init__(self, daemon: Daemon, prompt: list[int], max_tokens: int, stream: bool) -> None:
        super().__init__(daemon=True)
        self.call = lambda: daemon.request(prompt, max_tokens, stream=stream)
        self.response: httpx.Response | None = None

    def run(self) -> None:
        try:
            self.response = self.call()
        except httpx.HTTPError:
            self.response = None

    def result(self) -> httpx.Response | None:
        self.join(60)
        return self.response


@contextmanager
def running(*arguments: str, step_seconds: float = 0.0, until: str = "serving on") -> Iterator[Daemon]:
    """A daemon that has logged a line with the words `until` and an address."""
    command = [
        sys.executable,
        "-W",
        "error",
        scripted_daemon.__file__,
        "--port",
        "0",
        "--step-seconds",
        str(step_seconds),
    ]
    with subprocess.Popen([*command, *arguments], stderr=subprocess.PIPE, text=True) as process:
        daemon = Daemon(process)
        try:
            for line in process.stderr:
                daemon.log.append(line)
                if until in line:
                    daemon.url = re.search(r"https?://[^\s;\"]+", line)[0]
                    break
            reader = threading.Thread(target=lambda: daemon.log.extend(process.stderr), daemon=True)
            reader.start()
            yield daemon
        finally:
            process.kill()
            process.wait()
            reader.join(10)


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
