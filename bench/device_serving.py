"""Two sections of the device check: a small model's tokens by way of CPU and GPU, and a server under load."""

import json
import math
import os
import random
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers
import torch

from octavo.model.config import ModelConfig
from octavo.model.step import Runner, SamplingParams, TokenLogprobs
from octavo.scheduler.loading import load
from octavo.scheduler.messages import EngineConfig, Submission, TokenEvent
from octavo.scheduler.policy import Scheduler

RIVALS = 20
PROMPT_TOKENS = 100
STARTED = re.compile(r"serving on (http://\S+)")
START_SECONDS = 150


def describe_model(config: ModelConfig) -> dict[str, Any]:
    """A Llama's config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.width,
        "intermediate_size": config.ffn_width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocabulary,
        "max_position_embeddings": config.max_context,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tied_embeddings,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }


def write_model(directory: Path, config: ModelConfig) -> str:
    """A model without weights, which are made up when it is loaded, and with a token for every byte and number."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(describe_model(config)))
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    names = [*alphabet, *(f"<{number}>" for number in range(len(alphabet), config.vocabulary))]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({name: i for i, name in enumerate(names)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.save(str(directory / "tokenizer.json"))
    return str(directory)


def run_all(scheduler: Scheduler, runner: Runner) -> list[TokenEvent]:
    """The scheduler's loop until every request has ended, with one step of look-ahead."""
    events: list[TokenEvent] = []
    flight = None
    while scheduler.busy or flight:
        step = scheduler.schedule()
        queued = None if step is None else (step, runner.submit(step))
        if flight is not None:
            events += scheduler.commit(flight[0], flight[1].wait())
        flight = queued
    return events


def parity(directory: Path, config: ModelConfig, requests: int, new_tokens: int) -> dict[str, Any]:
    """Greedy answers of a random model in bfloat16 on CPU and GPU, eager and captured, against float32 on the CPU.

    The yardstick is what bfloat16 costs on the CPU: the root mean square of the log-probabilities' errors up to where a
    run leaves the tokens of float32. On the GPU it may be twice as large, and where a run leaves those tokens, the two
    at stake may be no further apart than 8 of it: errors of both, each of which is one in 600 and so beyond 3.
    """
    model, threads = write_model(directory, config), torch.get_num_threads()
    rng = random.Random(0)
    prompts = [tuple(rng.randrange(config.vocabulary) for _ in range(PROMPT_TOKENS)) for _ in range(requests)]

    def answers(device: str, dtype: str = "bfloat16", *, eager: bool = False) -> list[list[TokenLogprobs]]:
        limits = {"max_model_len": PROMPT_TOKENS + new_tokens, "max_num_seqs": 8, "max_num_batched_tokens": 64}
        parts = {"device": device, "dtype": dtype, "enforce_eager": eager, "load_format": "random", "kv_blocks": 256}
        scheduler, runner, _ready = load(EngineConfig(model=model, **limits, **parts))  # type: ignore[arg-type]
        params = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=RIVALS)
        for number, prompt in enumerate(prompts):
            scheduler.add(Submission(request=number, prompt=prompt, params=params, max_tokens=new_tokens))
        found: list[list[TokenLogprobs]] = [[] for _ in prompts]
        for event in run_all(scheduler, runner):
            if event.logprobs is not None:
                found[event.request].append(event.logprobs)
        return found

    try:
        exact = answers("cpu", "float32")
        runs = {"CPU": answers("cpu"), "GPU, eager": answers("cuda", eager=True), "GPU, captured": answers("cuda")}
    finally:
        torch.set_num_threads(threads)  # loading for a CPU leaves torch one
    compared = {name: compare(exact, run) for name, run in runs.items()}
    unit = compared["CPU"][0]
    found: dict[str, Any] = {"answers": requests, "tokens of each": new_tokens}
    for name, (size, gap, same) in compared.items():
        found |= {f"{name}: error": size, f"{name}: widest gap": gap, f"{name}: tokens as in float32": same}
    for name, (size, gap, _same) in compared.items():
        if name != "CPU" and not (size <= 2 * unit and gap <= 8 * unit):
            raise ArithmeticError(f"{name} is further from float32 than bfloat16 on the CPU explains: {found}")
    return found


def compare(exact: list[list[TokenLogprobs]], run: list[list[TokenLogprobs]]) -> tuple[float, float, int]:
    """Root mean square error, the widest gap where a run takes another token, and how many tokens come before."""
    errors, gaps = [], [0.0]
    for expected, found in zip(exact, run, strict=True):
        for one, other in zip(expected, found, strict=True):
            if one.token != other.token:
                gaps.append(one.logprob - dict(one.top).get(other.token, -math.inf))
                break
            errors.append(other.logprob - one.logprob)
    return math.sqrt(sum(size * size for size in errors) / len(errors)), max(gaps), len(errors)


def http(directory: Path, config: ModelConfig, device: str, levels: tuple[int, ...], new_tokens: int) -> dict[str, Any]:
    """`octavo serve` with random weights, under `octavo bench`: streams over HTTP, so many at a time."""
    model, found, sent = write_model(directory, config), {}, 0
    options = ["--load-format", "random", "--device", device, "--max-num-seqs", str(max(levels))]
    started = time.perf_counter()
    with serving(directory / "server.log", "serve", model, *options) as url:
        found["start, s"] = time.perf_counter() - started
        for level in levels:
            requests, file = max(4, 2 * level), directory / f"load-{level}.json"
            shape = ["--prompt-tokens", str(PROMPT_TOKENS), "--output-tokens", str(new_tokens), "--token-ids", "3-99"]
            load = ["--concurrency", str(level), "--requests", str(requests), "--seed", str(level), *shape]
            subprocess.run(
                [*COMMAND, "bench", url, *load, "--json", str(file)], check=True, stdout=subprocess.DEVNULL, timeout=120
            )
            facts, sent = json.loads(file.read_text()), sent + requests
            found[f"{level} streams, tokens/s"] = facts["output_tokens_per_second"]
            for name, latency in facts["latency_ms"].items():
                if latency is not None:
                    found |= {f"{level} streams, {name} {q}, ms": latency[q] for q in ("p50", "p99")}
        with urllib.request.urlopen(f"{url}/metrics") as page:
            counted = re.findall(
                r'^octavo_request_success_total\{.*"length"\} (\S+)$', page.read().decode(), re.MULTILINE
            )
        if [float(count) for count in counted] != [sent]:
            raise ArithmeticError(f"{sent} requests were sent, /metrics counts {counted}")
    return found


COMMAND = (sys.executable, "-m", "octavo.server.cli")


@contextmanager
def serving(log: Path, *arguments: str) -> Iterator[str]:
    """The address of a server, once it serves. It has to end well, too."""
    with log.open("w") as file:
        process = subprocess.Popen([*COMMAND, *arguments, "--port", "0"], stderr=file, stdout=file, env=os.environ)
    try:
        deadline = time.monotonic() + START_SECONDS
        while (found := STARTED.search(log.read_text())) is None:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server has not started: {log.read_text()[-2000:]}")
            time.sleep(0.1)
        yield found[1]
        process.terminate()
        if process.wait(60) != 0:
            raise RuntimeError(f"the server ended with exit code {process.returncode}: {log.read_text()[-2000:]}")
    finally:
        process.kill()
        process.wait()
