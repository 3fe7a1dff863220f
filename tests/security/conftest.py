"""One daemon under attack: with PYTHONOPTIMIZE=1, so that nothing it checks may be an `assert` (CVE-2026-41523).

Whatever its Python code does with sockets is written down by an audit hook, in the engine and the workers too.
"""

from collections.abc import Iterator

import pytest
from support import daemon
from support.attacked import Attacked

HOOK = """
import os, sys
_record = os.environ["AUDIT_RECORD"]
_watched = {"socket.connect", "socket.bind", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname"}
def _note(event, arguments):
    if event in _watched:
        with open(_record, "a") as file:
            file.write(f"{event} {arguments!r}\\n")
sys.addaudithook(_note)
"""


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    directory = tmp_path_factory.mktemp("audit")
    (directory / "sitecustomize.py").write_text(HOOK)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(directory), prepend=":")
        patch.setenv("AUDIT_RECORD", str(directory / "record"))
        patch.setenv("PYTHONOPTIMIZE", "1")
        with daemon.running() as running:
            record = directory / "record"
            assert "socket.bind" in record.read_text()
            server = Attacked(running, record, starting=record.stat().st_size)
            yield server
            assert not server.socket_events(), "the daemon connects to nobody, while it serves"
