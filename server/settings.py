"""The settings: from their rows come flags, environment variables, defaults, help and checks (`flags.py`)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec

from octavo.scheduler.messages import EngineConfig
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

ENVIRONMENT_PREFIX = "OCTAVO_"
FOREIGN_VARIABLES = frozenset({"OCTAVO_KERNELS", "OCTAVO_CACHE_DIR", "OCTAVO_POISON", "OCTAVO_STRICT"})
"""Read by the kernels themselves, when they are compiled at first use; the last two by the engine, under test."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting. `name` is the field it fills; flag and variable follow from it."""

    name: str
    group: str
    parse: Callable[[str], Any]
    default: Any
    help: str
    metavar: str = ""
    choices: tuple[str, ...] = ()
    """The only words it accepts; empty: whatever `parse` does."""
    repeatable: bool = False
    secret: bool = False
    """Never logged."""

    @property
    def flag(self) -> str:
        """How it is given on the command line."""
        return "MODEL" if self.name == "model" else "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """How it is given in the environment."""
        return ENVIRONMENT_PREFIX + self.name.upper()

    @property
    def negated(self) -> str:
        """The variable that turns a yes-or-no setting off; empty for others."""
        return ENVIRONMENT_PREFIX + "NO_" + self.name.upper() if self.parse is boolean else ""

    def read(self, text: str) -> Any:
        """Parse a value. Raises ValueError."""
        value = self.parse(text)
        if self.choices and value not in self.choices:
            raise ValueError(f"give one of {', '.join(self.choices)}")
        return value


HTTP, MODEL, ENGINE, MEMORY = "HTTP", "Model", "Engine", "Memory"
ROW = "row"
"""Where a field of ServerSettings keeps its row."""


def _row(group: str, parse: Callable[[str], Any], default: Any, help: str, metavar: str = "", **more: Any) -> Any:
    """A field of ServerSettings, with the row that fills it."""
    return field(metadata={ROW: Setting("", group, parse, default, help, metavar, **more)})


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What the server's process needs to know."""

    max_tokens_policy: str = _row(
        MODEL,
        word,
        "auto",
        "What becomes of a max_tokens that the context has no room for: it is an upper bound (clamp), or refused "
        "(strict). auto clamps chats and refuses completions.",
        choices=("auto", "strict", "clamp"),
    )
    use_model_sampling_defaults: bool = _row(
        MODEL, boolean, False, "Sample as the model's generation_config.json says where a request does not."
    )
    chat_template: Path | None = _row(
        MODEL, existing_file, None, "A Jinja file to use instead of the model's own.", "FILE"
    )
    tool_call_parser: str = _row(
        MODEL,
        word,
        "auto",
        "How the model writes calls of tools. auto reads it off the chat template.",
        choices=("auto", "hermes", "llama3_json", "mistral"),
    )
    host: str = _row(HTTP, word, "127.0.0.1", "Address to listen on. 0.0.0.0 serves the whole network.", "ADDRESS")
    port: int = _row(HTTP, port, 8000, "Port to listen on; 0 lets the system choose.", "PORT")
    served_model_name: tuple[str, ...] = _row(
        HTTP,
        word,
        (),
        "Name that clients ask for; repeat it for aliases (in the variable, separate by commas). Default: MODEL.",
        "NAME",
        repeatable=True,
    )
    max_body_bytes: int = _row(HTTP, size, 4 << 20, "Largest request body.", "SIZE")
    max_queued_requests: int = _row(
        HTTP, count(0), 1024, "Requests that may wait beyond those that run; more are answered with 429.", "N"
    )
    max_queued_tokens: int = _row(
        HTTP,
        count(1),
        1 << 20,
        "Prompt tokens that may wait; more are answered with 429, unless nothing else waits.",
        "TOKENS",
    )
    api_key: tuple[str, ...] = _row(
        HTTP,
        word,
        (),
        "Key that clients must send, on every route but /health; repeat it for several. A file shows it to fewer.",
        "KEY",
        repeatable=True,
        secret=True,
    )
    api_key_file: tuple[str, ...] = _row(
        HTTP, keys_of, (), "More keys, one a line; read once at start.", "FILE", secret=True
    )
    metrics_open: bool = _row(HTTP, boolean, False, "Serve /metrics to whoever asks, without a key.")
    metrics_key: str | None = _row(HTTP, word, None, "A further key, for /metrics alone.", "KEY", secret=True)
    cors_origin: tuple[str, ...] = _row(
        HTTP,
        origin,
        (),
        "Web page that may call the server from a browser, such as https://example.org, or *; repeat it for several.",
        "ORIGIN",
        repeatable=True,
    )
    page: bool = _row(HTTP, boolean, True, "Show a live page at /.")
    shutdown_timeout: float = _row(
        HTTP,
        seconds,
        30.0,
        "How long running requests may go on after SIGTERM or Ctrl-C. A second signal ends them at once.",
        "SECONDS",
    )
    ssl_certfile: Path | None = _row(HTTP, existing_file, None, "Serve HTTPS with this certificate chain.", "FILE")
    ssl_keyfile: Path | None = _row(HTTP, existing_file, None, "The private key of that certificate.", "FILE")
    stall_timeout: float = _row(HTTP, seconds, 300.0, "Replace an engine that finishes no step for so long.", "SECONDS")
    queue_timeout: float = _row(HTTP, seconds, 300.0, "Longest wait for a request's first step; 0: any.", "SECONDS")
    request_timeout: float = _row(HTTP, seconds, 3600.0, "Longest life of a request; 0: any.", "SECONDS")
    receive_timeout: float = _row(HTTP, seconds, 30.0, "Longest time for a request's head, and its body.", "SECONDS")
    send_timeout: float = _row(HTTP, seconds, 30.0, "How long a client may not read what it is sent.", "SECONDS")
    max_connections: int = _row(HTTP, count(1, 1 << 20), 2048, "Connections open at a time; more get 503.", "N")
    log_level: str = _row(
        HTTP, word, "info", "Least severe messages to log.", choices=("debug", "info", "warning", "error")
    )
    log_format: str = _row(HTTP, word, "text", "Lines for people, or a JSON object each.", choices=("text", "json"))
    otlp_traces_endpoint: str | None = _row(
        HTTP,
        url,
        None,
        "Send OpenTelemetry traces of requests there, with OTLP over HTTP. Needs the extra otel.",
        "URL",
    )


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings, resolved once."""

    server: ServerSettings
    engine: EngineConfig
    changed: Mapping[str, str] = field(default_factory=dict)
    """Settings that were given, by flag name, as they were written."""


_ENGINE_FIELDS = {found.name: found for found in msgspec.structs.fields(EngineConfig)}


def _engine(
    name: str,
    group: str,
    help: str,
    parse: Callable[[str], Any] = word,
    metavar: str = "",
    **more: Any,
) -> Setting:
    """The row of a field of EngineConfig, which says its default, and its words if only some are possible."""
    found = _ENGINE_FIELDS[name]
    choices = get_args(found.type) if get_origin(found.type) is Literal else ()
    return Setting(name, group, parse, found.default, help, metavar, choices, **more)


SETTINGS: tuple[Setting, ...] = (
    Setting("model", MODEL, word, "smollm2", "A Hugging Face directory, a .gguf file, a Hub id, or smollm2.", "MODEL"),
    *(replace(found.metadata[ROW], name=found.name) for found in fields(ServerSettings)),
    _engine(
        "load_format",
        MODEL,
        "What the weights are read from; random makes numbers up, for measurements without a download.",
    ),
    _engine(
        "dtype",
        MODEL,
        "Type of weights, activations and cache. auto is bfloat16, and keeps quantised weights in their blocks; "
        "otherwise they are widened.",
    ),
    _engine("quantization", MODEL, "fp8 rounds the blocks' matrices to 8 bits (GPU)."),
    _engine("kv_cache_dtype", MODEL, "fp8_e4m3 keeps K and V in 8 bits (GPU)."),
    _engine(
        "max_model_len",
        MODEL,
        "Longest request, prompt and output together, in tokens (8k is 8192). Default: what the model was trained for, "
        "or less where the cache is smaller.",
        count(1),
        "TOKENS",
    ),
    _engine("seed", MODEL, "Seed of --load-format random.", count(0), "N"),
    _engine("device", ENGINE, "What computes. auto takes a GPU if this version can use one."),
    _engine(
        "tensor_parallel_size", ENGINE, "Ranks that divide the model, a process and a GPU each.", count(1, 64), "N"
    ),
    _engine("attention_prefill", ENGINE, "FlashInfer's path for prompts (GPU)."),
    _engine("attention_decode", ENGINE, "FlashInfer's path for decodes (GPU)."),
    _engine("enforce_eager", ENGINE, "Capture no decode steps on a GPU; slower, for finding faults.", boolean),
    _engine(
        "max_num_seqs", ENGINE, "Requests computed at a time. Default: 32 on a CPU, 256 on a GPU.", count(1, 4096), "N"
    ),
    _engine(
        "max_num_batched_tokens",
        ENGINE,
        "Tokens computed in one step. More speeds long prompts up and makes others wait longer. "
        "Default: 512 on a CPU, but on up to 4 cores 160 where some request generates; 2048 on a GPU.",
        count(1, 1 << 20),
        "N",
    ),
    _engine("prefix_caching", ENGINE, "Reuse the KV of prompts that begin alike, within one cache_salt.", boolean),
    Setting("enable_faults", ENGINE, boolean, False, "Allow --fault. For tests only."),
    _engine("fault", ENGINE, "What to break: step-raises:token=77, ...", fault, "FAULT", repeatable=True),
    _engine("block_size", MEMORY, "Tokens in a block of the KV cache.", count(1, 256), "TOKENS"),
    _engine(
        "kv_blocks",
        MEMORY,
        "Blocks in the KV cache. Default: two requests of full length on a CPU, in half of the budget at most.",
        count(1),
        "N",
    ),
    _engine(
        "memory",
        MEMORY,
        "Budget for weights, activations and cache together (16GiB); the cache takes what the others leave.",
        size,
        "SIZE",
    ),
    _engine(
        "gpu_memory_utilization",
        MEMORY,
        "The same as a share of the device's memory; on a CPU, of the RAM that this process may use.",
        share,
        "SHARE",
    ),
    _engine(
        "admission",
        MEMORY,
        "When a request starts: once its prompt fits, at the risk that the youngest is put back when blocks run out, "
        "or once blocks for all of its max_tokens are reserved.",
    ),
)
