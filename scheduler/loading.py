"""From the configuration to an engine that is ready: the model, its memory, its limits."""

import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace

import msgspec
import torch

from octavo.kvcache.ledger import BUCKETS, MemoryLedger, MemoryPlan
from octavo.kvcache.pool import BlockPool
from octavo.kvcache.prefix import PrefixHasher
from octavo.model.attention.flashinfer import float_workspace
from octavo.model.config import ModelConfig
from octavo.model.device import CPU, DeviceError, choose_device, use_gpu
from octavo.model.flashinfer_library import flashinfer_problem, kernels_problem
from octavo.model.kernels import FP8_KIND
from octavo.model.kernels.cores import available_cores
from octavo.model.matrices import kept_quantised
from octavo.model.memory import kv_layout, rank_shape
from octavo.model.parallel import Ranks
from octavo.model.placement import Placement, place_on_cpu, place_on_gpu
from octavo.model.roofline import Device
from octavo.model.runner import ModelRunner, build_runner
from octavo.model.selftest import ON_GPU, check_batch_invariance
from octavo.model.warmup import warm_up
from octavo.model.weights.checkpoint import Checkpoint, open_checkpoint
from octavo.model.weights.errors import CheckpointError
from octavo.model.weights.headers import parameters
from octavo.model.weights.locate import locate
from octavo.model.weights.progress import loading_progress
from octavo.model.workspaces import Workspaces
from octavo.scheduler import planning
from octavo.scheduler.launch import find_launch
from octavo.scheduler.messages import EngineConfig, Loading, MemoryLine, Ready
from octavo.scheduler.policy import Scheduler
from octavo.scheduler.sizing import ConfigurationError, available_memory, memory_capacity

_log = logging.getLogger(__name__)


def load(
    config: EngineConfig,
    report: Callable[[Loading], None] = lambda _: None,
    join: Callable[[EngineConfig], Ranks] | None = None,
) -> tuple[Scheduler, ModelRunner, Ready]:
    """Load the model and make everything an engine needs, and report how far this has come.

    `join` meets the other ranks of a divided model, once it is known that it can be divided and fits. It is given the
    configuration with everything decided that follows from this machine, so that all ranks plan the same.

    Raises CheckpointError, ConfigurationError or DeviceError: each one line, with an exit code.
    """
    started = time.monotonic()
    checkpoint, placement = choose(config)
    model, kernels = checkpoint.config, placement.kernels
    if (model.quantised and not kernels.panels) or (model.stored_fp8 and kernels.fp8 is None):
        text = "the quantised weights are widened to %s: these kernels cannot use them as they are"
        _log.warning(text, placement.dtype)
    placement, plan = _plan(config, model, placement)
    ledger = MemoryLedger(plan.memory)
    limits = planning.runner_limits(plan.limits, plan.memory.blocks)
    capture = placement.capture(eager=config.enforce_eager)
    ranks = join(_decided(config, placement, plan)) if join else None
    runner = build_runner(checkpoint, placement, limits, ledger, _progress(report), ranks, capture)
    if placement.on_gpu:
        report(Loading(phase="running every operation once", progress=1.0))
        warm_up(runner)
    report(Loading(phase="checking batch invariance", progress=1.0))
    invariance = (False, ON_GPU) if placement.on_gpu else check_batch_invariance(runner.model)
    if ranks:
        ranks.compare(plan.memory)
    if kernels.name != "torch":
        # The kernels have threads of their own. What is left to torch is one row of logits at a time, too little to be
        # worth its threads, whose barriers spin and so take time from whoever else computes.
        torch.set_num_threads(1)
    hasher = PrefixHasher(config.block_size) if config.prefix_caching else None
    scheduler = Scheduler(BlockPool(plan.memory.blocks), hasher, plan.limits, model.eos_ids)
    ready = _describe(model, placement, plan, ledger, runner.weights_digest, invariance, time.monotonic() - started)
    return scheduler, runner, ready


def choose(config: EngineConfig) -> tuple[Checkpoint, Placement]:
    """Decide what to load, where, in which type and with which kernels. Allocates nothing; raises what `load` does."""
    device = choose_device(config.device, lambda: flashinfer_problem() or kernels_problem())
    size, launch = config.tensor_parallel_size, find_launch(config.tensor_parallel_size)
    if device != CPU and launch is None and size > max(1, count := torch.cuda.device_count()):
        raise DeviceError(f"--tensor-parallel-size {size} needs as many GPUs, and this process can use {count}")
    if device != CPU and launch is not None:
        use_gpu(launch.local_rank)
        device = torch.device("cuda", launch.local_rank)
    checkpoint = open_checkpoint(locate(config.model), config.load_format, config.seed, widen=config.dtype != "auto")
    _check_division(checkpoint.config, size)
    dtype = choose_dtype(config.dtype, on_gpu=device != CPU)
    fp8 = config.quantization == "fp8" or (checkpoint.config.stored_fp8 and device != CPU)
    fp8_cache = config.kv_cache_dtype == "fp8_e4m3"
    wanted = Workspaces(config.attention_prefill, config.attention_decode, fp8_cache=fp8_cache)
    try:
        if device == CPU:
            return checkpoint, place_on_cpu(dtype, wanted, size, launch.local_size if launch else size, fp8=fp8)
        return checkpoint, place_on_gpu(device, dtype, checkpoint.config, config.block_size, wanted, size, fp8=fp8)
    except (ValueError, PermissionError) as error:  # an option, OCTAVO_KERNELS or OCTAVO_CACHE_DIR
        raise ConfigurationError(str(error)) from error


