"""The ranks of a divided model: the engine's process is rank 0, and spawns the others as its children.

`python -m octavo.scheduler.ranks SOCKET FILE RANK SIZE` is one of those: SOCKET an inherited socket to the engine, FILE
an inherited file in memory by which the ranks find each other. It is told the configuration and then every step, and
runs it as rank 0 does; it answers nothing. A rank that ends by itself ends the engine, whose end is that of all ranks.

Where a launcher has started the ranks, on one machine or several, `octavo serve` becomes an engine of rank 0, and of
another rank `python -m octavo.scheduler.ranks`, which hears the same by broadcasts.
"""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

import msgspec

from octavo.model.device import use_gpu
from octavo.model.parallel import RankError, Ranks, leave
from octavo.model.step import Pending, Runner, Step
from octavo.scheduler.launch import Launch, find_launch
from octavo.scheduler.loading import load
from octavo.scheduler.log_format import formatter
from octavo.scheduler.messages import EngineConfig, Loading, Ready
from octavo.scheduler.policy import Scheduler
from octavo.scheduler.process import INTERNAL_ERROR, prepare_process

Hear = Callable[[], bytes]
"""Waits for what rank 0 says next; nothing is the end."""

_WELCOME = b"welcome"
"""Said to a spawned rank first: where it hears nothing, the engine has ended before the rank was tied to its life."""

_log = logging.getLogger("octavo.scheduler.ranks")  # not __name__, which is "__main__" in a rank


class _Pipe:
    """A line between two processes. An empty message means the end, as does the end of the other."""

    def __init__(self, connection: socket.socket) -> None:
        self._file = connection.makefile("rwb")

    def tell(self, message: bytes) -> None:
        """Say something to the other. Raises OSError where nobody is there any more."""
        self._file.write(len(message).to_bytes(4, "little") + message)
        self._file.flush()

    def hear(self) -> bytes:
        """Wait for what the other says next."""
        return self._file.read(int.from_bytes(self._file.read(4), "little"))


class Team:
    """Rank 0's view of the others. An end of one of them ends this process, which no step could outlive."""

    def __init__(self) -> None:
        self._tells: list[Callable[[bytes], None]] = []

    def load(self, config: EngineConfig, report: Callable[[Loading], None]) -> tuple[Scheduler, Runner, Ready]:
        """Load a model on as many ranks as the configuration says, this process among them. Raises what `load` does."""
        if config.tensor_parallel_size == 1:
            return load(config, report)
        scheduler, runner, ready = load(config, report, self._join)
        return scheduler, LeadingRunner(runner, self._tell), ready

    def leave(self, code: int) -> None:
        """End this process, if it has met others, which are told of an orderly end."""
        if code == 0:
            with contextlib.suppress(RuntimeError, OSError):
                self._tell(b"")
        leave(code)

    def _tell(self, message: bytes) -> None:
        for tell in self._tells:
            tell(message)

    def _join(self, config: EngineConfig) -> Ranks:
        """Meet the other ranks, which are spawned if nobody else has started them, and hand them the configuration."""
        size, told = config.tensor_parallel_size, msgspec.msgpack.encode(config)
        if find_launch(size) is not None:
            ranks = Ranks("", 0, size)
            self._tells = [ranks.tell]
            self._tell(told)
            return ranks
        rendezvous = os.memfd_create("octavo-ranks")
        try:
            self._tells = [_spawn(rank, size, rendezvous).tell for rank in range(1, size)]
            self._tell(told)
            return Ranks(_path(rendezvous), 0, size)
        finally:
            os.close(rendezvous)


def _spawn(rank: int, size: int, rendezvous: int) -> _Pipe:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-m", "octavo.scheduler.ranks", *map(str, (theirs.fileno(), rendezvous, rank, size))],
            pass_fds=[theirs.fileno(), rendezvous],
            stdin=subprocess.DEVNULL,
        )
    threading.Thread(target=_watch, args=(rank, process), daemon=True).start()
    pipe = _Pipe(ours)
    pipe.tell(_WELCOME)
    return pipe


def _watch(rank: int, process: subprocess.Popen[bytes]) -> None:
    """End this process when a rank ends otherwise than because this process does.

    The ranks may be within a collective, which nothing interrupts; the server starts another engine.
    """
    if code := process.wait():
        _log.error("rank %d of the model ended with %d: the engine cannot go on", rank, code)
        os._exit(INTERNAL_ERROR)


class LeadingRunner:
    """Rank 0's runner, which the others follow."""

    def __init__(self, runner: Runner, tell: Callable[[bytes], None]) -> None:
        self._runner = runner
        self._tell = tell

    def submit(self, step: Step) -> Pending:
        """Queue a step on all ranks."""
        self._tell(msgspec.msgpack.encode(step))
        return self._runner.submit(step)

    def reset(self) -> None:
        """End the engine: where a step has failed on one rank, others may wait for it in the middle of theirs."""
        raise RankError("a step of a divided model has failed")


def follow(hear: Hear, runner: Runner) -> None:
    """Run what rank 0 runs until it is gone, with one step queued behind the one that is waited for, as it has."""
    decoder, queued = msgspec.msgpack.Decoder(Step), None
    while message := hear():
        previous, queued = queued, runner.submit(decoder.decode(message))
        if previous is not None:
            previous.wait()


def _path(file: int) -> str:
    return f"/proc/self/fd/{file}"


def _spawned(connection: int, rendezvous: int, rank: int, size: int) -> tuple[Hear, Ranks, int]:
    """Meet the engine that has spawned this rank; the last is the number of its GPU."""
    prepare_process()
    pipe = _Pipe(socket.socket(fileno=connection))
    if pipe.hear() != _WELCOME:
        raise RankError("the engine has ended before this rank began")
    return pipe.hear, Ranks(_path(rendezvous), rank, size), rank


def _launched() -> tuple[Hear, Ranks, int]:
    """Meet the ranks that a launcher has started.

    Signals are rank 0's business from then on: a rank that ended by itself would end requests that are being drained.
    """
    launch = find_launch(size := int(os.environ["WORLD_SIZE"])) or Launch(0, 0, 1)
    ranks = Ranks("", launch.rank, size)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    return ranks.hear, ranks, launch.local_rank


def main(arguments: Sequence[str]) -> None:
    """Be one rank until rank 0 is gone."""
    handler = logging.StreamHandler()
    logging.basicConfig(handlers=[handler])
    hear, ranks, gpu = _spawned(*map(int, arguments)) if arguments else _launched()
    if not (message := hear()):
        return
    config = msgspec.msgpack.decode(message, type=EngineConfig)
    handler.setFormatter(formatter(config.log_format, f"rank {ranks.rank}"))
    logging.getLogger("octavo").setLevel(config.log_level.upper())
    if config.device == "cuda":
        use_gpu(gpu)
    _, runner, _ = load(config, join=lambda _: ranks)
    follow(hear, runner)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Exception as error:
        _log.error("this rank of the model cannot go on: %s", error, exc_info=not isinstance(error, RankError))
        leave(INTERNAL_ERROR)
        raise
    leave(0)
