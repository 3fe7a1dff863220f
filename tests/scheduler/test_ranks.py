"""Tensor parallelism on a CPU, with real processes and real collectives."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import rank_logits
from support.checkpoints import tiny_model, write_gguf
from support.live import engine_pid
from support.rank_logits import TOKENS, engine_config
from support.runners import logits_of
from torch import Tensor

from octavo.model.device import DeviceError
from octavo.model.memory import rank_shape
from octavo.model.parallel import share_destinations
from octavo.model.step import SamplingParams
from octavo.model.weights import checkpoint as checkpoint_module
from octavo.model.weights.checkpoint import load_weights, open_checkpoint
from octavo.model.weights.destination import Destination
from octavo.model.weights.headers import tensor_shapes
from octavo.scheduler.loading import load
from octavo.scheduler.messages import EngineConfig, Ready, Submission
from octavo.scheduler.sizing import ConfigurationError
from octavo.server.cli import main
from octavo.server.client import EngineClient

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
SIZES = (2, 2, 4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Biases everywhere, and a vocabulary that neither 4 divides nor its share is whole on the last rank."""
    path = tmp_path_factory.mktemp("divided")
    tiny_model(path, "llama", heads=8, kv_heads=4, vocabulary=130, attention_bias=True, mlp_bias=True, eos_token_id=5)
    return str(path)


