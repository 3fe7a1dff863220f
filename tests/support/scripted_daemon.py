"""`octavo serve` around the scripted engine: `python scripted_daemon.py [options]`, the engine's own included."""

import argparse
import logging
import os
import sys

from octavo.server import event_loop, lifecycle, listening, logs
from octavo.server.flags import add_arguments, resolve
from octavo.server.revival import RestartPolicy

SCRIPTED_ENGINE = os.path.join(os.path.dirname(__file__), "scripted_engine.py")  # noqa: PTH118, PTH120

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-seconds", default="0")
    parser.add_argument("--load-until", default="")
    add_arguments(parser)
    parsed = parser.parse_args()
    settings = resolve(vars(parsed), {})
    logs.configure(settings.server.log_level, settings.server.log_format)
    logging.captureWarnings(True)
    command = [
        sys.executable,
        SCRIPTED_ENGINE,
        "--step-seconds",
        parsed.step_seconds,
        "--load-until",
        parsed.load_until,
    ]
    with listening.bind(settings.server.host, settings.server.port) as listener:
        sys.exit(event_loop.run(lifecycle.Daemon(settings, listener, command, RestartPolicy(delays=(0.1,))).run()))
