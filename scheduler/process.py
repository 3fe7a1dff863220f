"""The engine's process: `python -m octavo.scheduler.process FD`, with FD an inherited socket to the server.

The first message is the configuration, the answer Ready or Fatal. Ends when told to, when the server is gone, or on the
first error: a request's error is a message, an engine's error is the end of the engine.
"""

import ctypes
import gc
import logging
import signal
import socket
import sys
from collections.abc import Callable

from octavo.model.step import Runner
from octavo.scheduler.channel import Channel, ProtocolError
from octavo.scheduler.engine import Engine
from octavo.scheduler.faults import FaultyChannel, FaultyRunner, parse_fault
from octavo.scheduler.log_format import formatter
from octavo.scheduler.messages import EngineConfig, Fatal, Loading, Ready, Shutdown
from octavo.scheduler.policy import Scheduler

INTERNAL_ERROR = 70

_PR_SET_PDEATHSIG = 1

_log_handler = logging.StreamHandler()
_log = logging.getLogger("octavo.scheduler.process")  # not __name__, which is "__main__" here

Load = Callable[[EngineConfig, Callable[[Loading], None]], tuple[Scheduler, Runner, Ready]]


def serve(channel: Channel, load: Load) -> int:
    """Run an engine until it is told to end; return the exit code, which a Fatal message has told the server too.

    `load` makes whatever the configuration names, and says how far it has come. An exception's `exit_code` attribute,
    where it has one, becomes the exit code: then its text is meant for the user, while any other exception is a fault
    and logged as one.
    """
    try:
        config = _receive_config(channel)
        if config is not None:
            logging.getLogger("octavo").setLevel(config.log_level.upper())
            _log_handler.setFormatter(formatter(config.log_format, "engine"))
            scheduler, runner, ready = load(config, channel.send)
            channel.send(ready)
            if faults := [parse_fault(text) for text in config.fault]:
                runner, channel = FaultyRunner(runner, faults), FaultyChannel(channel, faults)
            Engine(scheduler, runner, channel, lookahead=int(ready.device.startswith("cuda"))).run()
    except Exception as error:
        code = getattr(error, "exit_code", None)
        message = " ".join(str(error).split()) or type(error).__name__
        if code is None:
            _log.exception("the engine cannot go on")
            code, message = INTERNAL_ERROR, f"internal error: {type(error).__name__}: {message}"
        channel.send(Fatal(message=message, exit_code=code))
        return int(code)
    return 0


def _receive_config(channel: Channel) -> EngineConfig | None:
    """Wait for the first message. None: the server has changed its mind, or is gone."""
    first, *rest = channel.receive(block=True)
    if isinstance(first, Shutdown) or rest:
        return None
    if not isinstance(first, EngineConfig):
        raise ProtocolError(f"the first message is a {type(first).__name__}, not the configuration")
    return first


def prepare_process() -> None:
    """Tie this process to its parent: it dies when the parent does, and at SIGTERM, but not at the terminal's Ctrl-C.

    The kernel watches the parent's *thread* that spawned us: the server spawns from its main thread.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> int:
    """Run the engine that the server has spawned; return the exit code."""
    prepare_process()
    _log_handler.setFormatter(formatter("text", "engine"))
    logging.basicConfig(handlers=[_log_handler])
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    # Imported late: with it comes torch, which takes seconds. Until then the process should be tied to its parent, and
    # engines that need no torch use the rest of this module.
    gc.disable()  # an import leaves no garbage behind, and looking for it takes a tenth of the time
    from octavo.scheduler.ranks import Team  # noqa: PLC0415

    gc.freeze()  # nor does what was imported ever become any
    gc.enable()
    team = Team()
    code = serve(channel, team.load)
    team.leave(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
