"""Runners as they are built for a GPU, on CPU tensors: FlashInfer emulated, captured steps run again."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any
from unittest import mock

import torch
from support.attention import rounded_to_fp8
from support.flashinfer_emulation import Emulation, emulated_flashinfer
from support.list_channel import ListChannel
from support.reference_attention import ReferenceAttention
from torch import Tensor

from octavo.kvcache.ledger import MemoryLedger
from octavo.kvcache.pool import BlockPool
from octavo.kvcache.prefix import PrefixHasher
from octavo.kvcache.store import KVStore
from octavo.model import placement
from octavo.model.config import ModelConfig
from octavo.model.device import CPU
from octavo.model.graphs import Replay
from octavo.model.kernels.cuda import CudaKernels
from octavo.model.memory import Formats, RunnerLimits, plan_memory
from octavo.model.parallel import Ranks
from octavo.model.placement import Placement, place_on_gpu
from octavo.model.runner import ModelRunner, build_runner
from octavo.model.step import Runner, SamplingParams, TokenLogprobs
from octavo.model.weights.checkpoint import Checkpoint
from octavo.model.workspaces import Workspaces
from octavo.scheduler import loading
from octavo.scheduler.engine import Engine
from octavo.scheduler.messages import StepReport, Submission, ToEngine
from octavo.scheduler.policy import Limits, Scheduler

SMALL_WORKSPACES = Workspaces(float_bytes=1 << 20)
FP8_CACHE = Workspaces(fp8_cache=True, float_bytes=1 << 20)
INPUTS = ("tokens", "positions")
"""Areas of the arena that the host fills before a step."""

LIMITS = RunnerLimits(max_model_len=128, max_rows=5, max_tokens=24, block_size=16, blocks=8)
"""So few blocks that the requests of `scenario` are put back, and so few tokens a step that prompts are cut."""
GREEDY = SamplingParams(temperature=0.0)
DRAWN = SamplingParams(temperature=0.8, top_p=0.9, seed=5, logprobs=2)
RANKED = SamplingParams(temperature=1.0, top_k=20, seed=6)
LENGTHS = {0: 9, 1: 8, 2: 6, 3: 5, 4: 9, 5: 10}
"""Tokens that each request of `scenario` asks for."""


def scenario(vocabulary: int) -> list[Sequence[ToEngine]]:
    """Six requests in three batches, two of which begin like the first."""

    def prompt(seed: int, length: int) -> tuple[int, ...]:
        random = Random(seed)
        return tuple(random.randrange(100, vocabulary) for _ in range(length))

    shared = prompt(0, 45)
    contents = [
        (shared, GREEDY),
        (prompt(1, 29), DRAWN),
        (prompt(2, 14), GREEDY),
        (shared[:32] + prompt(3, 5), RANKED),
        (shared[:32] + prompt(4, 1), GREEDY),
        (prompt(5, 1), GREEDY),
    ]
    made = [
        Submission(request=number, prompt=tokens, params=params, max_tokens=LENGTHS[number])
        for number, (tokens, params) in enumerate(contents)
    ]
    return [made[:2], [], [], made[2:5], [], made[5:]]


class FakeCapture:
    """Runs a captured step again at every replay, on an arena full of NaN, and only at the addresses of its capture.

    What a replay finds must have been put there for it: nothing may be left from the step before.
    """

    def __init__(self, emulation: Emulation) -> None:
        self.emulation = emulation
        self.runner: ModelRunner | None = None
        self.sizes: list[int] = []
        """Tokens of the captured steps, in order."""
        self.replayed: list[int] = []

    def __call__(self, function: Callable[[], None]) -> Replay:
        function()
        captured = self._addresses(function)
        size = self.emulation.calls.runs[-1][1]
        self.sizes.append(size)

        def replay() -> None:
            self._poison()
            assert self._addresses(function) == captured, "a replayed step works on other tensors than the captured one"
            self.replayed.append(size)

        return replay

    def _addresses(self, function: Callable[[], None]) -> list[tuple[int, ...]]:
        first = len(self.emulation.calls.addresses)
        function()
        return self.emulation.calls.addresses[first:]

    def _poison(self) -> None:
        assert self.runner is not None
        for name, area in self.runner.arena._areas.items():
            if name not in INPUTS:
                area.view(torch.uint8).fill_(255)  # NaN in every type of float


class Fp8Reference(ReferenceAttention):
    """The reference on what a cache of 8-bit floats keeps of K and V, in a store of its own."""

    def __init__(self, config: ModelConfig, store: KVStore) -> None:
        super().__init__(config, KVStore(store.layout, store.blocks, torch.bfloat16, CPU))
        self.scales = store.scales

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        scales = [self.scales[layer].get(name, 1.0) for name in ("k_scale", "v_scale")]
        kept = [(rounded_to_fp8(x / scale) * scale).bfloat16() for x, scale in zip((k, v), scales, strict=True)]
        super().forward(layer, q, *kept, out)


@contextlib.contextmanager
def emulated_gpu(capture: Callable[[Emulation], Callable[..., Any]]) -> Iterator[Emulation]:
    """Let an engine be loaded for a Hopper GPU of 4 GiB, 3 of them free, whose tensors lie on the CPU."""
    with emulated_flashinfer() as emulation, contextlib.ExitStack() as stack:
        for owner, name, replacement in (
            (torch.cuda, "get_device_capability", lambda _device=None: (9, 0)),
            (torch.cuda, "get_device_name", lambda _device=None: "NVIDIA H200"),
            (torch.cuda, "mem_get_info", lambda _device=None: (3 << 30, 4 << 30)),
            (placement, "CudaCapture", lambda _device: capture(emulation)),
            (loading, "choose_device", lambda name, _problem: CPU if name == "cpu" else torch.device("cuda", 0)),
            (loading, "place_on_gpu", lambda _device, *rest, fp8: place_on_gpu(CPU, *rest, fp8=fp8)),
        ):
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield emulation


def gpu_formats(workspaces: Workspaces = SMALL_WORKSPACES, *, fp8: bool = False, ranks: int = 1) -> Formats:
    matrices, cache = 1 if fp8 else 2, 1 if workspaces.fp8_cache else 2
    return Formats(2, matrices, cache, ranks=ranks, gate_in_place=False, workspaces=workspaces)


def build_on_gpu(
    checkpoint: Checkpoint,
    limits: RunnerLimits,
    *,
    capture: FakeCapture | None = None,
    workspaces: Workspaces = SMALL_WORKSPACES,
    reference: bool = False,
    fp8: bool = False,
    ranks: Ranks | None = None,
) -> tuple[ModelRunner, MemoryLedger]:
    """A runner with FlashInfer's attention, or the reference's beside the same kernels, and its ledger."""
    formats = gpu_formats(workspaces, fp8=fp8, ranks=ranks.size if ranks else 1)
    ledger = MemoryLedger(plan_memory(checkpoint.config, formats, limits, budget=1 << 40))
    kernels, size = CudaKernels(torch.bfloat16, CPU, fp8=fp8), ranks.size if ranks else 1
    placed = Placement(CPU, torch.bfloat16, kernels, workspaces, size)
    build = (checkpoint, placed, limits, ledger, lambda done, total: None, ranks, capture)
    if not reference:
        runner = build_runner(*build)
    else:
        attention = Fp8Reference if workspaces.fp8_cache else ReferenceAttention
        with mock.patch("octavo.model.runner.load_attention", lambda c, store, *_: attention(c, store)):
            runner = build_runner(*build)
    if capture is not None:
        capture.runner = runner
    return runner, ledger


@dataclass
class Served:
    """What an engine reported."""

    reports: Sequence[StepReport]

    @property
    def tokens(self) -> dict[int, list[int]]:
        """By request."""
        found: dict[int, list[int]] = {}
        for report in self.reports:
            for event in report.events:
                if event.token is not None:
                    found.setdefault(event.request, []).append(event.token)
        return found

    @property
    def logprobs(self) -> list[TokenLogprobs | None]:
        """Of every token, in the order in which they came."""
        events = [event for report in self.reports for event in report.events]
        return [event.logprobs for event in events if event.token is not None]

    @property
    def errors(self) -> list[str]:
        return [event.error for report in self.reports for event in report.events if event.error is not None]


def serve(runner: Runner, limits: RunnerLimits, *batches: Sequence[ToEngine], lookahead: int = 1) -> Served:
    """Run a whole engine over batches of messages, one a turn."""
    scheduler = Scheduler(
        BlockPool(limits.blocks),
        PrefixHasher(limits.block_size),
        Limits(limits.max_rows, limits.max_tokens, limits.max_model_len, limits.block_size),
        eos_ids=[],
    )
    channel = ListChannel(*batches)
    Engine(scheduler, runner, channel, lookahead).run()
    assert scheduler.pool.referenced == 0
    return Served(channel.reports)
