"""A daemon under attack, as tests/security sees it."""

from dataclasses import dataclass
from pathlib import Path

import httpx
from support.daemon import Daemon
from support.live import NO_TLS


@dataclass
class Attacked:
    """The daemon, and the record of what it did with sockets."""

    daemon: Daemon
    record: Path
    starting: int
    """The length of the record when it began to serve."""

    @property
    def url(self) -> str:
        return self.daemon.url

    def post(self, path: str, **fields: object) -> httpx.Response:
        return httpx.post(
            self.url + path, json={"model": "smollm2", "max_tokens": 2, **fields}, timeout=60, verify=NO_TLS
        )

    def answers(self) -> bool:
        """Whether it still serves, with the same engine."""
        return self.post("/v1/completions", prompt=[5, 6]).status_code == 200

    def socket_events(self) -> list[str]:
        """What was done with sockets, but accepting clients, since it began to serve."""
        return self.record.read_text()[self.starting :].splitlines()
