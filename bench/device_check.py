"""What only a GPU can tell: numerics, memory and speed of the GPU path. Each section stands alone.

    python bench/device_check.py --output results          # one GPU with room for the model
    python bench/device_check.py --dry-run --output out    # every line of it on a CPU, tiny shapes, emulated kernels

Writes results.json and results.md after every section; one that fails is reported, and the next one runs. Predicted
for an H200, in seconds: ceilings 5, operators and attention 20, parity 60, build 10, decode 40, prefill 25, mixed 5,
engine 10, http 90. With the start of Python and of the libraries: about five minutes of the eight it may take, after
which no section begins.
"""

import argparse
import contextlib
import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from device_serving import http, parity, run_all

from octavo.kvcache.layout import KVLayout
from octavo.kvcache.ledger import BUCKETS, MemoryLedger
from octavo.kvcache.pool import BlockPool
from octavo.kvcache.store import KVStore
from octavo.model.arena import ActivationArena
from octavo.model.arena_layout import StepShape, arena_layout
from octavo.model.attention import AttentionBatch
from octavo.model.attention.flashinfer import FlashInferAttention
from octavo.model.config import ModelConfig
from octavo.model.graphs import Capture, CudaCapture
from octavo.model.kernels import FP8_KIND
from octavo.model.kernels.cuda import CudaKernels
from octavo.model.kernels.fp8 import FP8, Fp8Linear, round_rows
from octavo.model.layers import rope_table
from octavo.model.memory import Formats, RunnerLimits, plan_memory
from octavo.model.placement import Placement
from octavo.model.roofline import DEVICES, Device, decode_seconds, prefill_rate
from octavo.model.runner import ModelRunner, build_runner
from octavo.model.step import Admission, Pending, Row, SamplingParams, Step
from octavo.model.weights.lookup import find_config
from octavo.model.workspaces import Workspaces
from octavo.scheduler.messages import Submission
from octavo.scheduler.policy import Scheduler
from octavo.scheduler.request import Limits

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from support.reference_attention import ReferenceAttention

TOLERANCE = 2.0**-8
"""Of a result's norm: half a unit of bfloat16 for the output and as much for the weights of attention."""
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
SECTIONS = (
    *("environment", "ceilings", "operators", "attention", "parity"),
    *("build", "decode", "prefill", "mixed", "engine", "http"),
)


@dataclass(frozen=True)
class Sizes:
    """What is measured: everything, or as little as runs every line."""

    config: ModelConfig
    limits: RunnerLimits
    read_bytes: int
    gemm: int
    batches: tuple[tuple[int, int], ...]
    """Rows and context of the decode steps."""
    prompts: tuple[int, ...]
    repeats: int
    requests: int
    new_tokens: int
    small: ModelConfig
    """Computed on the CPU as well."""
    served: ModelConfig
    """Behind HTTP, with weights that a CPU makes up in seconds."""
    streams: tuple[int, ...]
    """How many at a time."""


