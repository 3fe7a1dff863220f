import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from support.daemon import running
from support.scripted_engine import CRASH, KILL

from octavo.server import __version__
from octavo.server.cli import main
from octavo.server.logs import is_worth_a_line
from octavo.server.settings import SETTINGS


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
        (["serve", "--prot", "1"], "--prot"),
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


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (["/no/such/model"], 65, "/no/such/model"),
        (["--device", "cuda"], 69, "--device cuda"),
    ],
)
def test_what_the_engine_refuses_is_one_line_with_its_exit_code(arguments: list[str], code: int, named: str) -> None:
    result = octavo("serve", "--port", "0", *arguments)
    assert result.returncode == code
    assert only_error(result).startswith("octavo: error: ")
    assert named in only_error(result)


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_lets_running_requests_finish_and_refuses_new_ones(number: signal.Signals) -> None:
    with running(step_seconds=0.01) as daemon:
        engine = daemon.engine()
        request = daemon.in_background([5, 6], 150)
        daemon.process.send_signal(number)
        while (health := httpx.get(f"{daemon.url}/health")).status_code == 200:
            assert request.is_alive()
        assert (health.status_code, health.json()["status"]) == (503, "draining")
        refused = daemon.request([7], 1)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert int(refused.headers["Retry-After"]) >= 1
        assert request.is_alive()
        response = request.result()
        assert daemon.wait() == 0
        assert response.json()["usage"]["completion_tokens"] == 150
        assert gone(engine)
        assert not any("Traceback" in line for line in daemon.log)


def test_an_engine_does_not_outlive_a_server_that_is_killed() -> None:
    with running(step_seconds=0.01) as daemon:
        engine = daemon.engine()
        daemon.in_background([5], 1900)
        daemon.process.kill()
        deadline = time.monotonic() + 20
        while not gone(engine):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_idle_connections_do_not_delay_the_end() -> None:
    with running() as daemon, httpx.Client() as client:
        assert client.get(f"{daemon.url}/health").status_code == 200
        daemon.process.terminate()
        assert daemon.wait() == 0


def test_requests_that_outlast_the_timeout_end_with_an_error() -> None:
    with running("--shutdown-timeout", "0.3", step_seconds=0.01) as daemon:
        engine = daemon.engine()
        whole = daemon.in_background([5], 1900)
        stream = daemon.in_background([6], 1900, stream=True)
        daemon.process.terminate()
        assert daemon.wait() == 0
        assert whole.result().status_code == 503
        events = [line for line in stream.result().text.splitlines() if line.startswith("data: {")]
        assert "error" in json.loads(events[-1].removeprefix("data: "))
        assert gone(engine)


def test_a_second_signal_ends_everything_at_once() -> None:
    with running("--shutdown-timeout", "600", step_seconds=0.01) as daemon:
        engine = daemon.engine()
        request = daemon.in_background([5], 1900)
        daemon.process.terminate()
        while not any("shutting down" in line for line in daemon.log):
            time.sleep(0.01)
        daemon.process.terminate()
        assert daemon.wait() == 0
        assert gone(engine)
        assert request.result() is None or request.result().status_code == 503


@pytest.mark.parametrize("prompt", [[CRASH], [KILL]])
def test_an_engine_that_dies_fails_live_requests_and_ends_the_server_with_70(prompt: list[int]) -> None:
    with running(step_seconds=0.01) as daemon:
        other = daemon.in_background([5], 1900)
        assert daemon.request(prompt, 1).status_code in {500, 503}
        assert other.result().status_code in {500, 503}
        assert daemon.wait() == 70
    assert any("the server ends" in line for line in daemon.log)


def test_a_signal_while_the_model_loads_ends_at_once(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    loading = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    program = f"""
import sys, uvloop
from octavo.server import lifecycle
from octavo.server.settings import resolve
command = [sys.executable, "-c", {loading!r}]
with lifecycle.bind("127.0.0.1", 0) as listener:
    sys.exit(uvloop.run(lifecycle.Daemon(resolve({{}}, {{}}), listener, command).run()))
"""
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        while not pid.exists() or not pid.read_text():
            time.sleep(0.01)
        process.terminate()
        assert process.wait(30) == 0
    assert gone(int(pid.read_text()))


def test_the_log_tells_what_was_loaded_and_who_asks_but_not_of_probes_and_scrapes() -> None:
    with running() as daemon:
        httpx.get(f"{daemon.url}/health")
        httpx.get(f"{daemon.url}/metrics")
        httpx.get(f"{daemon.url}/v1/models")
        daemon.process.terminate()
        daemon.wait()
    text = "".join(daemon.log)
    for expected in (
        "Scripted, 0 parameters",
        "cpu, bfloat16, kernels scripted",
        "1,024 blocks of 16 = 16,384 tokens",
        "8 of full length (2,048 tokens)",
        "batch-invariant  yes: nothing is computed",
        "serving on http://127.0.0.1:",
    ):
        assert expected in text
    [access] = [line for line in daemon.log if "GET" in line]
    assert "/v1/models" in access


def test_only_the_access_logs_own_records_are_filtered() -> None:
    import logging

    def record(*arguments: object) -> logging.LogRecord:
        return logging.LogRecord("uvicorn.access", logging.INFO, "", 0, "", arguments, None)

    assert not is_worth_a_line(record("1.2.3.4:5", "GET", "/health?x=1", "1.1", 200))
    assert is_worth_a_line(record("1.2.3.4:5", "GET", "/healthy", "1.1", 200))
    assert is_worth_a_line(record())
