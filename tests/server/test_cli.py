import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.octavo_command import octavo, only_error

from octavo.server import __version__
from octavo.server.cli import main
from octavo.server.logs import is_worth_a_line
from octavo.server.settings import SETTINGS


def test_help_lists_every_flag_variable_and_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["serve", "--help"])
    assert raised.value.code == 0
    text = capsys.readouterr().out
    for setting in SETTINGS:
        assert setting.flag in text
        assert f"[{setting.variable}]" in re.sub(r"\s+", " ", text)
    for code in (0, 64, 65, 69, 70, 73):
        assert re.search(rf"^ +{code}  \w", text, re.MULTILINE)


def test_version_and_help_are_quick_because_they_load_no_server() -> None:
    program = (
        "import sys; from octavo.server.cli import make_parser; make_parser();"
        "raise SystemExit(bool({'torch', 'fastapi', 'uvicorn'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
    result = octavo("--version")
    assert (result.returncode, result.stdout) == (0, f"octavo {__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["serve", "--port", "x"], "--port: 'x'"),
        (["serve", "--prot", "1"], "unrecognized arguments: --prot; the nearest is --port (see octavo serve --help)"),
        (["serve", "--prot=1"], "unrecognized arguments: --prot=1; the nearest is --port (see octavo serve --help)"),
        (["check", "--zzzz"], "unrecognized arguments: --zzzz (see octavo check --help)"),
        (["serve", "--max-model", "1"], "--max-model"),
        (["serve", "a", "b"], "unrecognized arguments: b"),
        (["server"], "server"),
        ([], "COMMAND"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_code_64(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(arguments)
    except SystemExit as end:
        code = end.code
    assert code == 64
    error = capsys.readouterr().err
    assert named in error
    assert len(error.splitlines()) == 1


def test_an_unknown_variable_is_exit_code_64() -> None:
    result = octavo("serve", OCTAVO_PROT="1")
    assert result.returncode == 64
    assert only_error(result) == "octavo: error: OCTAVO_PROT: there is no such setting; the nearest is OCTAVO_PORT"


@pytest.mark.parametrize("model", ["/no/such/model", str(Path(__file__).parent)])
def test_a_model_that_cannot_be_loaded_is_refused_without_starting_an_engine(model: str) -> None:
    code = f"import sys\nfrom octavo.server.cli import main\ncode = main(['serve', {model!r}])\n"
    check = "sys.exit(code if 'torch' not in sys.modules and 'fastapi' not in sys.modules else 1)"
    result = subprocess.run([sys.executable, "-c", code + check], capture_output=True, text=True, check=False)
    assert result.returncode == 65, result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert model in result.stderr


def test_a_port_in_use_is_exit_code_73_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = octavo("serve", "--port", str(port))
    assert result.returncode == 73
    assert only_error(result).startswith(
        f"octavo: error: cannot listen on 127.0.0.1 port {port}: Address already in use"
    )


def test_a_host_that_does_not_exist_is_exit_code_73() -> None:
    result = octavo("serve", "--host", "300.0.0.1")
    assert result.returncode == 73
    assert "300.0.0.1" in only_error(result)


def test_what_the_engine_refuses_is_one_line_with_its_exit_code() -> None:
    result = octavo("serve", "--port", "0", "--device", "cuda")
    assert result.returncode == 69
    assert only_error(result).startswith("octavo: error: --device cuda")


def test_only_the_access_logs_own_records_are_filtered() -> None:
    import logging

    def record(*arguments: object) -> logging.LogRecord:
        return logging.LogRecord("uvicorn.access", logging.INFO, "", 0, "", arguments, None)

    assert not is_worth_a_line(record("1.2.3.4:5", "GET", "/health/live?x=1", "1.1", 200))
    assert is_worth_a_line(record("1.2.3.4:5", "GET", "/healthy", "1.1", 200))
    assert not is_worth_a_line(record("1.2.3.4:5", "POST", "/v1/completions", "1.1", 429))
    assert is_worth_a_line(record("1.2.3.4:5", "POST", "/v1/completions", "1.1", 503))
    assert is_worth_a_line(record())


def test_a_reader_that_has_read_enough_ends_a_command_without_a_word() -> None:
    end, begin = os.pipe()
    os.close(end)
    command = [sys.executable, "-m", "octavo.server.cli", "plan", "llama-3-8b"]
    with os.fdopen(begin, "wb") as pipe:
        result = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, check=False)
    assert (result.returncode, result.stderr) == (128 + signal.SIGPIPE, b"")
