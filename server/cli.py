"""The command line: `octavo serve`, `check`, `plan`, `describe` and `bench`."""

import argparse
import contextlib
import difflib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from octavo.scheduler.launch import find_launch
from octavo.server import __version__, checking
from octavo.server import commands as answering
from octavo.server.bench import options as measuring
from octavo.server.flags import add_arguments, resolve
from octavo.server.spawning import ENGINE_COMMAND, INTERNAL_ERROR, spawn

USAGE_ERROR = 64

EXIT_CODES = """\
exit codes:
   0  ended by SIGINT or SIGTERM
  64  an option, a variable or their combination is wrong
  65  the model's files are missing or damaged
  69  the device cannot be used
  70  internal error: the engine has died
  73  cannot listen on this host and port
"""

VARIABLES = "Every option can also be given by the variable named in brackets; the option wins."

Run = Callable[[argparse.Namespace], tuple[int, Iterable[str]]]
"""Runs a command; returns the exit code and the lines to print."""

_log = logging.getLogger(__name__)


class Parser(argparse.ArgumentParser):
    """Ends with our own exit code for a wrong command line."""

    commands: Any
    """What `add_subparsers` returned."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse all arguments; where one is unknown, name the command, and the nearest of its options."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            command = self.commands.choices[parsed.command]
            hint = difflib.get_close_matches(unknown[0].split("=")[0], command.flags(), n=1)
            nearest = f"; the nearest is {hint[0]}" if hint else ""
            command.error(f"unrecognized arguments: {' '.join(unknown)}{nearest}")
        return parsed

    def flags(self) -> list[str]:
        """Every option of this parser itself."""
        return list(self._option_string_actions)

    def error(self, message: str) -> NoReturn:
        """Print one line and exit."""
        self.exit(USAGE_ERROR, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = Parser(
        prog="octavo",
        description="An OpenAI-compatible serving daemon for Llama-class transformers.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"octavo {__version__}")
    commands = parser.commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, run: Run, summary: str, add_options: Callable[[Parser], None], **texts: Any) -> None:
        layout = argparse.RawDescriptionHelpFormatter
        command = commands.add_parser(name, help=summary, formatter_class=layout, allow_abbrev=False, **texts)
        command.set_defaults(run=run)
        add_options(command)

    add(
        "serve",
        _serve,
        "load a model and serve it over HTTP",
        add_arguments,
        description="Load a model and serve it over HTTP, with the API of OpenAI.",
        usage="octavo serve [MODEL] [options]",
        epilog=f"{VARIABLES}\n\n{EXIT_CODES}",
    )
    add(
        "check",
        _check,
        "say whether serve could start with these options, without starting",
        add_arguments,
        description=checking.HELP,
        usage="octavo check [MODEL] [options of serve]",
        epilog=f"{VARIABLES}\n\n{checking.EXIT_CODES}",
    )
    add(
        "plan",
        answering.plan,
        "say what a model takes in memory, before anything is loaded",
        answering.add_plan_arguments,
        description=answering.PLAN_HELP,
        epilog=answering.PLAN_EXIT_CODES,
    )
    add(
        "describe",
        answering.describe_model,
        "draw a model's block as a table, with its parameters",
        answering.add_describe_arguments,
        description=answering.DESCRIBE_HELP,
        epilog=answering.DESCRIBE_EXIT_CODES,
    )
    add(
        "bench",
        _bench,
        "send load to a server and report throughput and latencies",
        measuring.add_arguments,
        description=measuring.HELP,
        epilog=measuring.EXIT_CODES,
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code. An error that is the user's to mend is one line on stderr."""
    parsed = make_parser().parse_args(arguments)
    try:
        exit_code, lines = parsed.run(parsed)
        for line in lines:
            print(line, flush=True)
        return int(exit_code)
    except KeyboardInterrupt:
        print("octavo: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # whoever reads has enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is written at exit
        return 128 + signal.SIGPIPE
    except Exception as error:
        code = getattr(error, "exit_code", None)
        if code is None:
            _log.exception("internal error")
            return INTERNAL_ERROR
        print(f"octavo: error: {error}", file=sys.stderr)
        return int(code)


def _bench(parsed: argparse.Namespace) -> tuple[int, Iterable[str]]:
    # Imported late: nothing else needs to wait for it.
    from octavo.server.bench import command  # noqa: PLC0415

    return command.bench(parsed)


def _check(parsed: argparse.Namespace) -> tuple[int, Iterable[str]]:
    return checking.check(resolve(vars(parsed), os.environ))


def _serve(parsed: argparse.Namespace) -> tuple[int, Iterable[str]]:
    settings = resolve(vars(parsed), os.environ)
    checking.check_model(settings.engine)
    if (launch := find_launch(settings.engine.tensor_parallel_size)) is not None and launch.rank > 0:
        # Only rank 0 answers HTTP; it tells the others everything that its own settings say.
        os.execv(sys.executable, [sys.executable, "-m", "octavo.scheduler.ranks"])  # noqa: S606
    with contextlib.closing(spawn(ENGINE_COMMAND)) as spawned:
        # Imported late: --help, --version and a wrong option need not wait for the whole server, nor does the engine.
        from octavo.server import event_loop, lifecycle, listening, logs  # noqa: PLC0415

        logs.configure(settings.server.log_level, settings.server.log_format)
        listening.check_certificate(settings.server)
        with listening.bind(settings.server.host, settings.server.port) as listener:
            given = " ".join(f"{flag} {value}" for flag, value in settings.changed.items())
            _log.info("octavo %s%s", __version__, f" with {given}" if given else "")
            return event_loop.run(lifecycle.Daemon(settings, listener, spawned=spawned).run()), ()


if __name__ == "__main__":
    sys.exit(main())
