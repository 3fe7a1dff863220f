"""A server for the length of a block, around the tests' engine without a model or another."""

import contextlib
import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

SCRIPTED = (sys.executable, str(Path(__file__).parent.parent / "tests" / "support" / "scripted_daemon.py"))
"""The command that starts a server around an engine without a model."""


@contextlib.contextmanager
def serving(command: Sequence[str]) -> Iterator[tuple[int, int]]:
    """The port and process id of a server that this command starts."""
    with subprocess.Popen([*command, "--port", "0"], stderr=subprocess.PIPE, text=True) as process:
        try:
            found = next(
                filter(None, (re.search(r"serving on \S+:(\d+)", line) for line in process.stderr or ())), None
            )
            if found is None:
                raise SystemExit("the server did not start")
            threading.Thread(target=deque, args=(process.stderr, 0), daemon=True).start()  # it logs each request
            yield int(found[1]), process.pid
        finally:
            process.terminate()
