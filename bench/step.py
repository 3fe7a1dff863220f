"""Where the time of one decode step goes, by part, at several batch sizes.

    .venv/bin/python bench/step.py                          # default model, 1, 8 and 32 requests
    .venv/bin/python bench/step.py --batches 32 --context 1500 --temperature 1

The engine runs in this process as it does in its own, with its messages going over a socket pair. Each part is timed
exclusively: what is called within a part of its own counts there and not in its caller. The floor beside the products
is what reading the weights once takes at the read bandwidth that is measured in the same minute, and the rate of
reading is what the products reach.
"""

import argparse
import collections
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from bandwidth import read_bandwidth

from octavo.model.kernels.library import Library
from octavo.model.runner import ModelRunner
from octavo.model.sampling import Sampler
from octavo.model.step import SamplingParams
from octavo.scheduler.channel import Channel, FrameDecoder, FrameEncoder
from octavo.scheduler.engine import Engine
from octavo.scheduler.loading import load
from octavo.scheduler.messages import EngineConfig, FromEngine, StepReport, Submission
from octavo.scheduler.policy import Scheduler

MOST_TOKENS = 128
"""In a step."""

PARTS: dict[str, tuple[tuple[type, tuple[str, ...]], ...]] = {
    "schedule": ((Scheduler, ("schedule", "commit")),),
    "products": (),
    "attention": (),
    "norms, RoPE, SiLU": (),
    "sampling": ((Sampler, ("sample", "score")),),
    "messages": ((Channel, ("receive", "send")),),
    "rest of the runner": ((ModelRunner, ("submit",)),),
    "rest of the engine": ((Engine, ("turn",)),),
}

FUNCTIONS = {"linear": "products", "paged_attention": "attention"}
"""Parts of the compiled functions by the beginning of their names; the others are norms, RoPE and SiLU."""


class Stopwatch:
    """Seconds by part, exclusive of the parts within."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = collections.defaultdict(float)
        self._within = [0.0]

    def watch(self, owner: type, name: str, part: str) -> None:
        """Replace a method by one that is timed."""
        setattr(owner, name, self._timed(getattr(owner, name), part))

    def watch_library(self) -> None:
        """Time the functions of the compiled library, be they called or repeated."""
        look_up = Library.__getitem__

        def timed(library: Library, name: str) -> Any:
            part = next((part for start, part in FUNCTIONS.items() if name.startswith(start)), "norms, RoPE, SiLU")
            return CompiledFunction(look_up(library, name), self._timed, part)

        Library.__getitem__ = timed  # type: ignore[method-assign]

    def _timed(self, method: Callable[..., Any], part: str) -> Callable[..., Any]:
        def timed(*arguments: Any, **keywords: Any) -> Any:
            self._within.append(0.0)
            started = time.perf_counter()
            try:
                return method(*arguments, **keywords)
            finally:
                took = time.perf_counter() - started
                self.seconds[part] += took - self._within.pop()
                self._within[-1] += took

        return timed


class CompiledFunction:
    """A function of the library, timed, whose types are set as those of the function itself."""

    def __init__(self, function: Any, timed: Callable[..., Any], part: str) -> None:
        self.__dict__.update(function=function, call=timed(function, part))

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.function, name, value)

    def __call__(self, *values: Any) -> Any:
        """Call the function."""
        return self.call(*values)


def main() -> None:
    arguments = parse_arguments()
    watch = Stopwatch()
    watch.watch_library()
    for part, methods in PARTS.items():
        for owner, names in methods:
            for name in names:
                watch.watch(owner, name, part)
    most, length = max(arguments.batches), 2 * arguments.context + arguments.steps + 32
    scheduler, runner, ready = load(
        EngineConfig(
            model=arguments.model,
            dtype=arguments.dtype,
            max_model_len=length,
            max_num_seqs=most,
            max_num_batched_tokens=max(most, MOST_TOKENS),
            kv_blocks=most * -(-length // 16) + most,
        )
    )
    print(f"{ready.architecture} of {ready.parameters:,} parameters, {ready.dtype}, kernels {ready.kernels}")
    for batch in arguments.batches:
        bandwidth = read_bandwidth()
        rounds = list(steps(Engine, (scheduler, runner), batch, arguments, watch))
        report(batch, rounds, runner.model.weights_nbytes, bandwidth)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32], help="requests in a step")
    parser.add_argument("--context", type=int, default=192, help="tokens behind each request (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=96, help="measured steps (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0)
    return parser.parse_args()


def steps(
    make: Callable[..., Engine], parts: tuple[Any, ...], batch: int, arguments: argparse.Namespace, watch: Stopwatch
) -> Iterator[dict[str, float]]:
    """Yield the seconds of each part, step after step, while `batch` requests decode."""
    ours, theirs = socket.socketpair()
    engine = make(*parts, Channel(theirs))
    reports: FrameDecoder[FromEngine] = FrameDecoder(FromEngine)
    requests = FrameEncoder()
    rng = np.random.default_rng(batch)
    params = SamplingParams(temperature=arguments.temperature, ignore_eos=True)
    total = arguments.steps + 16 + batch * arguments.context // MOST_TOKENS  # some decode while others have prompts
    with ours, theirs:
        for number in range(batch):
            prompt = tuple(int(token) for token in rng.integers(1000, 20000, arguments.context))
            ours.sendall(requests.encode(Submission(request=number, prompt=prompt, max_tokens=total, params=params)))
        done = decoding = 0
        while done < batch:
            watch.seconds.clear()
            engine.turn()
            for message in reports.feed(ours.recv(1 << 22)):
                if isinstance(message, StepReport):
                    done += sum(event.finish is not None for event in message.events)
                    if message.stats.step_rows == message.stats.step_tokens == batch:
                        decoding += 1
                        if 8 < decoding <= 8 + arguments.steps:
                            yield dict(watch.seconds)


def report(batch: int, rounds: list[dict[str, float]], weights: int, bandwidth: float) -> None:
    """Print the median of each part, and what the products could take at best."""
    medians = {part: 1e3 * statistics.median(seconds.get(part, 0.0) for seconds in rounds) for part in PARTS}
    whole = 1e3 * statistics.median(sum(seconds.values()) for seconds in rounds)
    print(f"\n{batch} requests: {whole:.2f} ms a step, {batch * 1e3 / whole:.0f} tokens/s, {len(rounds)} steps")
    for part, milliseconds in medians.items():
        print(f"  {part:20} {milliseconds:8.3f} ms {milliseconds / whole:6.1%}")
    floor, reached = 1e3 * weights / bandwidth, weights / medians["products"] / 1e6
    print(f"  reading {weights / 1e6:,.0f} MB at {bandwidth / 1e9:.1f} GB/s takes {floor:.2f} ms; ", end="")
    print(f"the products go through them at {reached:.1f} GB/s")


if __name__ == "__main__":
    main()
