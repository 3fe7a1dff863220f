"""How large everything is: limits of a step and blocks of the pool, from the configuration, the model and the machine.

Plain arithmetic on numbers that others measured; what it cannot reconcile it refuses, naming the flag and both numbers.
"""

from dataclasses import replace
from pathlib import Path

from octavo.kvcache.ledger import MemoryPlan
from octavo.scheduler.messages import EngineConfig
from octavo.scheduler.request import Limits

_MIB = 1 << 20
_FEW_CORES = 4
_FEW_MIXED_TOKENS = 160
"""What few cores compute of a small model in 100 ms: so long streams stand still while a long prompt arrives."""
_DEFAULT_SHARE = 0.9
"""Of the memory that this process may use: the rest is for the interpreter, its libraries and the system."""
_UNLIMITED = 1 << 60
"""cgroup v1 writes "no limit" as a number above this."""


class ConfigurationError(ValueError):
    """The configuration contradicts itself, the model or the machine."""

    exit_code = 64


def resolve_limits(config: EngineConfig, *, max_context: int, on_gpu: bool, cores: int) -> Limits:
    """Fill in the limits that were not given. Raises ConfigurationError."""
    length = context_length(config, max_context)
    rows, tokens = (256, 2048) if on_gpu else (32, 512)
    few = config.max_num_batched_tokens is None and not on_gpu and cores <= _FEW_CORES
    # Each running request computes at least one token a step, so a default gives way to what was asked for.
    if config.max_num_seqs is None and config.max_num_batched_tokens is not None:
        rows = min(rows, config.max_num_batched_tokens)
    if config.max_num_batched_tokens is None and config.max_num_seqs is not None:
        tokens = max(tokens, config.max_num_seqs)
    rows = config.max_num_seqs or rows
    tokens = config.max_num_batched_tokens or tokens
    if tokens < rows:
        raise ConfigurationError(
            f"--max-num-batched-tokens {tokens} is below --max-num-seqs {rows}: every running request takes a token"
        )
    mixed_tokens = max(_FEW_MIXED_TOKENS, rows) if few else None
    return Limits(rows, tokens, length, config.block_size, config.admission == "reserve", mixed_tokens)


def context_length(config: EngineConfig, max_context: int) -> int:
    """Tokens of the longest request, as it was asked for. Raises ConfigurationError beyond the model's context."""
    length = config.max_model_len or max_context
    if length > max_context:
        raise ConfigurationError(f"--max-model-len {length} exceeds the model's context of {max_context} tokens")
    return length


def memory_budget(config: EngineConfig, capacity: int) -> int:
    """Bytes that weights, activations and cache together may take of `capacity`. Raises ConfigurationError."""
    if config.memory is None:
        share = config.gpu_memory_utilization
        return int(capacity * (_DEFAULT_SHARE if share is None else share))
    if config.gpu_memory_utilization is not None:
        raise ConfigurationError("--memory and --gpu-memory-utilization both set the budget: give one of them")
    if config.memory > capacity:
        raise ConfigurationError(
            f"--memory {_mib(config.memory)}, but this process may use only {_mib(capacity)}: lower it"
        )
    return config.memory


def size_pool(config: EngineConfig, limits: Limits, plan: MemoryPlan) -> tuple[int, Limits]:
    """Return the number of blocks, and the limits they can honour.

    plan: the budget, and the sizes of all but the pool. A budget that was given is spent; of the default one the pool
    takes what two requests of full length need, but at most half. A pool too small for one request of full length
    lowers max_model_len if that was not given. Raises ConfigurationError.
    """
    room = plan.budget - plan.fixed
    source = _source_of_budget(config, plan)
    if config.kv_blocks is not None:
        blocks = config.kv_blocks
        source = f"--kv-blocks {blocks}"
    elif config.memory is not None or config.gpu_memory_utilization is not None:
        blocks = room // plan.block_bytes
    else:
        blocks = min(-(-2 * limits.max_model_len // limits.block_size), min(plan.budget // 2, room) // plan.block_bytes)
    if blocks < 1:
        raise ConfigurationError(f"{source} leaves no room for a single KV block of {_mib(plan.block_bytes)}")
    needed = plan.fixed + blocks * plan.block_bytes
    if needed > plan.budget:
        raise ConfigurationError(
            f"{source} needs {_mib(needed)} in all, but the budget is {_mib(plan.budget)}: lower it or raise that"
        )
    tokens = blocks * limits.block_size
    if tokens >= limits.max_model_len:
        return blocks, limits
    if config.max_model_len is not None:
        raise ConfigurationError(
            f"{source} yields KV blocks for {tokens} tokens, fewer than --max-model-len {config.max_model_len}: "
            "lower that, or allow more memory"
        )
    return blocks, replace(limits, max_model_len=tokens)


def _source_of_budget(config: EngineConfig, plan: MemoryPlan) -> str:
    if config.memory is not None:
        source = f"--memory {_mib(plan.budget)}"
    elif config.gpu_memory_utilization is not None:
        source = f"--gpu-memory-utilization {config.gpu_memory_utilization:g}, a budget of {_mib(plan.budget)},"
    else:
        source = f"the default budget of {_mib(plan.budget)}"
    return f"{source} (weights and activations take {_mib(plan.fixed)})"


def memory_capacity(root: Path = Path("/")) -> int:
    """Bytes this process may use: the machine's, or a cgroup's limit if that is less.

    What others hold at the moment does not count: a plan must not depend on the minute it is made in.
    """
    limits = [_meminfo(root, "MemTotal")]
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            base, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        # Every ancestor limits too. In a container the path may not exist; then the root is the container's own.
        group = base / path.strip("/")
        for directory in (group, *group.parents):
            limits += _limit(directory / name)
            if directory == base:
                break
    return min(limits)


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that the system could give out now."""
    return _meminfo(root, "MemAvailable")


def _meminfo(root: Path, name: str) -> int:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise ConfigurationError(
        f"{root / 'proc/meminfo'} has no line {name}: there is no telling how much memory there is"
    )


def _limit(file: Path) -> list[int]:
    values = [int(line) for line in _lines(file) if line.isdigit()]
    return [value for value in values if value < _UNLIMITED]


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


def _mib(count: int) -> str:
    return f"{count / _MIB:.1f} MiB"
