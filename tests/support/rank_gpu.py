"""Ranks of a divided model as they run on GPUs, without one: `python rank_gpu.py MODEL DIRECTORY SIZE`.

FlashInfer and captured steps are emulated, and gloo adds where NCCL would: in place and in bfloat16. In each of MODES
every rank writes the logits of TOKENS, float32 [tokens, vocabulary], to MODE-RANK.npy; in those that are SERVED a whole
engine serves the scenario, kernel by kernel and with captured steps, and rank 0 writes the tokens to MODE.json. At last
the engine is loaded from OPTIONS, those of the mode fp8: its tokens go to loaded.json, and what each rank has
allocated, in bytes by bucket, to memory-RANK.json.
"""

import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from support.flashinfer_emulation import Emulation
from support.gpu_runners import FP8_CACHE, LIMITS, FakeCapture, Served, build_on_gpu, emulated_gpu, scenario, serve
from support.rank_logits import fork_ranks
from support.runners import logits_of
from torch import Tensor, distributed

from octavo.kvcache.ledger import BUCKETS
from octavo.model.parallel import Ranks
from octavo.model.step import Runner
from octavo.model.weights.checkpoint import Checkpoint, open_checkpoint
from octavo.model.workspaces import Workspaces
from octavo.scheduler.loading import load
from octavo.scheduler.messages import EngineConfig
from octavo.scheduler.ranks import LeadingRunner, _Pipe, follow

MODES: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "xqa": {"workspaces": Workspaces(decode="xqa", float_bytes=1 << 20)},
    "cache": {"workspaces": FP8_CACHE},
    "fp8": {"workspaces": FP8_CACHE, "fp8": True},
}
SERVED = ("bfloat16", "xqa", "fp8")
OPTIONS = {
    "quantization": "fp8",
    "kv_cache_dtype": "fp8_e4m3",
    "max_num_seqs": LIMITS.max_rows,
    "max_num_batched_tokens": LIMITS.max_tokens,
    "max_model_len": LIMITS.max_model_len,
    "kv_blocks": LIMITS.blocks,
}
TOKENS = [100 + 37 * number % 1000 for number in range(24)]
NOT_THE_CPU = torch.device("cpu", 0)
"""A name of the CPU that is not equal to the usual one, so that sums are made as on a GPU."""


class RanksOfGpus(Ranks):
    """Ranks whose collectives are those of GPUs."""

    def reserve(self, rows: int, vocabulary: int, tokens: int, width: int, device: torch.device) -> int:
        return super().reserve(rows, vocabulary, tokens, width, NOT_THE_CPU)


class RankCapture(FakeCapture):
    """A captured step also adds up at the addresses of its capture, and finds no logits of the step before."""

    def _poison(self) -> None:
        super()._poison()
        assert self.runner is not None
        assert self.runner.model.ranks is not None
        self.runner.model.ranks.logits(LIMITS.max_rows).fill_(torch.nan)


def build(checkpoint: Checkpoint, ranks: Ranks | None = None, **options: Any) -> Any:
    runner, ledger = build_on_gpu(checkpoint, LIMITS, ranks=ranks, **options)
    for bucket in BUCKETS:
        assert ledger.allocated[bucket] == ledger.plan.planned(bucket) > 0
    return runner


def tokens_of(runner: Runner, checkpoint: Checkpoint) -> dict[int, list[int]]:
    served: Served = serve(runner, LIMITS, *scenario(checkpoint.config.vocabulary))
    assert served.errors == []
    return served.tokens


class Rank:
    """One of the processes."""

    def __init__(self, checkpoint: Checkpoint, directory: Path, ranks: Ranks, lines: list[_Pipe]) -> None:
        self._checkpoint, self._directory, self._ranks, self._lines = checkpoint, directory, ranks, lines

    def compute(self, emulation: Emulation) -> None:
        for mode, options in MODES.items():
            runner = build(self._checkpoint, self._ranks, **options)
            np.save(self._directory / f"{mode}-{self._ranks.rank}.npy", logits_of(runner, TOKENS).numpy())
            if mode not in SERVED:
                continue
            eager = self._serve(runner)
            capture = RankCapture(emulation)
            captured = self._serve(build(self._checkpoint, self._ranks, capture=capture, **options))
            assert len(set(capture.replayed)) > 2
            if self._ranks.rank == 0:
                (self._directory / f"{mode}.json").write_text(json.dumps([eager, captured]))
        self._load()

    def _load(self) -> None:
        model, size = str(self._checkpoint.path), self._ranks.size
        config = EngineConfig(model=model, device="cuda", tensor_parallel_size=size, **OPTIONS)
        with mock.patch.object(torch.cuda, "device_count", return_value=size):
            _, runner, ready = load(config, join=lambda _: self._ranks)
        memory = {line.bucket: line.allocated for line in ready.memory if line.bucket in BUCKETS}
        (self._directory / f"memory-{self._ranks.rank}.json").write_text(json.dumps(memory))
        tokens = self._serve(runner)
        if self._ranks.rank == 0:
            (self._directory / "loaded.json").write_text(json.dumps([tokens]))

    def _serve(self, runner: Runner) -> dict[int, list[int]]:
        if self._ranks.rank:
            follow(self._lines[0].hear, runner)
            return {}
        tokens = tokens_of(LeadingRunner(runner, self._tell), self._checkpoint)
        self._tell(b"")
        return tokens

    def _tell(self, message: bytes) -> None:
        for line in self._lines:
            line.tell(message)


def noting_addresses(emulation: Emulation) -> Callable[[Tensor], None]:
    """An all_reduce that notes where it has added."""
    original = distributed.all_reduce

    def all_reduce(tensor: Tensor) -> None:
        emulation.calls.addresses.append((tensor.data_ptr(),))
        original(tensor)

    return all_reduce


def run_again(function: Callable[[], None]) -> Callable[[], None]:
    """A captured step that nothing is asked of."""
    function()
    return function


def main(model: str, directory: str, size: int) -> None:
    torch.set_num_threads(1)
    lines = [[_Pipe(end) for end in socket.socketpair()] for _ in range(1, size)]
    with (
        emulated_gpu(lambda _: run_again) as emulation,
        mock.patch.object(distributed, "all_reduce", noting_addresses(emulation)),
    ):

        def compute(rank: int) -> None:
            ranks = RanksOfGpus(f"{directory}/meet", rank, size)
            ends = [line[0] for line in lines] if rank == 0 else [lines[rank - 1][1]]
            Rank(open_checkpoint(Path(model)), Path(directory), ranks, ends).compute(emulation)

        fork_ranks(size, compute)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
