"""The commands that answer and end: `octavo plan` and `octavo describe`. They yield lines; the command line prints."""

import argparse
import json
import os
from collections.abc import Iterator

from octavo.model.kernels import FP8_KIND
from octavo.model.kernels.build import can_build_library
from octavo.model.kernels.cores import available_cores
from octavo.model.roofline import DEVICES, Device
from octavo.model.weights.lookup import find_config
from octavo.model.weights.published import PUBLISHED
from octavo.model.workspaces import Workspaces
from octavo.scheduler.planning import Machine
from octavo.scheduler.sizing import memory_capacity
from octavo.server import plan_report
from octavo.server.describing import describe, describe_trace
from octavo.server.flags import add_arguments, resolve
from octavo.server.planning import DTYPE_BYTES, FP8_CACHE, MAX_DEVICES, Question, forecast
from octavo.server.values import OptionError, count, option, size

PLANNED_SETTINGS = frozenset(
    {
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "quantization",
        "kv_cache_dtype",
        "block_size",
        "kv_blocks",
        "memory",
        "gpu_memory_utilization",
    }
)
MODEL_HELP = (
    f"A directory, a config.json, a .gguf file, a Hub id in the cache, or one of {', '.join(PUBLISHED)}. "
    "Default: what `octavo serve` would serve."
)
PLAN_HELP = """\
Say what a model takes in memory before anything is loaded: weights, KV cache and activations, to the byte.
A server started with the same options allocates exactly this; its start-up table and /metrics show the same numbers.

  octavo plan llama-3-70b --device h200
  octavo plan llama-3-8b --device 24GiB --users 16 --context 8k
  octavo plan path/to/model                        this machine's CPU, as `octavo serve` would start on it
"""
PLAN_EXIT_CODES = """\
exit codes:
   0  it fits
   1  it does not fit; the cheapest changes that make it fit are listed
  64  an option is wrong
  65  the model is unknown, its shapes are wrong, or they cannot be divided among the devices
"""
DESCRIBE_HELP = """\
Draw one block of a model as a table: what each matrix receives, what it produces, and its share of the parameters.
With --trace the weights are loaded and a text is run through them, to show what each branch adds to the spine.
"""
DESCRIBE_EXIT_CODES = """\
exit codes:
   0  it is described
  64  an option is wrong, or the text has no tokens or too many
  65  the model is unknown, its shapes are wrong, or its files are missing or damaged
"""


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `octavo plan`; those of the server have the server's names, meanings and variables."""
    parser.add_argument("model", metavar="MODEL", nargs="?", help=f"{MODEL_HELP} Weights are not read.")
    devices, users, context = (option(count(1, most)) for most in (MAX_DEVICES, 4096, 1 << 27))
    known = f"{', '.join(DEVICES)}, or bytes such as 24GiB"
    parser.add_argument(
        "--device", metavar="DEVICE", type=option(_device), help=f"{known}. Default: this machine's CPU."
    )
    parser.add_argument(
        "--devices", metavar="N", type=devices, default=1, help="Ranks that divide the model. Default: 1."
    )
    numbers = ("auto", "bfloat16", "float32", "float16")
    parser.add_argument("--dtype", choices=numbers, help="Type of weights and activations. Default: as served.")
    parser.add_argument(
        "--users", metavar="N", type=users, help="Requests that have to fit at one time, each of --context tokens."
    )
    parser.add_argument(
        "--context", metavar="TOKENS", type=context, help="Length of each of them. Default: --max-model-len."
    )
    parser.add_argument("--json", action="store_true", help="Print one JSON object instead of text.")
    add_arguments(parser, PLANNED_SETTINGS)


def add_describe_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `octavo describe`."""
    parser.add_argument("model", metavar="MODEL", nargs="?", help=MODEL_HELP)
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="Type of numbers. Default: bfloat16."
    )
    parser.add_argument("--trace", metavar="TEXT", help="Load the weights and run this text through them.")


def plan(parsed: argparse.Namespace) -> tuple[int, Iterator[str]]:
    """Return the exit code and the lines of `octavo plan`. Every error it raises has an exit code."""
    answer = forecast(_question(parsed))
    lines = iter([json.dumps(plan_report.facts(answer), indent=2)]) if parsed.json else plan_report.text(answer)
    return 0 if answer.fits else 1, lines


def describe_model(parsed: argparse.Namespace) -> tuple[int, Iterator[str]]:
    """Return the exit code and the lines of `octavo describe`. Every error they raise has an exit code."""
    model = resolve({"model": parsed.model}, os.environ).engine.model
    if parsed.trace is None:
        return 0, describe(find_config(model), DTYPE_BYTES[parsed.dtype])
    return 0, _trace(model, parsed.dtype, parsed.trace)


def _trace(model: str, dtype_name: str, text: str) -> Iterator[str]:
    # Imported here only: nothing else in these two commands needs torch or a tokenizer.
    from octavo.model.placement import place_on_cpu  # noqa: PLC0415
    from octavo.model.trace import trace  # noqa: PLC0415
    from octavo.model.weights.checkpoint import open_checkpoint  # noqa: PLC0415
    from octavo.model.weights.locate import locate  # noqa: PLC0415
    from octavo.scheduler.loading import choose_dtype  # noqa: PLC0415
    from octavo.server.tokenizer_files import load_tokenizer  # noqa: PLC0415

    path = locate(model)
    checkpoint = open_checkpoint(path, widen=True)
    tokens = tuple(load_tokenizer(path).encode(text))
    if not 1 <= len(tokens) <= checkpoint.config.max_context:
        raise OptionError(f"--trace: {len(tokens)} tokens; the model takes 1 to {checkpoint.config.max_context}")
    dtype = choose_dtype(dtype_name)
    placement = place_on_cpu(dtype, Workspaces(), 1, 1, fp8=False)
    found = trace(checkpoint, placement, tokens, lambda _done, _total: None)
    yield from describe(checkpoint.config, dtype.itemsize)
    yield ""
    yield from describe_trace(found, len(tokens))


def _question(parsed: argparse.Namespace) -> Question:
    """What the options ask. Raises OptionError or CheckpointError."""
    given = {name: getattr(parsed, name) for name in ("model", *PLANNED_SETTINGS)}
    engine = resolve(given, os.environ).engine
    model = find_config(engine.model)
    dtype = parsed.dtype or engine.dtype
    if dtype != "auto" or parsed.devices > 1:  # quantised blocks are not divided
        model = model.widened()
    if dtype == "auto":
        dtype = "bfloat16"
    return Question(
        model=model,
        engine=engine,
        machine=Machine(memory_capacity(), available_cores()),
        device=parsed.device,
        devices=parsed.devices,
        dtype=dtype,
        fp8=engine.quantization == FP8_KIND or (model.stored_fp8 and parsed.device is not None),
        workspaces=Workspaces(fp8_cache=engine.kv_cache_dtype == FP8_CACHE),
        panels=parsed.device is None and os.environ.get("OCTAVO_KERNELS") != "torch" and can_build_library(),
        users=parsed.users,
        context=parsed.context,
    )


def _device(given: str) -> Device:
    if given in DEVICES:
        return DEVICES[given]
    try:
        return Device(given, size(given))
    except ValueError:
        raise ValueError(f"give one of {', '.join(DEVICES)}, or bytes such as 24GiB") from None
