"""The ranks of a divided model: the engine's process is rank 0, and spawns the others as its children.

`python -m octavo.scheduler.ranks SOCKET FILE RANK` is one of those: SOCKET an inherited socket to the engine, FILE an
inherited file in memory by which the ranks find each other. It is told the configuration and then every step, and runs
it as rank 0 does; it answers nothing. A rank that ends by itself ends the engine, whose end is that of all ranks.
"""

import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

import msgspec

from octavo.model.parallel import RankError, Ranks, leave
from octavo.model.step import Pending, Runner, Step
from octavo.scheduler.channel import FrameDecoder, FrameEncoder
from octavo.scheduler.loading import load
from octavo.scheduler.log_format import formatter
from octavo.scheduler.messages import EngineConfig, Loading, Ready
from octavo.scheduler.policy import Scheduler
from octavo.scheduler.process import INTERNAL_ERROR, prepare_process

_READ_BYTES = 256 << 10

_log = logging.getLogger("octavo.scheduler.ranks")  # not __name__, which is "__main__" in a rank


class RankStep(msgspec.Struct, frozen=True, tag=True):
    """Compute a step, as rank 0 does now."""

    step: Step


ToRank = EngineConfig | RankStep


class _Speaker:
    """Rank 0's end of the line to another."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._encoder = FrameEncoder()

    def send(self, message: ToRank) -> None:
        """Send one message. Raises RankError where nobody is there any more."""
        try:
            self._connection.sendall(self._encoder.encode(message))
        except OSError as error:
            raise RankError("a rank of the model is gone") from error


class _Listener:
    """A rank's end."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._decoder: FrameDecoder[ToRank] = FrameDecoder(ToRank)
        self._arrived: list[ToRank] = []

    def receive(self) -> ToRank | None:
        """Wait for the next message; None: rank 0 is gone."""
        while not self._arrived:
            data = self._connection.recv(_READ_BYTES)
            if not data:
                return None
            self._arrived += self._decoder.feed(data)
        return self._arrived.pop(0)


class Team:
    """Rank 0's view of the others. An end of one of them ends this process, which no step could outlive."""

    def __init__(self) -> None:
        self._speakers: list[_Speaker] = []

    def load(self, config: EngineConfig, report: Callable[[Loading], None]) -> tuple[Scheduler, Runner, Ready]:
        """Load a model on as many ranks as the configuration says, this process among them. Raises what `load` does."""
        if config.tensor_parallel_size == 1:
            return load(config, report)
        scheduler, runner, ready = load(config, report, self._join)
        return scheduler, LeadingRunner(runner, self.send), ready

    def _join(self, config: EngineConfig) -> Ranks:
        """Spawn the other ranks, hand them the configuration and meet them."""
        size = config.tensor_parallel_size
        rendezvous = os.memfd_create("octavo-ranks")
        try:
            for rank in range(1, size):
                self._spawn(rank, rendezvous)
            self.send(config)
            return _meet(config, rendezvous, 0)
        finally:
            os.close(rendezvous)

    def _spawn(self, rank: int, rendezvous: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-m", "octavo.scheduler.ranks", str(theirs.fileno()), str(rendezvous), str(rank)],
                pass_fds=[theirs.fileno(), rendezvous],
                stdin=subprocess.DEVNULL,
            )
        threading.Thread(target=_watch, args=(rank, process), daemon=True).start()
        self._speakers.append(_Speaker(ours))

    def send(self, message: ToRank) -> None:
        """Tell every rank."""
        for speaker in self._speakers:
            speaker.send(message)


def _watch(rank: int, process: subprocess.Popen[bytes]) -> None:
    """End this process when a rank ends otherwise than because this process does.

    The ranks may be within a collective, which nothing interrupts; the server starts another engine.
    """
    if code := process.wait():
        _log.error("rank %d of the model ended with %d: the engine cannot go on", rank, code)
        os._exit(INTERNAL_ERROR)


class LeadingRunner:
    """Rank 0's runner, which the others follow."""

    def __init__(self, runner: Runner, send: Callable[[RankStep], None]) -> None:
        self._runner = runner
        self._send = send

    def submit(self, step: Step) -> Pending:
        """Queue a step on all ranks."""
        self._send(RankStep(step))
        return self._runner.submit(step)

    def reset(self) -> None:
        """End the engine: where a step has failed on one rank, others may wait for it in the middle of theirs."""
        raise RankError("a step of a divided model has failed")


def follow(receive: Callable[[], ToRank | None], runner: Runner) -> None:
    """Run what rank 0 runs until it is gone, with one step queued behind the one that is waited for, as it has."""
    queued: Pending | None = None
    while isinstance(message := receive(), RankStep):
        previous, queued = queued, runner.submit(message.step)
        if previous is not None:
            previous.wait()


def _meet(config: EngineConfig, rendezvous: int, rank: int) -> Ranks:
    gpu = rank if config.device == "cuda" else None
    return Ranks(f"/proc/self/fd/{rendezvous}", rank, config.tensor_parallel_size, gpu)


def main(arguments: Sequence[str]) -> None:
    """Be one rank until the engine is gone."""
    prepare_process()
    handler = logging.StreamHandler()
    logging.basicConfig(handlers=[handler])
    connection, rendezvous, rank = map(int, arguments)
    listener = _Listener(socket.socket(fileno=connection))
    config = listener.receive()
    if not isinstance(config, EngineConfig):
        return
    handler.setFormatter(formatter(config.log_format, f"rank {rank}"))
    logging.getLogger("octavo").setLevel(config.log_level.upper())
    ranks = _meet(config, rendezvous, rank)
    _, runner, _ = load(config, join=lambda _: ranks)
    follow(listener.receive, runner)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Exception as error:
        _log.exception("this rank of the model cannot go on: %s", error)
        leave(INTERNAL_ERROR)
        raise
    leave(0)
