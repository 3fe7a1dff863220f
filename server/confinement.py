"""What a worker process takes from itself before it touches what is not trusted."""

import resource
import sys
import time
from collections.abc import Callable

from octavo.scheduler.process import prepare_process

STACK_BYTES = 4 << 20
"""Half of what the engine's main thread usually has: nesting that overflows a stack does so here first."""


def confine(address_space: int) -> None:
    """Limit memory, and forbid for ever to open or write a file, to connect to anything or to leave a core dump.

    The pipes to the server stay open.
    """
    prepare_process()
    time.localtime()  # reads the time zone's file
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, STACK_BYTES))
    resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))


def answer_lines(answer: Callable[[bytes], bytes]) -> None:
    """Say by an empty line that the opening was read, then answer each line of the standard input with one."""
    sys.stdout.buffer.write(b"\n")
    sys.stdout.buffer.flush()
    for line in sys.stdin.buffer:
        sys.stdout.buffer.write(answer(line) + b"\n")
        sys.stdout.buffer.flush()
