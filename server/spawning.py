"""The engine's process as it is started: early, so that it imports torch while the server imports what it needs.

Imports little itself.
"""

import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

ENGINE_COMMAND = (sys.executable, "-m", "octavo.scheduler.process")
INTERNAL_ERROR = 70


class EngineError(Exception):
    """The engine could not start, has died, or was shut down. `exit_code` is what the server should end with."""

    def __init__(self, message: str, exit_code: int = INTERNAL_ERROR) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class Spawned:
    """A process that waits to be told what to load, and our end of the socket to it."""

    process: subprocess.Popen[bytes]
    connection: socket.socket

    def close(self) -> None:
        """See that the process is gone. Idempotent."""
        self.connection.close()
        self.process.kill()
        self.process.wait()


def spawn(command: Sequence[str]) -> Spawned:
    """Start an engine's process. Raises EngineError.

    `command` is called with one more argument, the number of an inherited socket.
    """
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    try:
        with theirs:
            # A session of its own: the terminal's Ctrl-C is for the server, which decides when the engine ends.
            process = subprocess.Popen(  # noqa: S603
                [*command, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
    except OSError as error:
        ours.close()
        raise EngineError(f"cannot start the engine's process: {error}") from error
    return Spawned(process, ours)