@pytest.fixture(scope="module")
def ranks(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the ranks of each of SIZES have left behind."""
    directory = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, rank_logits.__file__, model, str(directory), *map(str, SIZES)]
    subprocess.run(command, env=environment, check=True, timeout=300)
    return directory


def test_the_logits_of_a_divided_model_are_the_whole_ones_on_every_rank_and_in_every_run(
    model: str, ranks: Path
) -> None:
    _, runner, _ = load(engine_config(model, 1))
    whole = logits_of(runner, TOKENS).numpy()
    assert np.abs(whole).max() > 0.1
    for size, runs in ((2, (0, 1)), (4, (2,))):
        found = [np.load(ranks / f"{run}-{rank}.npy") for run in runs for rank in range(size)]
        np.testing.assert_allclose(found[0], whole, rtol=0, atol=1e-5)
        for logits in found[1:]:
            np.testing.assert_array_equal(logits, found[0])  # to the bit


@pytest.mark.parametrize(("size", "run"), [(2, 0), (4, 2)])
def test_every_rank_holds_what_the_plan_says(
    size: int, run: int, model: str, ranks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["--max-num-seqs", "4", "--max-num-batched-tokens", "32", "--kv-blocks", "32", "--dtype", "float32"]
    assert main(["plan", model, "--devices", str(size), "--json", *settings]) == 0
    plan = json.loads(capsys.readouterr().out)
    expected = " ".join(str(plan[bucket]) for bucket in ("weights", "cache", "activations"))
    assert {(ranks / f"{run}-{rank}.txt").read_text() for rank in range(size)} == {expected}


def tokens_of_the_whole_model(model: str) -> tuple[list[int | None], Ready]:
    scheduler, runner, ready = load(engine_config(model, 1))
    scheduler.add(Submission(request=1, prompt=tuple(TOKENS), params=GREEDY, max_tokens=40))
    tokens = []
    while (step := scheduler.schedule()) is not None:
        tokens += [event.token for event in scheduler.commit(step, runner.submit(step).wait())]
    return tokens, ready


def ranks_of(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def sockets_that_listen() -> set[str]:
    rows = [line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()]
    return {f"socket:[{row[9]}]" for row in rows if row[3] == "0A"}


def test_a_divided_engine_serves_the_same_tokens_and_goes_on_when_a_rank_is_killed(model: str) -> None:
    expected, whole = tokens_of_the_whole_model(model)
    processes: set[int] = set()

    async def tokens(client: EngineClient, *, kill: bool) -> list[int | None]:
        asked = Submission(prompt=tuple(TOKENS), params=GREEDY, max_tokens=40)
        generation, found = client.submit(asked), []
        async for events in generation:
            found += [event.token for event in events]
            if kill and len(found) > 2:
                os.kill(ranks_of(engine_pid(client))[0], signal.SIGKILL)
                kill = False
        return found

    async def serve() -> None:
        client = await EngineClient.start(engine_config(model, 2))
        try:
            assert (client.ready.parameters, client.ready.tensor_parallel_size) == (whole.parameters, 2)
            assert client.ready.weights_digest != whole.weights_digest
            assert client.ready.memory[0].allocated < 0.6 * whole.memory[0].allocated
            for kill in (False, True):
                processes.update([engine_pid(client), *ranks_of(engine_pid(client))])
                assert len(processes) == 2
                assert await tokens(client, kill=kill) == expected
            processes.update([engine_pid(client), *ranks_of(engine_pid(client))])
            assert len(processes) == 4
            files = [file for process in processes for file in Path("/proc").glob(f"{process}/fd/*")]
            assert not sockets_that_listen() & {str(file.readlink()) for file in files}
        finally:
            await client.close()

    asyncio.run(asyncio.wait_for(serve(), 200))
    assert not [process for process in processes if Path(f"/proc/{process}/exe").exists()]


def test_a_rank_reads_its_own_rows_only_and_of_no_matrix_more_than_a_slice(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_module, "SLICE_BYTES", 4 * 64 * 8)
    whole = tensor_shapes(open_checkpoint(Path(model)).config)
    for size in (2, 4):
        found: dict[str, list[Tensor]] = {name: [] for name in whole}
        for rank in range(size):
            checkpoint = open_checkpoint(Path(model))
            shares = tensor_shapes(rank_shape(checkpoint.config, size))
            held = {name: torch.full(shape, torch.nan) for name, shape in shares.items()}
            asked: list[tuple[str, int, int]] = []
            read = checkpoint.read

            def recorded(
                name: str, first_row: int, rows: int, read: Any = read, asked: Any = asked, **options: Any
            ) -> Tensor:
                asked.append((name, first_row, rows))
                return read(name, first_row, rows, **options)

            monkeypatch.setattr(checkpoint, "read", recorded)
            own = {name: Destination(tuple(held[name].shape), partial(store, held[name])) for name in held}
            load_weights(checkpoint, share_destinations(own, whole, rank), lambda _done, _total: None)
            for name, first_row, rows in asked:
                if shares[name][0] != whole[name][0]:
                    assert rank * shares[name][0] <= first_row <= first_row + rows <= (rank + 1) * shares[name][0]
                assert len(whole[name]) == 1 or rows * whole[name][1] <= 64 * 8 < torch.Size(whole[name]).numel()
            for name, share in held.items():
                assert not share.isnan().any()
                found[name].append(share)
        for name, shape in whole.items():
            assert torch.equal(put_together(name, found[name], shape), open_checkpoint(Path(model)).read(name))


def store(held: Tensor, first_row: int, rows: Tensor) -> None:
    held[first_row : first_row + len(rows)] = rows


def put_together(name: str, shares: list[Tensor], shape: tuple[int, ...]) -> Tensor:
    if shares[0].shape[0] != shape[0]:
        return torch.cat(shares)[: shape[0]]
    if shares[0].shape != shape:
        return torch.cat(shares, dim=1)
    if name.endswith("bias"):
        assert not any(share.any() for share in shares[1:])
    return shares[0]


def test_what_cannot_be_divided_is_refused_in_one_line(model: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--tensor-parallel-size 3: 8 attention heads cannot be divided"):
        load(engine_config(model, 3))
    with pytest.raises(ConfigurationError, match=r"--tensor-parallel-size 8: 4 KV heads cannot be divided"):
        load(engine_config(model, 8))
    write_gguf(tmp_path / "model.gguf", tiny_model(tmp_path, "llama"), "Q4_0")
    quantised = EngineConfig(model=str(tmp_path / "model.gguf"), device="cpu", tensor_parallel_size=2)
    with pytest.raises(ConfigurationError, match="quantised blocks: give --dtype bfloat16"):
        load(quantised)


def test_more_ranks_than_gpus_are_refused_in_one_line(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.scheduler.loading.choose_device", lambda *_: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(DeviceError, match="--tensor-parallel-size 4 needs as many GPUs, and this process can use 2"):
        load(engine_config(model, 4))
