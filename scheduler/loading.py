"""From the configuration to an engine that is ready: the model, its memory, its limits."""

import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from octavo.kvcache.ledger import BUCKETS, MemoryLedger, MemoryPlan
from octavo.kvcache.pool import BlockPool
from octavo.kvcache.prefix import PrefixHasher
from octavo.model.config import ModelConfig
from octavo.model.kernels import Kernels
from octavo.model.kernels.cores import available_cores
from octavo.model.kernels.load import load_kernels
from octavo.model.matrices import kept_quantised
from octavo.model.memory import Formats, kv_layout
from octavo.model.runner import ModelRunner, build_runner
from octavo.model.selftest import check_batch_invariance
from octavo.model.weights.checkpoint import Checkpoint, open_checkpoint, tensor_shapes
from octavo.model.weights.locate import locate
from octavo.model.weights.progress import loading_progress
from octavo.scheduler.messages import EngineConfig, Loading, MemoryLine, Ready
from octavo.scheduler.planning import CPU_RUNTIME, HOST, Machine, plan_engine, runner_limits
from octavo.scheduler.policy import Scheduler
from octavo.scheduler.request import Limits
from octavo.scheduler.sizing import ConfigurationError, available_memory, memory_capacity

_log = logging.getLogger(__name__)


class DeviceError(Exception):
    """The device cannot be used."""

    exit_code = 69


@dataclass(frozen=True, slots=True)
class _Engine:
    """What the limits and the memory plan follow from, and these two."""

    config: ModelConfig
    kernels: Kernels
    dtype: torch.dtype
    limits: Limits
    plan: MemoryPlan


def load(
    config: EngineConfig, report: Callable[[Loading], None] = lambda _: None
) -> tuple[Scheduler, ModelRunner, Ready]:
    """Load the model and make everything an engine needs, and report how far this has come.

    Raises CheckpointError, ConfigurationError or DeviceError: each one line, with an exit code.
    """
    started = time.monotonic()
    checkpoint, dtype, kernels = choose(config)
    engine = _plan(config, checkpoint.config, dtype, kernels)
    if checkpoint.config.quantised and not kernels.panels:
        _log.warning("the quantised weights are widened to %s: the kernels of torch cannot use them as they are", dtype)
    ledger = MemoryLedger(engine.plan)
    limits = runner_limits(engine.limits, engine.plan.blocks)
    runner = build_runner(checkpoint, engine.kernels, dtype, limits, ledger, _progress(report))
    report(Loading(phase="checking batch invariance", progress=1.0))
    invariance = check_batch_invariance(runner.model)
    if engine.kernels.name != "torch":
        # The kernels have threads of their own. What is left to torch is one row of logits at a time, too little to be
        # worth its threads, whose barriers spin and so take time from whoever else computes.
        torch.set_num_threads(1)
    hasher = PrefixHasher(config.block_size) if config.prefix_caching else None
    scheduler = Scheduler(BlockPool(engine.plan.blocks), hasher, engine.limits, checkpoint.config.eos_ids)
    return scheduler, runner, _describe(engine, ledger, runner.weights_digest, invariance, time.monotonic() - started)


def choose(config: EngineConfig) -> tuple[Checkpoint, torch.dtype, Kernels]:
    """Decide what to load, in which type and with which kernels. Allocates nothing; raises what `load` does."""
    check_device(config.device)
    widen = config.dtype != "auto"
    checkpoint = open_checkpoint(locate(config.model), config.load_format, config.seed, widen=widen)
    dtype = choose_dtype(config.dtype)
    return checkpoint, dtype, _choose_kernels(dtype)


def _progress(report: Callable[[Loading], None]) -> Callable[[int, int], None]:
    """Show how far the weights are, and report every percent."""
    show = loading_progress("loading weights")
    reported = -1

    def progress(done: int, total: int) -> None:
        nonlocal reported
        show(done, total)
        if (percent := 100 * done // total) > reported:
            reported = percent
            report(Loading(phase="loading weights", progress=percent / 100))

    return progress


def check_device(device: str) -> None:
    """Raise DeviceError for a device that this version or this machine does not have."""
    if device == "cuda":
        problem = "this version computes on the CPU only" if torch.cuda.is_available() else "there is no usable GPU"
        raise DeviceError(f"--device cuda: {problem}; use --device cpu")


def choose_dtype(name: str) -> torch.dtype:
    """Return the dtype of weights, activations and cache on a CPU. Raises ConfigurationError."""
    dtypes = {"auto": torch.bfloat16, "bfloat16": torch.bfloat16, "float32": torch.float32}
    if name not in dtypes:
        raise ConfigurationError(f"--dtype {name} is not for the CPU; use bfloat16 or float32")
    return dtypes[name]


def _choose_kernels(dtype: torch.dtype) -> Kernels:
    try:
        return load_kernels(dtype)
    except (ValueError, PermissionError) as error:  # OCTAVO_KERNELS or OCTAVO_CACHE_DIR
        raise ConfigurationError(str(error)) from error


def _plan(config: EngineConfig, model: ModelConfig, dtype: torch.dtype, kernels: Kernels) -> _Engine:
    """Decide the limits and the size of the pool, before anything large is allocated."""
    machine = Machine(capacity=memory_capacity(), cores=available_cores())
    formats = Formats.of(dtype.itemsize, panels=kernels.panels, threads=kernels.threads)
    plan = plan_engine(config, model, formats, machine)
    wanted = config.max_model_len or model.max_context
    if plan.limits.max_model_len != wanted:
        _log.warning(
            "--max-model-len is lowered from %d to %d tokens, which is what the KV cache holds",
            wanted,
            plan.limits.max_model_len,
        )
    if plan.memory.total > (available := available_memory()):
        _log.warning(
            "%d bytes are planned, but the system can give only %d now: make room, or lower --memory or --kv-blocks",
            plan.memory.total,
            available,
        )
    return _Engine(model, kernels, dtype, plan.limits, plan.memory)


def _describe(
    engine: _Engine, ledger: MemoryLedger, weights_digest: str, invariance: tuple[bool, str], load_seconds: float
) -> Ready:
    model, limits = engine.config, engine.limits
    return Ready(
        architecture=model.architecture,
        parameters=sum(map(math.prod, tensor_shapes(model).values())),
        vocabulary=model.vocabulary,
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_rows,
        max_num_batched_tokens=limits.max_tokens,
        block_size=limits.block_size,
        blocks=engine.plan.blocks,
        kv_bytes_per_token=kv_layout(model, limits.block_size, engine.dtype.itemsize).token_bytes,
        eos_ids=model.eos_ids,
        device="cpu",
        dtype=str(engine.dtype).removeprefix("torch."),
        quantised=tuple(sorted(set(kept_quantised(model, panels=engine.kernels.panels).values()))),
        weights_digest=weights_digest,
        kernels=engine.kernels.name,
        process=os.getpid(),
        memory=(
            *(
                MemoryLine(bucket=bucket, planned=ledger.planned(bucket), allocated=ledger.allocated(bucket))
                for bucket in BUCKETS
            ),
            MemoryLine(bucket="runtime", planned=CPU_RUNTIME, allocated=0),
            MemoryLine(bucket="host", planned=HOST, allocated=0),
        ),
        memory_budget=engine.plan.budget,
        batch_invariant=invariance[0],
        batch_invariance_reason=invariance[1],
        load_seconds=load_seconds,
    )
