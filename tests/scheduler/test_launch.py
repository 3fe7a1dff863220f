"""Ranks that a launcher has started by torchrun's variables: two groups of processes, as on two machines."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from support.launching import FLAGS, PROMPT, TOKENS, divided_model, tokens_of_one
from support.octavo_command import octavo, only_error
from support.tools import free_port

from octavo.scheduler.launch import Launch, find_launch
from octavo.scheduler.sizing import ConfigurationError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return divided_model(tmp_path_factory.mktemp("launched"))


@pytest.fixture(scope="module")
def expected(model: Path) -> list[int | None]:
    return tokens_of_one(model)


@contextmanager
def launched(model: Path, size: int) -> Iterator[tuple[str, list[subprocess.Popen[str]]]]:
    """`octavo serve` so often, half of them on each of two "machines": the URL of requests, and all processes."""
    command = [sys.executable, "-m", "octavo.server.cli", "serve", str(model), "--port", "0"]
    half = size // 2
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
    common |= {"LOCAL_WORLD_SIZE": str(half), "GLOO_SOCKET_IFNAME": "lo"}
    with ExitStack() as stack:
        processes = []
        for rank in range(size):
            environment = {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank % half)}
            process = subprocess.Popen(
                [*command, *FLAGS, "--tensor-parallel-size", str(size)],
                env=environment,
                stderr=subprocess.PIPE if rank == 0 else None,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            processes.append(process)
        log = processes[0].stderr
        assert log is not None
        url = next(found[1] for line in log if (found := re.search(r" serving on (\S+)", line)))
        yield f"{url}/v1/completions", processes


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_on_two_machines_serve_the_tokens_of_one_and_end_with_rank_0(
    size: int, model: Path, expected: list[int | None]
) -> None:
    body = {"model": model.name, "prompt": list(PROMPT), "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    with launched(model, size) as (url, processes):
        [choice] = httpx.post(url, json=body | {"return_token_ids": True}, timeout=60).json()["choices"]
        assert choice["token_ids"] == expected
        if size == 2:
            for process in reversed(processes):  # as Kubernetes does; rank 0 drains, the other waits for it
                process.send_signal(signal.SIGTERM)
            assert [process.wait(60) for process in processes] == [0, 0]
            return
        processes[2].kill()
        with pytest.raises(httpx.HTTPError):
            httpx.post(url, json=body, timeout=60).raise_for_status()
        assert [process.wait(60) for process in processes] == [70, 70, -signal.SIGKILL, 70]


def test_a_rank_is_what_the_variables_say() -> None:
    variables = {"WORLD_SIZE": "4", "RANK": "3", "MASTER_ADDR": "leader", "MASTER_PORT": "29500"}
    assert find_launch(4, variables) == Launch(rank=3, local_rank=0, local_size=1)
    assert find_launch(4, variables | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}) == Launch(3, 1, 2)
    assert find_launch(1, {}) is find_launch(2, {"WORLD_SIZE": "1"}) is None
    for changes, said in (
        ({"WORLD_SIZE": "8"}, "WORLD_SIZE is 8: give --tensor-parallel-size 8, not 4"),
        ({"RANK": "4"}, "RANK: '4': give a number from 0 to 3"),
        ({"LOCAL_RANK": "one"}, "LOCAL_RANK: 'one': give a number from 0 to 3"),
        ({"RANK": "", "MASTER_PORT": ""}, "RANK, MASTER_PORT missing: WORLD_SIZE says that a launcher has started"),
    ):
        with pytest.raises(ConfigurationError, match=re.escape(said)):
            find_launch(4, variables | changes)


def test_a_launcher_of_another_number_is_refused_before_anything_is_loaded(model: Path) -> None:
    result = octavo("serve", str(model), WORLD_SIZE="2", RANK="1", MASTER_ADDR="leader", MASTER_PORT="1")
    assert result.returncode == 64
    assert only_error(result) == "octavo: error: WORLD_SIZE is 2: give --tensor-parallel-size 2, not 1"
