"""The limits and the memory of an engine, decided before anything is loaded.

The server and `octavo plan` call the same function, so one tells what the other will do. Imports no torch.
"""

from dataclasses import dataclass

import msgspec

from octavo.kvcache.ledger import MemoryPlan
from octavo.model.config import ModelConfig
from octavo.model.memory import Formats, RunnerLimits, plan_memory
from octavo.scheduler.messages import EngineConfig
from octavo.scheduler.request import Limits
from octavo.scheduler.sizing import memory_budget, resolve_limits, size_pool

_MIB = 1 << 20
CPU_RUNTIME = 192 * _MIB
"""What an engine on a CPU holds beside its buckets, predicted: the interpreter, torch, the stacks of its threads."""
GPU_RUNTIME = 1024 * _MIB
"""What an engine on a GPU holds there beside its buckets, predicted: the context, libraries and captured steps."""
COLLECTIVES_RUNTIME = 256 * _MIB
"""What NCCL takes of each GPU of several that share a model, predicted."""
HOST = 144 * _MIB
"""What the server's process holds, predicted: the interpreter, the tokenizer, requests and answers."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What an engine finds where it starts."""

    capacity: int
    """Bytes that this process may use of the device, or of the machine's RAM."""
    cores: int
    on_gpu: bool = False


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """What an engine is built from."""

    limits: Limits
    memory: MemoryPlan


def gpu_runtime(ranks: int) -> int:
    """What an engine holds of a GPU beside its buckets, predicted."""
    return GPU_RUNTIME + (COLLECTIVES_RUNTIME if ranks > 1 else 0)


def plan_engine(config: EngineConfig, model: ModelConfig, formats: Formats, machine: Machine) -> EnginePlan:
    """Decide limits and pool. Raises ConfigurationError where the options, the model and the memory do not agree."""
    config = _spending(config, machine)
    empty = plan_without_pool(config, model, formats, machine)
    blocks, limits = size_pool(config, empty.limits, empty.memory)
    memory = plan_memory(model, formats, runner_limits(limits, blocks), empty.memory.budget)
    return EnginePlan(limits, memory)


def plan_without_pool(config: EngineConfig, model: ModelConfig, formats: Formats, machine: Machine) -> EnginePlan:
    """The limits as they are asked for, and what is taken before the first block."""
    config = _spending(config, machine)
    limits = resolve_limits(config, max_context=model.max_context, on_gpu=machine.on_gpu, cores=machine.cores)
    budget = memory_budget(config, machine.capacity)
    return EnginePlan(limits, plan_memory(model, formats, runner_limits(limits, 0), budget))


def _spending(config: EngineConfig, machine: Machine) -> EngineConfig:
    """Spend all of a GPU where nothing else is said: nobody else is to use it."""
    if not machine.on_gpu or (config.memory, config.gpu_memory_utilization, config.kv_blocks) != (None, None, None):
        return config
    return msgspec.structs.replace(config, memory=machine.capacity)


def runner_limits(limits: Limits, blocks: int) -> RunnerLimits:
    """The same limits, as the model's side knows them."""
    return RunnerLimits(limits.max_model_len, limits.max_rows, limits.max_tokens, limits.block_size, blocks)
