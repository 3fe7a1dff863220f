"""What `octavo plan` computes: does it fit, for how many, how fast at best, and what would have to change.

Sizes come from the functions the engine itself is built with. What this version does not serve may be planned too, and
is labelled.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice

import msgspec

from octavo.kvcache.ledger import MemoryPlan
from octavo.model.config import ModelConfig
from octavo.model.kernels import FP8_KIND
from octavo.model.matrices import kept_quantised
from octavo.model.memory import Formats, activation_lines, rank_shape
from octavo.model.roofline import DEVICES, Device
from octavo.model.weights.errors import CheckpointError
from octavo.model.workspaces import Workspaces
from octavo.scheduler.messages import EngineConfig
from octavo.scheduler.planning import (
    CPU_RUNTIME,
    EnginePlan,
    Machine,
    gpu_runtime,
    plan_engine,
    plan_without_pool,
    runner_limits,
)
from octavo.scheduler.request import Limits
from octavo.scheduler.sizing import ConfigurationError

MAX_DEVICES = 64
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
FP8_CACHE = "fp8_e4m3"


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be planned."""

    model: ModelConfig
    engine: EngineConfig
    """Limits and budgets; None where they follow from model and device."""
    machine: Machine
    """This machine, where no other device is named."""
    device: Device | None = None
    """None is this machine's CPU."""
    devices: int = 1
    """That share the model by tensor parallelism: on a CPU, shares of this machine."""
    dtype: str = "bfloat16"
    """Of activations, of weights but for the matrices that are kept in 8-bit floats, and of the cache if it is not."""
    fp8: bool = False
    panels: bool = False
    users: int | None = None
    """Requests that must fit at one time, each of `context` tokens."""
    context: int | None = None
    workspaces: Workspaces = field(default_factory=Workspaces)
    """Of a GPU."""

    @property
    def formats(self) -> Formats:
        """How each device keeps numbers."""
        numbers = DTYPE_BYTES[self.dtype]
        return Formats(
            activations=numbers,
            matrices=1 if self.fp8 else numbers,
            cache=1 if self.workspaces.fp8_cache else numbers,
            panels=self.panels,
            threads=max(1, self.machine.cores // self.devices),
            ranks=self.devices,
            gate_in_place=self.device is None,
            workspaces=self.workspaces if self.device else None,
        )

    @property
    def weights(self) -> str:
        """What the weights are kept in: a dtype, or also types of quantised blocks."""
        kinds = [FP8_KIND] if self.fp8 else sorted(set(kept_quantised(self.model, panels=self.panels).values()))
        return " and ".join((*kinds, self.dtype)) if kinds else self.dtype

    @property
    def kv_dtype(self) -> str:
        """What the cache is kept in."""
        return FP8_CACHE if self.workspaces.fp8_cache else self.dtype

    @property
    def runtime(self) -> int:
        """Bytes of a device that are in no bucket, predicted."""
        return CPU_RUNTIME if self.device is None else gpu_runtime(self.devices)

    @property
    def not_served(self) -> tuple[str, ...]:
        """What this version of Octavo can plan but not serve."""
        if self.device is not None:
            return ()
        found = ["8-bit floats on a CPU"] if self.fp8 or self.workspaces.fp8_cache else []
        return (*found, *(["float16 on a CPU"] if self.dtype == "float16" else []))


@dataclass(frozen=True, slots=True)
class Forecast:
    """The answer to a question."""

    question: Question
    limits: Limits
    memory: MemoryPlan
    """Without blocks where nothing fits."""
    activations: dict[str, int]
    """The parts of that bucket."""
    shortfall: str = ""
    """Why it does not fit; empty where it does."""

    @property
    def fits(self) -> bool:
        """Whether everything that was asked for has its place."""
        return not self.shortfall

    def requests_of(self, length: int) -> int:
        """How many requests of so many tokens run at one time: slots and blocks permitting."""
        per_request = -(-length // self.limits.block_size)
        return min(self.limits.max_rows, self.memory.blocks // per_request)


def forecast(question: Question) -> Forecast:
    """Plan. ConfigurationError where options contradict each other, CheckpointError where heads cannot be divided."""
    engine, machine, formats = _engine(question), _machine(question), question.formats
    empty = plan_without_pool(engine, question.model, formats, machine)
    shortfall = ""
    try:
        plan = plan_engine(engine, question.model, formats, machine)
    except ConfigurationError as error:
        plan, shortfall = _as_far_as_it_goes(empty, str(error))
    parts = activation_lines(question.model, formats, runner_limits(plan.limits, plan.memory.blocks))
    answer = Forecast(question, plan.limits, plan.memory, parts, shortfall)
    return answer if shortfall else replace(answer, shortfall=_unmet(answer))


def _as_far_as_it_goes(empty: EnginePlan, problem: str) -> tuple[EnginePlan, str]:
    """The blocks that a budget has room for, though too few, and why they are."""
    memory, limits = empty.memory, empty.limits
    blocks = max(0, memory.budget - memory.fixed) // memory.block_bytes
    if blocks == 0:
        problem = f"weights and activations take {memory.fixed:,} B of a budget of {memory.budget:,} B"
    elif blocks * limits.block_size < limits.max_model_len:
        problem = (
            f"the KV cache holds {blocks * limits.block_size:,} tokens, below --max-model-len {limits.max_model_len}"
        )
    return EnginePlan(limits, replace(memory, blocks=blocks)), problem


def devices_needed(question: Question) -> tuple[int, int] | None:
    """Fewest devices for all users, as replicas of a tensor parallel degree: (replicas, degree). None: no number is."""
    users = question.users or 1
    best: tuple[int, int] | None = None
    for degree in degrees(question.model):
        alone = forecast(replace(question, devices=degree, users=1))
        if not alone.fits:
            continue
        replicas = -(-users // alone.requests_of(alone.question.context or alone.limits.max_model_len))
        if best is None or replicas * degree < best[0] * best[1]:
            best = replicas, degree
    return best


def degrees(model: ModelConfig) -> Iterator[int]:
    """Numbers of devices that a model can be divided among."""
    for count in range(1, MAX_DEVICES + 1):
        try:
            rank_shape(model, count)
        except CheckpointError:
            continue
        yield count


def changes(question: Question, most: int = 3) -> list[tuple[str, Forecast]]:
    """The cheapest changes that make it fit, and what each leads to: settings first, then precision, then hardware."""
    fitting = ((text, answer) for text, answer in _candidates(question) if answer.fits)
    return list(islice(fitting, most))


def _candidates(question: Question) -> Iterator[tuple[str, Forecast]]:
    """One change after another, each no larger than it has to be."""
    yield from _smaller_settings(question)
    yield from _larger_budgets(question)
    if question.dtype == "float32":
        yield _try(replace(question, dtype="bfloat16"), "--dtype bfloat16")
    if question.device is None:
        yield from _other_devices(question)
        return
    if not question.workspaces.fp8_cache:
        narrow = replace(question, workspaces=replace(question.workspaces, fp8_cache=True))
        yield _try(narrow, f"--kv-cache-dtype {FP8_CACHE}")
    if not question.fp8:
        yield _try(replace(question, fp8=True), "--quantization fp8")
    yield from _more_devices(question)
    yield from _other_devices(question)
    if not question.fp8:
        narrow = replace(question, fp8=True)
        yield from _more_devices(narrow, "--quantization fp8 ")
        yield from _other_devices(narrow, "--quantization fp8 ")
    for device in _larger(question):
        yield from _more_devices(replace(question, device=device), f"--device {device.name} ")


def _smaller_settings(question: Question) -> Iterator[tuple[str, Forecast]]:
    limits = plan_without_pool(_engine(question), question.model, question.formats, _machine(question)).limits
    yield from _first(
        _try(_with(question, max_num_batched_tokens=tokens), f"--max-num-batched-tokens {tokens}")
        for tokens in _halves(limits.max_tokens, max(limits.max_rows, 64))
    )
    if question.users is None:
        yield from _first(
            _try(_with(question, max_num_seqs=rows), f"--max-num-seqs {rows}") for rows in _halves(limits.max_rows, 1)
        )
    longest = question.context or question.engine.max_model_len
    if longest is not None:
        yield from _first(_shorter(question, length) for length in _halves(longest, 256))
    if question.users is not None:
        yield from _first(
            _try(replace(question, users=users), f"--users {users}") for users in _halves(question.users, 1)
        )


def _larger_budgets(question: Question) -> Iterator[tuple[str, Forecast]]:
    """Where a budget was given: the smallest that fits, and the smallest for requests of full length."""
    engine = question.engine
    if engine.memory is None and engine.gpu_memory_utilization is None:
        return
    asked = question.context or engine.max_model_len
    lengths = (asked,) if asked else (engine.block_size, question.model.max_context)
    needed = (engine.kv_blocks or (question.users or 1) * -(-length // engine.block_size) for length in lengths)
    instead = "" if engine.gpu_memory_utilization is None else " instead of --gpu-memory-utilization"
    capacity = _machine(question).capacity
    whole = _with(question, memory=capacity, gpu_memory_utilization=None)
    empty = plan_without_pool(_engine(whole), question.model, question.formats, _machine(question)).memory
    for blocks in dict.fromkeys(needed):
        budget = empty.fixed + blocks * empty.block_bytes
        if budget <= capacity:
            yield _try(_with(whole, memory=budget), f"--memory {budget}{instead}")


def _more_devices(question: Question, prefix: str = "") -> Iterator[tuple[str, Forecast]]:
    yield from _first(
        _try(replace(question, devices=count), f"{prefix}--devices {count}")
        for count in degrees(question.model)
        if count > question.devices
    )


def _other_devices(question: Question, prefix: str = "") -> Iterator[tuple[str, Forecast]]:
    yield from _first(
        _try(replace(question, device=device, panels=False), f"{prefix}--device {device.name}")
        for device in _larger(question)
    )


def _larger(question: Question) -> Iterator[Device]:
    least = question.device.memory if question.device else question.machine.capacity
    return (device for device in DEVICES.values() if device.memory > least)


def _first(tried: Iterator[tuple[str, Forecast]]) -> Iterator[tuple[str, Forecast]]:
    """The first of some changes of one kind that makes it fit."""
    return islice(((text, answer) for text, answer in tried if answer.fits), 1)


def _try(question: Question, text: str) -> tuple[str, Forecast]:
    return text, forecast(question)


def _shorter(question: Question, length: int) -> tuple[str, Forecast]:
    if question.context is not None:
        return _try(replace(_with(question, max_model_len=None), context=length), f"--context {length}")
    return _try(_with(question, max_model_len=length), f"--max-model-len {length}")


def _with(question: Question, **settings: int | None) -> Question:
    return replace(question, engine=msgspec.structs.replace(question.engine, **settings))


def _halves(value: int, least: int) -> Iterator[int]:
    while (value := value // 2) >= least:
        yield value


def _engine(question: Question) -> EngineConfig:
    """The engine's configuration with what users, context and device add to it."""
    engine = question.engine
    if question.context is not None and engine.max_model_len is None:
        engine = msgspec.structs.replace(engine, max_model_len=question.context)
    default_rows = 256 if question.device else 32
    if engine.max_num_seqs is None and (question.users or 0) > default_rows:
        engine = msgspec.structs.replace(engine, max_num_seqs=question.users)
    if (engine.memory, engine.gpu_memory_utilization, engine.kv_blocks) != (None, None, None):
        return engine
    if question.device is not None:
        return msgspec.structs.replace(engine, memory=max(1, question.device.memory - question.runtime))
    if question.users is not None and engine.max_model_len is not None:
        per_user = -(-(question.context or engine.max_model_len) // engine.block_size)
        return msgspec.structs.replace(engine, kv_blocks=question.users * per_user)
    return engine


def _machine(question: Question) -> Machine:
    if question.device is None:
        return replace(question.machine, capacity=question.machine.capacity // question.devices)
    return Machine(max(1, question.device.memory - question.runtime), question.machine.cores, on_gpu=True)


def _unmet(answer: Forecast) -> str:
    """What the users would miss."""
    question, limits = answer.question, answer.limits
    length = question.context or limits.max_model_len
    if length > limits.max_model_len:
        return f"--context {length} exceeds --max-model-len {limits.max_model_len}"
    users = question.users or 1
    if (room := answer.requests_of(length)) < users:
        return f"{users} requests of {length:,} tokens are asked for, and {room} fit at one time"
    return ""
