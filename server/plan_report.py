"""The answer of `octavo plan` as text for people and as JSON for programs."""

from collections.abc import Iterator
from typing import Any

from octavo.model.roofline import decode_seconds, prefill_rate
from octavo.scheduler.planning import HOST
from octavo.server.planning import Forecast, changes, devices_needed

BATCHES = (1, 8, 32, 64)
LENGTHS = (1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)
DECODE_CONTEXT = 1024
"""Tokens behind each request in the bounds of a decode step, unless told otherwise."""
_GIB = 1 << 30

Facts = dict[str, Any]


def facts(answer: Forecast) -> Facts:
    """Everything the text says, under stable names. Sizes are bytes of one device."""
    question, limits, memory = answer.question, answer.limits, answer.memory
    found: Facts = {
        "fits": answer.fits,
        "shortfall": answer.shortfall,
        "device": question.device.name if question.device else "cpu",
        "devices": question.devices,
        "dtype": question.dtype,
        "weights_in": question.weights,
        "kv_cache_dtype": question.kv_dtype,
        "predicted": question.device is not None,
        **_sizes(answer),
        "cache": memory.cache,
        "activation_parts": dict(answer.activations),
        "runtime": question.runtime,
        "host": HOST,
        "block_bytes": memory.block_bytes,
        "kv_bytes_per_token": memory.block_bytes // limits.block_size,
        "max_model_len": limits.max_model_len,
        "max_num_seqs": limits.max_rows,
        "max_num_batched_tokens": limits.max_tokens,
        "block_size": limits.block_size,
        "requests": {str(length): answer.requests_of(length) for length in _lengths(answer)},
        "bounds": _bounds(answer),
    }
    if question.users is not None:
        needed = devices_needed(question)
        found["devices_needed"] = needed and {"total": needed[0] * needed[1], "replicas": needed[0], "each": needed[1]}
    if not answer.fits:
        found["changes"] = [{"change": text, **_sizes(new)} for text, new in changes(question)]
    return found


def _sizes(answer: Forecast) -> Facts:
    """What is said of the plan, and of each change that makes it fit."""
    memory = answer.memory
    return {
        "not_served": list(answer.question.not_served),
        "budget": memory.budget,
        "weights": memory.weights,
        "activations": memory.activations,
        "total": memory.total,
        "blocks": memory.blocks,
        "tokens": memory.blocks * answer.limits.block_size,
    }


def text(answer: Forecast) -> Iterator[str]:
    """Lines for a terminal."""
    question, limits, found = answer.question, answer.limits, facts(answer)
    where = question.device.name if question.device else "this machine's CPU"
    yield f"{question.devices} x {where}, weights {question.weights}, KV cache {question.kv_dtype}" + (
        "; bytes of each device" if question.devices > 1 else ""
    )
    if question.not_served:
        yield f"not served by this version: {', '.join(question.not_served)}; the sizes are predicted"
    elif question.device is not None:
        yield "predicted: this version was never measured on a GPU"
    yield ""
    yield _size("weights", found["weights"], "matrices and norms")
    yield _size("cache", found["cache"], f"{found['blocks']:,} blocks of {found['block_bytes']:,} B")
    yield _size("activations", found["activations"], "")
    for name, size in found["activation_parts"].items():
        yield _size("  " + name, size, "predicted" if name == "workspaces" else "")
    yield _size("total", found["total"], f"of a budget of {found['budget']:,} B")
    libraries = "CUDA context and libraries" if question.device else "interpreter and libraries of the engine"
    yield _size("runtime", found["runtime"], f"predicted: {libraries}, beside the budget")
    yield _size("host", found["host"], "predicted: the process that answers HTTP, in RAM")
    yield ""
    yield (
        f"KV cache   {found['tokens']:,} tokens in {found['blocks']:,} blocks of {limits.block_size}; "
        f"{found['kv_bytes_per_token']:,} B a token"
    )
    yield (
        f"limits     --max-model-len {limits.max_model_len}  --max-num-seqs {limits.max_rows}  "
        f"--max-num-batched-tokens {limits.max_tokens}"
    )
    wanted = question.context or question.engine.max_model_len or question.model.max_context
    if limits.max_model_len < wanted:
        yield f"           --max-model-len is lowered from {wanted} to what the KV cache holds"
    at_once = (f"{count} of {int(length):,} tokens" for length, count in found["requests"].items())
    yield f"at once    {', '.join(at_once)}"
    yield from _bound_lines(found["bounds"])
    yield from _verdict(answer, found)


def _verdict(answer: Forecast, found: Facts) -> Iterator[str]:
    question = answer.question
    if question.users is not None:
        wanted = f"{question.users} requests of {question.context or answer.limits.max_model_len:,} tokens"
        if needed := found["devices_needed"]:
            how = f"{needed['replicas']} of {needed['each']} in tensor parallel"
            yield f"needed     {needed['total']} devices ({how}) for {wanted}"
        else:
            yield f"needed     no number of these devices holds {wanted}"
    yield ""
    if answer.fits:
        yield "It fits."
        return
    yield f"It does not fit: {answer.shortfall}."
    changes = found["changes"]
    yield "The cheapest changes that make it fit:" if changes else "No single change or pair of changes makes it fit."
    for new in changes:
        added = set(new["not_served"]) - set(question.not_served)
        label = " (not served by this version)" if added else ""
        yield (
            f"  {new['change']}{label}: weights {new['weights']:,} B, activations {new['activations']:,} B, "
            f"{new['blocks']:,} blocks = {new['tokens']:,} tokens; {new['total']:,} B of {new['budget']:,} B"
        )


def _bounds(answer: Forecast) -> Facts | None:
    question = answer.question
    device = question.device
    if device is None or not device.bandwidth:
        return None
    model, formats = question.model, question.formats
    context = question.context or min(DECODE_CONTEXT, answer.limits.max_model_len)
    return {
        "context": context,
        "decode_ms": {str(n): 1000 * decode_seconds(model, formats, device, n, context) for n in BATCHES},
        "prefill_tokens_per_second": prefill_rate(model, formats, device),
    }


def _bound_lines(bounds: Facts | None) -> Iterator[str]:
    if bounds is None:
        yield "bounds     none: the bandwidth of this device is not known (name one: --device h200)"
        return
    yield "bounds     of the hardware by its data sheet, which no implementation beats; not a measurement"
    yield f"  decode   at least {', '.join(f'{least:.1f} ms for {n}' for n, least in bounds['decode_ms'].items())}"
    yield f"           (requests in a step, {bounds['context']:,} tokens behind each)"
    yield f"  prefill  at most {bounds['prefill_tokens_per_second']:,.0f} tokens/s"


def _lengths(answer: Forecast) -> list[int]:
    longest = answer.limits.max_model_len
    wanted = {length for length in LENGTHS if length < longest} | {longest} | {answer.question.context or longest}
    return sorted(wanted)


def _size(name: str, size: int, remark: str) -> str:
    return f"{name:<26}{size:>18,} B  {size / _GIB:>9.3f} GiB  {remark}".rstrip()
