"""How large everything is: limits of a step and blocks of the pool, from the configuration, the model and the machine.

Plain arithmetic on numbers that others measured; what it cannot reconcile it refuses, naming the flag and both numbers.
"""

from dataclasses import replace
from pathlib import Path

from octavo.kvcache.ledger import MemoryPlan
from octavo.scheduler.messages import EngineConfig
from octavo.scheduler.policy import Limits

_MIB = 1 << 20
_FEW_CORES = 4
_UNLIMITED = 1 << 60
"""cgroup v1 writes "no limit" as a number above this."""


class ConfigurationError(ValueError):
    """The configuration contradicts itself, the model or the machine."""

    exit_code = 64


def resolve_limits(config: EngineConfig, *, max_context: int, on_gpu: bool, cores: int) -> Limits:
    """Fill in the limits that were not given. Raises ConfigurationError."""
    length = config.max_model_len or max_context
    if length > max_context:
        raise ConfigurationError(f"--max-model-len {length} exceeds the model's context of {max_context} tokens")
    rows, tokens = (256, 8192) if on_gpu else (32, 128 if cores <= _FEW_CORES else 512)
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
    return Limits(max_rows=rows, max_tokens=tokens, max_model_len=length, block_size=config.block_size)


def size_pool(config: EngineConfig, limits: Limits, plan: MemoryPlan, *, usable: int) -> tuple[int, Limits]:
    """Return the number of blocks, and the limits they can honour.

    plan: sizes of all but the pool; usable: bytes this process may use. Unless told otherwise, two requests of full
    length fit, in at most half of the usable memory. A pool too small for one request of full length lowers
    max_model_len if that was not given. Raises ConfigurationError.
    """
    fixed = plan.weights + plan.activations
    if config.kv_blocks is not None:
        blocks = config.kv_blocks
        source = f"--kv-blocks {blocks}"
    elif config.memory is not None:
        blocks = (config.memory - fixed) // plan.block_bytes
        source = f"--memory {_mib(config.memory)} (weights and activations take {_mib(fixed)})"
    else:
        room = min(usable // 2, usable - fixed)
        blocks = min(-(-2 * limits.max_model_len // limits.block_size), room // plan.block_bytes)
        source = f"the usable memory of {_mib(usable)} (weights and activations take {_mib(fixed)})"
    if blocks < 1:
        raise ConfigurationError(f"{source} leaves no room for a single KV block of {_mib(plan.block_bytes)}")
    needed = fixed + blocks * plan.block_bytes
    if needed > usable:
        raise ConfigurationError(f"{source} needs {_mib(needed)} in all, but only {_mib(usable)} are usable: lower it")
    tokens = blocks * limits.block_size
    if tokens >= limits.max_model_len:
        return blocks, limits
    if config.max_model_len is not None:
        raise ConfigurationError(
            f"{source} yields KV blocks for {tokens} tokens, fewer than --max-model-len {config.max_model_len}: "
            "lower that, or allow more memory"
        )
    return blocks, replace(limits, max_model_len=tokens)


def usable_memory(root: Path = Path("/")) -> int:
    """Bytes this process can hope for: what the system has available, or a cgroup's limit if that is less."""
    limits = [_available(root / "proc/meminfo")]
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


def _available(meminfo: Path) -> int:
    for line in _lines(meminfo):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise ConfigurationError(f"{meminfo} does not tell how much memory is available: give --memory or --kv-blocks")


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
