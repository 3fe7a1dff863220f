"""The command line as a user runs it."""

import os
import subprocess
import sys


def octavo(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OCTAVO_")}
    command = [sys.executable, "-W", "error", "-m", "octavo.server.cli", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env=clean | {"COLUMNS": "200"} | environment
    )


def only_error(result: subprocess.CompletedProcess[str]) -> str:
    """The last line on stderr, of a command that failed without a traceback."""
    assert "Traceback" not in result.stderr
    return result.stderr.splitlines()[-1]