class Check:
    """One run of the script: its device, its sizes and its results."""

    def __init__(self, device: torch.device, sizes: Sizes, output: Path) -> None:
        self.device, self.sizes, self.output = device, sizes, output
        self.results: dict[str, Any] = {}
        self.runner: ModelRunner
        self.ledger: MemoryLedger
        self.store: KVStore

    def section(self, name: str, run: Callable[[], dict[str, Any]]) -> None:
        started = time.perf_counter()
        try:
            found = run()
        except Exception:
            found = {"failed": traceback.format_exc()}
        found["seconds"] = round(time.perf_counter() - started, 2)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # what one section leaves behind is not the next one's
        self.results[name] = found
        self.output.mkdir(parents=True, exist_ok=True)
        (self.output / "results.json").write_text(json.dumps(self.results, indent=1))
        rows = [
            f"| {section} | {key} | {value} |"
            for section, found in self.results.items()
            for key, value in found.items()
        ]
        (self.output / "results.md").write_text(
            "\n".join(["| section | what | value |", "|---|---|---|", *rows]) + "\n"
        )
        print(name, "FAILED" if "failed" in found else "done", found["seconds"], "s", flush=True)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def timed(self, run: Callable[[], Any]) -> float:
        """Median seconds of a run, after one to warm up."""
        run()
        times = []
        for _ in range(self.sizes.repeats):
            self.wait()
            started = time.perf_counter()
            run()
            self.wait()
            times.append(time.perf_counter() - started)
        return statistics.median(times)

    # Sections

    def environment(self) -> dict[str, Any]:
        found = {"torch": torch.__version__, "python": sys.version.split()[0]}
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            found |= {"gpu": torch.cuda.get_device_name(self.device), "free": free, "total": total}
        return found

    def ceilings(self) -> dict[str, Any]:
        data = torch.ones(self.sizes.read_bytes // 4, device=self.device)
        read = self.sizes.read_bytes / self.timed(data.sum)
        size = self.sizes.gemm
        a, b = (torch.randn(size, size, device=self.device).bfloat16() for _ in range(2))
        out = torch.empty_like(a)
        return {"read bytes/s": read, "GEMM flop/s": 2 * size**3 / self.timed(lambda: torch.mm(a, b, out=out))}

    def operators(self) -> dict[str, Any]:
        config, kernels = self.sizes.config, CudaKernels(torch.bfloat16, self.device)
        x, branch = (torch.randn(17, config.width, device=self.device).bfloat16() for _ in range(2))
        weight, out = torch.randn(config.width, device=self.device).bfloat16(), torch.full_like(x, torch.nan)
        found = {}

        def normed(values: torch.Tensor) -> torch.Tensor:
            scale = torch.rsqrt(values.square().mean(-1, keepdim=True) + config.norm_epsilon)
            return values * scale * weight.float()

        kernels.rms_norm(x, weight, config.norm_epsilon, out)
        found["rms_norm"] = error(out, normed(x.float()))
        total, spine, added = x.float() + branch.float(), x.clone(), branch.clone()
        kernels.rms_norm(spine, weight, config.norm_epsilon, added, added)
        found["add_rms_norm, sum"], found["add_rms_norm"] = error(spine, total), error(added, normed(total))
        gate_up = torch.randn(17, 2 * config.ffn_width, device=self.device).bfloat16()
        gated = torch.full((17, config.ffn_width), torch.nan, device=self.device, dtype=torch.bfloat16)
        kernels.silu_mul(gate_up, gated)
        gate, up = gate_up.float().chunk(2, dim=1)
        found["silu_mul"] = error(gated, torch.nn.functional.silu(gate) * up)
        table = rope_table(config, config.max_context).to(self.device)
        positions = torch.tensor([0, 1, config.max_context - 1], dtype=torch.int32, device=self.device)
        q = torch.randn(3, config.heads, config.head_dim, device=self.device).bfloat16()
        cosines, sines = table[positions.long()].unsqueeze(1).chunk(2, dim=-1)
        low, high = q.float().chunk(2, dim=-1)
        expected = torch.cat((low * cosines - high * sines, high * cosines + low * sines), dim=-1)
        kernels.rotate(q, q[:, : config.kv_heads].clone(), positions, table)
        found["rotate"] = error(q, expected)
        return verdict(found | self.products())

    def products(self) -> dict[str, float]:
        """x W^T into bfloat16 and, as the LM head's, into float32; and of 8-bit floats, as they are rounded."""
        config, found = self.sizes.config, {}
        outputs, inputs = config.width, config.ffn_width
        x, weight = (torch.randn(rows, inputs, device=self.device).bfloat16() for rows in (17, outputs))
        for fp8 in (False, True):
            kernels = CudaKernels(torch.bfloat16, self.device, fp8=fp8)
            linear = kernels.linear(outputs, inputs, quantised=FP8_KIND if fp8 else "")
            linear.load(0, weight)
            wide, numbers = x.float(), weight.float()
            if kernels.fp8 is not None and isinstance(linear, Fp8Linear):
                layout = arena_layout(StepShape(config, 17, 1, 2, fp8=True))
                kernels.fp8.arena = ActivationArena(layout, torch.bfloat16, self.device)
                rounded, scales = torch.empty_like(x, dtype=FP8), torch.empty(17, 1, device=self.device)
                round_rows(x, rounded, scales)
                wide, numbers = rounded.float() * scales, linear._weight.float() * linear._scales.T
            for dtype in (torch.bfloat16,) if fp8 else (torch.bfloat16, torch.float32):
                out = torch.full((17, outputs), torch.nan, device=self.device, dtype=dtype)
                linear(x, out)
                found[f"product{' of 8-bit floats' if fp8 else ''} in {dtype}"] = error(out, wide @ numbers.T)
        return found

    def attention(self) -> dict[str, Any]:
        """All paths on one layer, on ragged rows over permuted pages, against float32."""
        paths = (Workspaces(), Workspaces(prefill="fa3"), Workspaces(decode="xqa"))
        found = self.attended(torch.bfloat16, paths) | self.attended(FP8, (Workspaces(fp8_cache=True),))
        return verdict(found)

    def attended(self, kept: torch.dtype, paths: tuple[Workspaces, ...]) -> dict[str, float]:
        """Errors with a cache of a type, which all K and V fit, so that nothing is rounded before the kernels."""
        config = replace(self.sizes.config, layers=1)
        layout = KVLayout(1, config.kv_heads, config.head_dim, 16, kept.itemsize)
        decodes, chunks = (1, 15, 16, 17, self.sizes.limits.max_model_len), (2, 15, 16, 17, 33)
        lengths = [*decodes, *(count + 40 for count in chunks)]
        pages = [-(-length // 16) for length in lengths]
        store, cache = (KVStore(layout, sum(pages) + 1, dtype, self.device) for dtype in (torch.bfloat16, kept))
        cache.data.copy_(torch.randn(cache.data.shape, device=self.device).bfloat16())
        store.data.copy_(cache.data)
        batch = ragged(lengths, [1] * len(decodes) + list(chunks), pages)
        heads = [config.heads, config.kv_heads, config.kv_heads]
        q, k, v = (torch.randn(batch.tokens, count, config.head_dim, device=self.device).bfloat16() for count in heads)
        k, v = (side.to(kept).bfloat16() for side in (k, v))
        reference, expected = ReferenceAttention(config, store), torch.empty_like(q)
        reference.plan(batch)
        reference.forward(0, q, k, v, expected)
        found = {}
        for workspaces in paths:
            backend, out = FlashInferAttention(config, cache, workspaces), torch.full_like(q, torch.nan)
            backend.reserve(len(lengths), batch.tokens, len(lengths) * max(pages))
            backend.plan(batch)
            backend.forward(0, q, k, v, out)
            path = f"prefill {workspaces.prefill}, decode {workspaces.decode}, cache of {kept}"
            found[path] = error(out, expected.float())
        return found

    def build(self) -> dict[str, Any]:
        """The model with random weights, made on the device."""
        sizes, workspaces = self.sizes, Workspaces()
        formats = Formats(2, 2, 2, threads=0, gate_in_place=False, workspaces=workspaces)
        self.ledger = MemoryLedger(plan_memory(sizes.config, formats, sizes.limits, 1 << 50))
        kept: list[KVStore] = []

        def load(config: ModelConfig, store: KVStore, *_: Any) -> FlashInferAttention:
            kept.append(store)
            return FlashInferAttention(config, store, workspaces)

        checkpoint = SimpleNamespace(config=sizes.config)
        placement = Placement(self.device, torch.bfloat16, CudaKernels(torch.bfloat16, self.device), workspaces)
        parts = (placement, sizes.limits, self.ledger, print, None, self.capture())
        with (
            mock.patch("octavo.model.runner.load_weights", return_value=""),
            mock.patch("octavo.model.runner.load_attention", load),
        ):
            self.runner = build_runner(checkpoint, *parts)  # type: ignore[arg-type]
        self.store = kept[0]
        for linear in self.runner.model.linears():
            linear._weight.normal_(std=0.02)  # type: ignore[attr-defined]
        for norm in (self.runner.model.final_norm, *(n for block in self.runner.model.blocks for n in block.norms())):
            norm.weight.fill_(1.0)
        planned = sum(self.ledger.plan.planned(bucket) for bucket in BUCKETS)
        ledger = sum(self.ledger.allocated[bucket] for bucket in BUCKETS)
        return {"planned": planned, "ledger": ledger, "torch, largest": self.largest()}

    def capture(self) -> Capture:
        return CudaCapture(self.device) if self.device.type == "cuda" else run_again

    def largest(self) -> int:
        """The most bytes that torch has had allocated at one time."""
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0

    def measured(self) -> Device:
        """The device by its measured ceilings, or an H200 by its data sheet where they could not be measured."""
        found = self.results.get("ceilings", {})
        read, flops = found.get("read bytes/s"), found.get("GEMM flop/s")
        return DEVICES["h200"] if read is None else Device("measured", 0, read, flops)

    @contextlib.contextmanager
    def attending(self, workspaces: Workspaces, capture: Capture | None = None) -> Iterator[None]:
        """Let the model attend otherwise; steps are captured anew, or not at all."""
        ours, limits = self.runner, self.sizes.limits
        attention = FlashInferAttention(self.sizes.config, self.store, workspaces)
        attention.reserve(limits.max_rows, ours.arena.max_tokens, limits.table_entries)
        self.runner = ModelRunner(ours.model, attention, ours._slots, ours._sampler, ours.arena, capture=capture)
        try:
            yield
        finally:
            self.runner = ours

    def decode(self) -> dict[str, Any]:
        found = self.decoded("fa2")
        with self.attending(Workspaces(decode="xqa"), self.capture()):
            return found | self.decoded("xqa")

    def decoded(self, path: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for rows, context in self.sizes.batches:
            seconds, name = statistics.median(self.steps(rows, context)), f"{rows} x {context}, {path}"
            found[f"{name}, ms"] = 1000 * seconds
            for device, what in ((self.measured(), "measured read"), (DEVICES["h200"], "data sheet's bound")):
                bound = decode_seconds(self.sizes.config, Formats(2, 2, 2), device, rows, context)
                found[f"{name}, share of the {what}"] = bound / seconds
        return found

    def steps(self, rows: int, context: int) -> list[float]:
        """Seconds of decode steps with one step of look-ahead; what lies in the cache does not matter."""
        count = self.sizes.repeats + 2
        pages = -(-(context + count) // 16)
        admitted = tuple(
            Admission(slot, (1,) * (context + 1), context + 1, tuple(range(slot * pages, (slot + 1) * pages)), GREEDY)
            for slot in range(rows)
        )
        pending, times, started = None, [], time.perf_counter()
        for number in range(count):
            made = tuple(Row(slot, context + number, 1, sample=True) for slot in range(rows))
            queued = self.runner.submit(Step((), admitted if number == 0 else (), (), made))
            if pending is not None:
                pending.wait()
                times.append(time.perf_counter() - started)
                started = time.perf_counter()
            pending = queued
        self.runner.submit(Step(tuple(range(rows)), (), (), ())).wait()
        return times[1:]

    def prefill(self) -> dict[str, Any]:
        found = self.prefilled("fa2")
        with self.attending(Workspaces(prefill="fa3")):
            return found | self.prefilled("fa3")

    def prefilled(self, path: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        rate = prefill_rate(self.sizes.config, Formats(2, 2, 2), self.measured())
        for tokens in self.sizes.prompts:
            seconds = self.timed(lambda tokens=tokens: self.prompt(tokens))
            found[f"{tokens} tokens, {path}, ms"] = 1000 * seconds
            found[f"{tokens} tokens, {path}, share of the measured GEMM"] = tokens / rate / seconds
        return found

    def prompt(self, tokens: int, decodes: int = 0) -> None:
        """Compute a prompt in chunks as large as a step, the first beside some decodes."""
        most, pages = self.sizes.limits.max_tokens - decodes, -(-tokens // 16)
        admitted = [Admission(0, (1,) * tokens, tokens, tuple(range(pages)), GREEDY)]
        admitted += [Admission(1 + slot, (1, 1), 2, (pages + slot,), GREEDY) for slot in range(decodes)]
        rows = [Row(1 + slot, 1, 1, sample=True) for slot in range(decodes)]
        for start in range(0, tokens, most):
            count = min(most, tokens - start)
            step = Step((), tuple(admitted), (), (*rows, Row(0, start, count, sample=start + count == tokens)))
            self.runner.submit(step).wait()
            admitted, rows = [], []
        self.runner.submit(Step(tuple(range(1 + decodes)), (), (), ())).wait()

    def mixed(self) -> dict[str, Any]:
        decodes, tokens = self.sizes.limits.max_rows // 2, self.sizes.prompts[0] // 2
        return {f"{decodes} decodes and {tokens} tokens, ms": 1000 * self.timed(lambda: self.prompt(tokens, decodes))}

    def engine(self) -> dict[str, Any]:
        """The scheduler's loop over many requests, with one step of look-ahead."""
        sizes, limits = self.sizes, self.sizes.limits
        steps = Limits(limits.max_rows, limits.max_tokens, limits.max_model_len, limits.block_size)
        scheduler = Scheduler(BlockPool(limits.blocks), None, steps, [])
        for request in range(sizes.requests):
            prompt = (1 + request % 90,) * sizes.new_tokens
            scheduler.add(Submission(request=request, prompt=prompt, params=GREEDY, max_tokens=sizes.new_tokens))
        started = time.perf_counter()
        timed = TimedRunner(self.runner, min(sizes.requests, limits.max_rows))
        tokens = sum(event.token is not None for event in run_all(scheduler, timed))
        found = {"tokens": tokens, "tokens/s": tokens / (time.perf_counter() - started)}
        found[f"a step of {timed.rows} rows, ms"] = 1000 * statistics.median(timed.seconds)
        return found | {"torch, largest": self.largest()}

    def parity(self) -> dict[str, Any]:
        """A small random model on the CPU, on the GPU, and on the GPU with captured steps."""
        return parity(self.output / "small", self.sizes.small, self.sizes.requests // 4, self.sizes.new_tokens // 2)

    def http(self) -> dict[str, Any]:
        """A server of its own process, which the device has to itself."""
        for name in ("runner", "store", "ledger"):
            self.__dict__.pop(name, None)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        sizes = self.sizes
        return http(self.output / "served", sizes.served, self.device.type, sizes.streams, sizes.new_tokens)


class TimedRunner:
    """A runner that notes how long after another a step is queued, where both are of one token for each of `rows`."""

    def __init__(self, runner: ModelRunner, rows: int) -> None:
        self.runner, self.rows = runner, rows
        self.seconds: list[float] = []
        self._before: float | None = None

    def submit(self, step: Step) -> Pending:
        now = time.perf_counter() if len(step.rows) == step.tokens == self.rows else None
        if now is not None and self._before is not None:
            self.seconds.append(now - self._before)
        self._before = now
        return self.runner.submit(step)

    def reset(self) -> None:
        self.runner.reset()


def run_again(function: Callable[[], None]) -> Callable[[], None]:
    """What stands for a captured step where there is no GPU."""
    function()
    return function


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


def verdict(found: dict[str, float]) -> dict[str, Any]:
    """The errors; a NaN, which no comparison lets pass, or too large a one raises."""
    wrong = {name: size for name, size in found.items() if not size <= TOLERANCE}
    if wrong:
        raise ArithmeticError(f"beyond {TOLERANCE}: {wrong}")
    return dict(found)


def ragged(lengths: list[int], counts: list[int], pages: list[int]) -> AttentionBatch:
    """Rows of so many queries at the end of so many positions, over pages in shuffled order."""

    def int32(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    def indptr(values: list[int]) -> torch.Tensor:
        return int32([0, *torch.tensor(values).cumsum(0).tolist()])

    order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(0)).int()
    slots = []
    for row, table in enumerate(order.split(pages)):
        own = range(lengths[row] - counts[row], lengths[row])
        slots += [int(table[position // 16]) * 16 + position % 16 for position in own]
    return AttentionBatch(
        indptr(counts), int32(lengths), indptr(pages), order, int32([(n - 1) % 16 + 1 for n in lengths]), int32(slots)
    )


def full_sizes(model: str) -> Sizes:
    limits = RunnerLimits(max_model_len=8192, max_rows=64, max_tokens=2048, block_size=16, blocks=1200)
    batches = ((1, 128), (8, 1024), (32, 512), (64, 256))
    llama, prompts = find_config("llama-3-8b"), (512, 2048, 8192)
    small = replace(llama, layers=4, width=1024, heads=8, kv_heads=1, ffn_width=2816, vocabulary=4096)
    served = replace(llama, layers=16, width=2048, head_dim=64, ffn_width=8192, vocabulary=32000)
    return Sizes(
        find_config(model), limits, 8 << 30, 8192, batches, prompts, 30, 64, 128, small, served, (1, 8, 32, 64)
    )


def dry_sizes() -> Sizes:
    config = replace(find_config("smollm2"), layers=1, width=128, heads=2, kv_heads=1, ffn_width=192, vocabulary=101)
    limits = RunnerLimits(max_model_len=96, max_rows=4, max_tokens=32, block_size=16, blocks=24)
    small = replace(config, layers=2, vocabulary=300)
    return Sizes(config, limits, 1 << 16, 16, ((1, 3), (3, 20)), (40, 20), 2, 12, 8, small, small, (1, 3))


def emulated() -> contextlib.AbstractContextManager[Any]:
    from support.gpu_runners import emulated_gpu  # noqa: PLC0415

    return emulated_gpu(lambda _emulation: run_again)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3-70b", help="a built-in shape or a config.json")
    parser.add_argument("--output", type=Path, default=Path("device_check"))
    parser.add_argument("--seconds", type=float, default=480, help="no section begins later than this")
    parser.add_argument("--dry-run", action="store_true")
    options, begun = parser.parse_args(), time.monotonic()
    device = torch.device("cpu" if options.dry_run else "cuda")
    check = Check(device, dry_sizes() if options.dry_run else full_sizes(options.model), options.output)
    with emulated() if options.dry_run else contextlib.nullcontext(), torch.no_grad():
        for name in SECTIONS:
            late = time.monotonic() > begun + options.seconds
            check.section(name, (lambda: {"skipped": "no time is left"}) if late else getattr(check, name))
    return int(any("failed" in found for found in check.results.values()))


if __name__ == "__main__":
    sys.exit(main())