def _check_division(model: ModelConfig, ranks: int) -> None:
    """Raise ConfigurationError for a model that cannot be divided."""
    if ranks > 1 and model.quantised:
        raise ConfigurationError("--tensor-parallel-size does not divide quantised blocks: give --dtype bfloat16")
    try:
        rank_shape(model, ranks)
    except CheckpointError as error:
        raise ConfigurationError(f"--tensor-parallel-size {ranks}: {error}") from error


def _decided(config: EngineConfig, placement: Placement, plan: planning.EnginePlan) -> EngineConfig:
    limits = plan.limits
    return msgspec.structs.replace(
        config,
        device="cuda" if placement.on_gpu else "cpu",
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_rows,
        max_num_batched_tokens=limits.max_tokens,
        memory=plan.memory.budget,
        gpu_memory_utilization=None,
        kv_blocks=plan.memory.blocks,
    )


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


def choose_dtype(name: str, *, on_gpu: bool = False) -> torch.dtype:
    """Return the dtype of weights, activations and cache. Raises ConfigurationError."""
    other = {"float16": torch.float16} if on_gpu else {"float32": torch.float32}
    dtypes = {"auto": torch.bfloat16, "bfloat16": torch.bfloat16, **other}
    if name not in dtypes:
        where = "a GPU" if on_gpu else "the CPU"
        raise ConfigurationError(f"--dtype {name} is not for {where}; use bfloat16 or {next(iter(other))}")
    return dtypes[name]


def _plan(config: EngineConfig, model: ModelConfig, placement: Placement) -> tuple[Placement, planning.EnginePlan]:
    """Decide limits, workspaces and the size of the pool, before anything large is allocated."""
    machine, available = _machine(placement)
    if placement.workspaces is not None:
        limits = planning.plan_without_pool(config, model, placement.formats, machine).limits
        needed = float_workspace(
            rank_shape(model, placement.ranks),
            planning.runner_limits(limits, 0),
            placement.dtype,
            placement.device,
            fp8_cache=placement.workspaces.fp8_cache,
        )
        placement = replace(placement, workspaces=replace(placement.workspaces, float_bytes=needed))
    plan = planning.plan_engine(config, model, placement.formats, machine)
    wanted = config.max_model_len or model.max_context
    if plan.limits.max_model_len != wanted:
        _log.warning(
            "--max-model-len is lowered from %d to %d tokens, which is what the KV cache holds",
            wanted,
            plan.limits.max_model_len,
        )
    if plan.memory.total > available:
        source = "the GPU" if placement.on_gpu else "the system"
        shortage = (
            f"{plan.memory.total} bytes are planned, but {source} can give only {available} now: "
            "make room, or lower --memory or --kv-blocks"
        )
        if placement.on_gpu:  # whose memory is not paged out
            raise ConfigurationError(shortage)
        _log.warning("%s", shortage)
    return placement, plan


def _machine(placement: Placement) -> tuple[planning.Machine, int]:
    """What there is to plan with, and the bytes that could be had at this moment."""
    if not placement.on_gpu:
        share = placement.share
        return planning.Machine(memory_capacity() // share, available_cores()), available_memory() // share
    free, total = torch.cuda.mem_get_info(placement.device)
    return planning.Machine(total - planning.gpu_runtime(placement.ranks), available_cores(), on_gpu=True), free


def gpu_memory(placement: Placement) -> Device | None:
    """The device that was chosen as `octavo plan` knows devices, without bounds of its speed; None for a CPU."""
    if not placement.on_gpu:
        return None
    return Device(torch.cuda.get_device_name(placement.device), torch.cuda.mem_get_info(placement.device)[1])


def _kept(model: ModelConfig, placement: Placement) -> tuple[str, ...]:
    """Types of the weights that are not kept as numbers of the engine's dtype."""
    kinds = set(kept_quantised(model, panels=placement.kernels.panels).values())
    return tuple(sorted(kinds)) if placement.kernels.fp8 is None else (FP8_KIND,)


def _runtime(placement: Placement, plan: MemoryPlan) -> MemoryLine:
    """What lies beside the buckets: on a GPU as measured, once steps are captured."""
    if not placement.on_gpu:
        return MemoryLine(bucket="runtime", planned=planning.CPU_RUNTIME, allocated=0)
    free, total = torch.cuda.mem_get_info(placement.device)
    planned, allocated = planning.gpu_runtime(placement.ranks), max(0, total - free - plan.total)
    return MemoryLine(bucket="runtime", planned=planned, allocated=allocated)


def _describe(
    model: ModelConfig,
    placement: Placement,
    plan: planning.EnginePlan,
    ledger: MemoryLedger,
    weights_digest: str,
    invariance: tuple[bool, str],
    load_seconds: float,
) -> Ready:
    limits = plan.limits
    return Ready(
        architecture=model.architecture,
        parameters=parameters(model),
        vocabulary=model.vocabulary,
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_rows,
        max_num_batched_tokens=limits.max_tokens,
        block_size=limits.block_size,
        blocks=plan.memory.blocks,
        kv_bytes_per_token=kv_layout(model, limits.block_size, placement.formats.cache).token_bytes,
        eos_ids=model.eos_ids,
        device=str(placement.device),
        dtype=str(placement.dtype).removeprefix("torch."),
        quantised=_kept(model, placement),
        weights_digest=weights_digest,
        kernels=placement.kernels.name,
        tensor_parallel_size=placement.ranks,
        process=os.getpid(),
        memory=(
            *(
                MemoryLine(bucket=bucket, planned=ledger.plan.planned(bucket), allocated=ledger.allocated[bucket])
                for bucket in BUCKETS
            ),
            _runtime(placement, plan.memory),
            MemoryLine(bucket="host", planned=planning.HOST, allocated=0),
        ),
        memory_budget=plan.memory.budget,
        batch_invariant=invariance[0],
        batch_invariance_reason=invariance[1],
        load_seconds=load_seconds,
    )
