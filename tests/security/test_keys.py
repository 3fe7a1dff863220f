"""Whatever the path and the host of a request look like, a key is asked for."""

from collections.abc import Iterator

import pytest
from support import daemon
from support.raw import exchange, status_of

HOSTS = [b"x/?", b"x/#", b"x/health", b"x/health?", b"", b"[::1", b"x\tx", b"x/..;/health"]


@pytest.fixture(scope="module")
def locked() -> Iterator[daemon.Daemon]:
    with daemon.running("--api-key", "right") as server:
        yield server


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize(
    "path", [b"/v1/models", b"/metrics", b"/health/../v1/models", b"//v1/models", b"/health%2f..%2finfo"]
)
def test_no_host_or_path_opens_a_route_cve_2026_48746_cve_2026_48710(
    locked: daemon.Daemon, host: bytes, path: bytes
) -> None:
    answer = exchange(locked.url, b"GET " + path + b" HTTP/1.1\r\nHost: " + host + b"\r\nConnection: close\r\n\r\n")
    assert status_of(answer) in (400, 401)
