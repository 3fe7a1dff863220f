"""The messages between server and engine. Each is one frame of msgpack; nothing else crosses the boundary."""

from typing import Literal

import msgspec

from octavo.model.step import SamplingParams, TokenLogprobs

FinishReason = Literal["stop", "length", "abort", "error", "timeout"]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first frame an engine receives: what to load and how. None means: decide from model and machine."""

    model: str
    """A directory, a .gguf file, a Hub id or `smollm2`."""
    load_format: Literal["auto", "safetensors", "gguf", "random"] = "auto"
    dtype: Literal["auto", "bfloat16", "float32", "float16"] = "auto"
    quantization: Literal["auto", "fp8"] = "auto"
    """fp8 keeps the matrices of the blocks in 8-bit floats; auto keeps what the checkpoint has."""
    kv_cache_dtype: Literal["auto", "fp8_e4m3"] = "auto"
    """Type of K and V in the cache; auto is that of the activations."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    attention_prefill: Literal["fa2", "fa3"] = "fa2"
    attention_decode: Literal["fa2", "xqa"] = "fa2"
    enforce_eager: bool = False
    """Whether a GPU launches every kernel of a decode step instead of replaying a captured one."""
    tensor_parallel_size: int = 1
    """How many processes share the model."""
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int = 16
    kv_blocks: int | None = None
    """Size of the pool in blocks."""
    memory: int | None = None
    """Budget in bytes for all three buckets together."""
    gpu_memory_utilization: float | None = None
    """The same as a share of the memory that this process may use."""
    admission: Literal["optimistic", "reserve"] = "optimistic"
    """Whether a request starts once its prompt fits, or once all that it may become does."""
    prefix_caching: bool = True
    seed: int = 0
    """Seed of random weights."""
    log_level: str = "info"
    log_format: Literal["text", "json"] = "text"
    fault: tuple[str, ...] = ()
    """Faults to inject, as `scheduler/faults.py` reads them."""


class Submission(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A request enters the engine: one prompt, one choice."""

    request: int = 0
    """Made by `EngineClient.submit`, unique for the server's lifetime; 0 before."""
    prompt: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    """0 computes the prompt (for its log-probabilities) and generates nothing."""
    salt: bytes = b""
    """Requests share cached prefixes only with requests of the same salt."""
    priority: int = 0
    """Lower ones go first; among equals, the earlier."""
    grammar: str | None = None
    """What the output must follow, in the form that `scheduler/grammar.py` compiles. Needs a Vocabulary."""
    emitted: tuple[int, ...] = ()
    """Output that an earlier engine has generated: the request goes on behind it."""
    scored: int = 0
    """Prompt log-probabilities that an earlier engine has reported."""
    announced: bool = False
    """Whether an earlier engine has sent the event with `first` set."""
    paused: bool = False
    """Whether it begins as after a Pause."""


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What tokens say, for requests that follow a grammar: the only text an engine ever knows. Sent once."""

    tokens: tuple[bytes, ...]
    """The bytes of each token, as many as the logits are wide; empty where a token stands for nothing."""
    special: tuple[int, ...]
    """Tokens that no text of a grammar matches."""
    eos_ids: tuple[int, ...]
    """Tokens that may come where a grammar may end. Of a model that has none, no grammar can be followed."""


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End a request now. Unknown or finished requests are ignored. The reason comes back in its last event."""

    request: int
    reason: FinishReason = "abort"
    unbegun: bool = False
    """Only if no step has been given to it yet."""


class Pause(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Compute no more of a request, whose client has enough to read, or go on. Unknown requests are ignored."""

    request: int
    paused: bool


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """End the engine process. Live requests are dropped."""


class TokenEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something happened to a request: a token, its end, or both at once."""

    request: int
    token: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """New entries for prompt positions, in order; each position is reported once. Position 0 has none."""
    finish: FinishReason | None = None
    """Set in the last event of a request, and only there."""
    stop_id: int | None = None
    """The stop token id that ended the request; None for an EOS or any other end."""
    error: str | None = None
    """With finish "error": one line for the log and the client."""
    grammar: bool = False
    """With finish "error": whether the grammar of the request is why."""
    first: bool = False
    """Set in the first event that follows the request's admission."""
    queue_seconds: float = 0.0
    """In the first event: time between arrival in the engine and admission."""
    cached_tokens: int = 0
    """In the first event: prompt tokens whose K and V were found in the cache."""


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """State of the engine after a step. Fields ending in _total only grow."""

    running: int = 0
    waiting: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0
    blocks_referenced: int = 0
    blocks_peak: int = 0
    """The most blocks that were referenced at one time."""
    activations_used: int = 0
    """Bytes that the last step made use of."""
    activations_peak: int = 0
    """The same of the step that used most."""
    step_tokens: int = 0
    step_rows: int = 0
    step_decode_tokens: int = 0
    """Those of step_tokens that are alone in their row."""
    steps_total: int = 0
    failed_steps_total: int = 0
    """Steps that the runner could not compute; their requests were tried again."""
    preemptions_total: int = 0
    prefix_queries_total: int = 0
    """Prompt tokens looked up in the prefix index."""
    prefix_hits_total: int = 0
    """Prompt tokens found there."""
    schedule_seconds: float = 0.0
    device_seconds: float = 0.0
    commit_seconds: float = 0.0


class StepReport(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One frame per committed step (or per abort without a step)."""

    events: tuple[TokenEvent, ...]
    stats: EngineStats


class MemoryLine(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the plan, in bytes: one line for each bucket of a device, one for the process beside them."""

    bucket: str
    """weights, cache or activations; runtime (all else that the engine holds) or host (the server's process)."""
    planned: int
    allocated: int
    used: int = 0
    peak: int = 0
    """The most that was used at one time."""


class Loading(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine is still loading its model."""

    phase: str
    progress: float
    """Share of the weights that are loaded, 0 .. 1."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine has loaded its model and waits for requests."""

    architecture: str
    parameters: int
    vocabulary: int
    """Width of the logits: every token id a client sends must be below it."""
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    blocks: int
    kv_bytes_per_token: int
    eos_ids: tuple[int, ...]
    device: str
    dtype: str
    quantised: tuple[str, ...] = ()
    """Types of the weights that stay in their quantised blocks."""
    weights_digest: str
    """SHA-256 of the weights as they were read, in hexadecimal."""
    kernels: str
    """Name of the code path, for example "avx512_bf16"."""
    tensor_parallel_size: int = 1
    process: int
    """Its number, by which the server looks up what it holds."""
    memory: tuple[MemoryLine, ...]
    """As planned and allocated. Of runtime and host only the plan is known here."""
    memory_budget: int
    batch_invariant: bool
    batch_invariance_reason: str
    load_seconds: float


class Fatal(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine cannot start or cannot go on; it exits after this frame."""

    message: str
    exit_code: int


ToEngine = EngineConfig | Vocabulary | Submission | Abort | Pause | Shutdown
FromEngine = Loading | Ready | StepReport | Fatal
