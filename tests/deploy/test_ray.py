"""Ranks in the actors of a Ray cluster.

`pytest -m ray` starts one, by the Python that RAY_PYTHON names, of an environment with Octavo and its extra `ray`.
"""

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
import uuid
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest
from support.launching import FLAGS, PROMPT, TOKENS, divided_model, tokens_of_one

from octavo.scheduler.launch import Launch, find_launch

SCRIPT = Path(__file__).parents[2] / "deploy" / "ray" / "serve.py"
PYTHON = os.environ.get("RAY_PYTHON") or (sys.executable if find_spec("ray") else None)


def test_each_rank_gets_its_place_from_the_addresses_of_the_nodes() -> None:
    variables_of = runpy.run_path(str(SCRIPT))["variables_of"]
    nodes = [("10.0.0.1", 4001), ("10.0.0.1", 4002), ("10.0.0.2", 4003)]
    found = variables_of(nodes)
    assert {(own["MASTER_ADDR"], own["MASTER_PORT"]) for own in found} == {("10.0.0.1", "4001")}
    launches = [find_launch(3, own) for own in found]
    assert launches == [Launch(0, 0, 2), Launch(1, 0, 2), Launch(2, 0, 1)]


def marked(mark: str) -> list[str]:
    """Command lines of processes with the mark in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text())
        except OSError:  # ended meanwhile, or another user's
            continue
    return found


@pytest.mark.ray
@pytest.mark.skipif(PYTHON is None, reason="Ray is not installed; it is optional")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ray_serves_the_tokens_of_one_and_ends_after_a_drain_with_nothing_left(
    number: signal.Signals, tmp_path: Path
) -> None:
    model, mark = divided_model(tmp_path), uuid.uuid4().hex
    body = {"model": model.name, "prompt": list(PROMPT), "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    command = [str(PYTHON), str(SCRIPT), "2:cpu", str(model), "--port", "0", *FLAGS]
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "TEST_MARK": mark}
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,  # where Ray shows what the ranks log
        text=True,
        start_new_session=True,
    ) as launcher:
        try:
            url = next(found[1] for line in launcher.stdout if (found := re.search(r" serving on (\S+)", line)))
            fields = body | {"stream": True, "return_token_ids": True}
            tokens: list[int] = []
            with httpx.stream("POST", f"{url}/v1/completions", json=fields, timeout=60) as stream:
                for line in stream.iter_lines():
                    if line.startswith("data: {"):
                        if not tokens:
                            launcher.send_signal(number)
                        tokens += json.loads(line[6:])["choices"][0]["token_ids"]
            assert len(tokens) == 200
            assert tokens[:TOKENS] == tokens_of_one(model)
            assert launcher.wait(60) == 0
        finally:
            launcher.kill()
    deadline = time.monotonic() + 30
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []
