"""The settings: one table, from which come flags, environment variables, defaults, help and checks (`flags.py`)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from octavo.scheduler.messages import EngineConfig
from octavo.server.setting import Setting
from octavo.server.values import (
    boolean,
    count,
    existing_file,
    fault,
    keys_of,
    origin,
    port,
    seconds,
    share,
    size,
    url,
    word,
)

FOREIGN_VARIABLES = frozenset({"OCTAVO_KERNELS", "OCTAVO_CACHE_DIR", "OCTAVO_POISON", "OCTAVO_STRICT"})
"""Read by the kernels themselves, when they are compiled at first use; the last two by the engine, under test."""


class SettingsError(ValueError):
    """A setting cannot be understood or does not exist. The text names the flag or variable."""

    exit_code = 64


HTTP, MODEL, ENGINE, MEMORY = "HTTP", "Model", "Engine", "Memory"

SETTINGS = (
    Setting("model", MODEL, word, "smollm2", "A Hugging Face directory, a .gguf file, a Hub id, or smollm2.", "MODEL"),
    Setting(
        "load_format",
        MODEL,
        word,
        "auto",
        "What the weights are read from; random makes numbers up, for measurements without a download.",
        choices=("auto", "safetensors", "gguf", "random"),
    ),
    Setting(
        "dtype",
        MODEL,
        word,
        "auto",
        "Type of weights, activations and cache. auto is bfloat16, and keeps quantised weights in their blocks; "
        "otherwise they are widened.",
        choices=("auto", "bfloat16", "float32", "float16"),
    ),
    Setting(
        "quantization", MODEL, word, "auto", "fp8 rounds the blocks' matrices to 8 bits (GPU).", choices=("auto", "fp8")
    ),
    Setting(
        "kv_cache_dtype", MODEL, word, "auto", "fp8_e4m3 keeps K and V in 8 bits (GPU).", choices=("auto", "fp8_e4m3")
    ),
    Setting(
        "max_model_len",
        MODEL,
        count(1),
        None,
        "Longest request, prompt and output together, in tokens (8k is 8192). Default: what the model was trained for, "
        "or less where the cache is smaller.",
        "TOKENS",
    ),
    Setting(
        "max_tokens_policy",
        MODEL,
        word,
        "auto",
        "What becomes of a max_tokens that the context has no room for: it is an upper bound (clamp), or refused "
        "(strict). auto clamps chats and refuses completions.",
        choices=("auto", "strict", "clamp"),
    ),
    Setting(
        "use_model_sampling_defaults",
        MODEL,
        boolean,
        False,
        "Sample as the model's generation_config.json says where a request does not.",
    ),
    Setting("chat_template", MODEL, existing_file, None, "A Jinja file to use instead of the model's own.", "FILE"),
    Setting(
        "tool_call_parser",
        MODEL,
        word,
        "auto",
        "How the model writes calls of tools. auto reads it off the chat template.",
        choices=("auto", "hermes", "llama3_json", "mistral"),
    ),
    Setting("seed", MODEL, count(0), 0, "Seed of --load-format random.", "N"),
    Setting("host", HTTP, word, "127.0.0.1", "Address to listen on. 0.0.0.0 serves the whole network.", "ADDRESS"),
    Setting("port", HTTP, port, 8000, "Port to listen on; 0 lets the system choose.", "PORT"),
    Setting(
        "served_model_name",
        HTTP,
        word,
        (),
        "Name that clients ask for; repeat it for aliases (in the variable, separate by commas). Default: MODEL.",
        "NAME",
        repeatable=True,
    ),
    Setting("max_body_bytes", HTTP, size, 4 << 20, "Largest request body.", "SIZE"),
    Setting(
        "max_queued_requests",
        HTTP,
        count(0),
        1024,
        "Requests that may wait beyond those that run; more are answered with 429.",
        "N",
    ),
    Setting(
        "max_queued_tokens",
        HTTP,
        count(1),
        1 << 20,
        "Prompt tokens that may wait; more are answered with 429, unless nothing else waits.",
        "TOKENS",
    ),
    Setting(
        "api_key",
        HTTP,
        word,
        (),
        "Key that clients must send, on every route but /health; repeat it for several. A file shows it to fewer.",
        "KEY",
        repeatable=True,
        secret=True,
    ),
    Setting("api_key_file", HTTP, keys_of, (), "More keys, one a line; read once at start.", "FILE", secret=True),
    Setting("metrics_open", HTTP, boolean, False, "Serve /metrics to whoever asks, without a key."),
    Setting("metrics_key", HTTP, word, None, "A further key, for /metrics alone.", "KEY", secret=True),
    Setting(
        "cors_origin",
        HTTP,
        origin,
        (),
        "Web page that may call the server from a browser, such as https://example.org, or *; repeat it for several.",
        "ORIGIN",
        repeatable=True,
    ),
    Setting("page", HTTP, boolean, True, "Show a live page at /."),
    Setting(
        "shutdown_timeout",
        HTTP,
        seconds,
        30.0,
        "How long running requests may go on after SIGTERM or Ctrl-C. A second signal ends them at once.",
        "SECONDS",
    ),
    Setting("ssl_certfile", HTTP, existing_file, None, "Serve HTTPS with this certificate chain.", "FILE"),
    Setting("ssl_keyfile", HTTP, existing_file, None, "The private key of that certificate.", "FILE"),
    Setting("stall_timeout", HTTP, seconds, 300.0, "Replace an engine that finishes no step for so long.", "SECONDS"),
    Setting("queue_timeout", HTTP, seconds, 300.0, "Longest wait for a request's first step; 0: any.", "SECONDS"),
    Setting("request_timeout", HTTP, seconds, 3600.0, "Longest life of a request; 0: any.", "SECONDS"),
    Setting("receive_timeout", HTTP, seconds, 30.0, "Longest time for a request's head, and its body.", "SECONDS"),
    Setting("send_timeout", HTTP, seconds, 30.0, "How long a client may not read what it is sent.", "SECONDS"),
    Setting("max_connections", HTTP, count(1, 1 << 20), 2048, "Connections open at a time; more get 503.", "N"),
    Setting(
        "log_level", HTTP, word, "info", "Least severe messages to log.", choices=("debug", "info", "warning", "error")
    ),
    Setting("log_format", HTTP, word, "text", "Lines for people, or a JSON object each.", choices=("text", "json")),
    Setting(
        "otlp_traces_endpoint",
        HTTP,
        url,
        None,
        "Send OpenTelemetry traces of requests there, with OTLP over HTTP. Needs the extra otel.",
        "URL",
    ),
    Setting(
        "device",
        ENGINE,
        word,
        "auto",
        "What computes. auto takes a GPU if this version can use one.",
        choices=("auto", "cpu", "cuda"),
    ),
    Setting(
        "tensor_parallel_size", ENGINE, count(1, 64), 1, "Ranks that divide the model, a process and a GPU each.", "N"
    ),
    Setting("attention_prefill", ENGINE, word, "fa2", "FlashInfer's path for prompts (GPU).", choices=("fa2", "fa3")),
    Setting("attention_decode", ENGINE, word, "fa2", "FlashInfer's path for decodes (GPU).", choices=("fa2", "xqa")),
    Setting("enforce_eager", ENGINE, boolean, False, "Capture no decode steps on a GPU; slower, for finding faults."),
    Setting(
        "max_num_seqs",
        ENGINE,
        count(1, 4096),
        None,
        "Requests computed at a time. Default: 32 on a CPU, 256 on a GPU.",
        "N",
    ),
    Setting(
        "max_num_batched_tokens",
        ENGINE,
        count(1, 1 << 20),
        None,
        "Tokens computed in one step. More speeds long prompts up and makes others wait longer. "
        "Default: 512 on a CPU, but on up to 4 cores 160 where some request generates; 2048 on a GPU.",
        "N",
    ),
    Setting(
        "prefix_caching", ENGINE, boolean, True, "Reuse the KV of prompts that begin alike, within one cache_salt."
    ),
    Setting("enable_faults", ENGINE, boolean, False, "Allow --fault. For tests only."),
    Setting("fault", ENGINE, fault, (), "What to break: step-raises:token=77, ...", "FAULT", repeatable=True),
    Setting("block_size", MEMORY, count(1, 256), 16, "Tokens in a block of the KV cache.", "TOKENS"),
    Setting(
        "kv_blocks",
        MEMORY,
        count(1),
        None,
        "Blocks in the KV cache. Default: two requests of full length on a CPU, in half of the budget at most.",
        "N",
    ),
    Setting(
        "memory",
        MEMORY,
        size,
        None,
        "Budget for weights, activations and cache together (16GiB); the cache takes what the others leave.",
        "SIZE",
    ),
    Setting(
        "gpu_memory_utilization",
        MEMORY,
        share,
        None,
        "The same as a share of the device's memory; on a CPU, of the RAM that this process may use.",
        "SHARE",
    ),
    Setting(
        "admission",
        MEMORY,
        word,
        "optimistic",
        "When a request starts: once its prompt fits, at the risk that the youngest is put back when blocks run out, "
        "or once blocks for all of its max_tokens are reserved.",
        choices=("optimistic", "reserve"),
    ),
)


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What the server's process needs to know."""

    host: str
    port: int
    served_model_name: tuple[str, ...]
    max_tokens_policy: str
    use_model_sampling_defaults: bool
    chat_template: Path | None
    tool_call_parser: str
    max_body_bytes: int
    max_queued_requests: int
    max_queued_tokens: int
    api_key: tuple[str, ...]
    api_key_file: tuple[str, ...]
    metrics_open: bool
    metrics_key: str | None
    cors_origin: tuple[str, ...]
    page: bool
    shutdown_timeout: float
    stall_timeout: float
    ssl_certfile: Path | None
    ssl_keyfile: Path | None
    queue_timeout: float
    request_timeout: float
    receive_timeout: float
    send_timeout: float
    max_connections: int
    log_level: str
    log_format: str
    otlp_traces_endpoint: str | None


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings, resolved once."""

    server: ServerSettings
    engine: EngineConfig
    changed: Mapping[str, str] = field(default_factory=dict)
    """Settings that were given, by flag name, as they were written."""
