"""An engine without a model or torch: `python scripted_engine.py [options] FD` speaks the engine's protocol.

The scheduler, the loop and the channel are the real ones. The token after p known ones is `scripted_token(p)`,
whatever they are; END is never among them, so requests run to their length. A prompt that holds CRASH breaks the
device, one that holds KILL ends the process at once, and the model "missing" cannot be loaded. With --load-until FILE
it loads until that file exists.
"""

import argparse
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from octavo.kvcache.pool import BlockPool
from octavo.kvcache.prefix import PrefixHasher
from octavo.model.step import RowResult, Step, StepResult
from octavo.scheduler.channel import Channel
from octavo.scheduler.messages import EngineConfig, Loading, MemoryLine, Ready
from octavo.scheduler.policy import Scheduler
from octavo.scheduler.process import prepare_process, serve
from octavo.scheduler.request import Limits

VOCABULARY = 1000
END = 2
CRASH = 998
KILL = 999


def scripted_token(known: int) -> int:
    """The token that follows `known` tokens."""
    return 3 + known * 7 % 900


class MissingModelError(Exception):
    exit_code = 65


@dataclass(frozen=True)
class _Done:
    result: StepResult

    def wait(self) -> StepResult:
        return self.result


@dataclass
class PositionRunner:
    """Samples by position alone."""

    step_seconds: float = 0.0
    steps: list[Step] = field(default_factory=list)

    def submit(self, step: Step) -> _Done:
        time.sleep(self.step_seconds)
        for admission in step.admitted:
            if CRASH in admission.tokens:
                raise RuntimeError("the device\nis on fire")
            if KILL in admission.tokens:
                os.kill(os.getpid(), signal.SIGKILL)
        return _Done(
            StepResult(
                tuple(
                    RowResult(token=scripted_token(row.start + row.count) if row.sample else None) for row in step.rows
                )
            )
        )

    def reset(self) -> None:
        pass


def ready(config: EngineConfig, blocks: int) -> Ready:
    return Ready(
        architecture="Scripted",
        parameters=0,
        vocabulary=VOCABULARY,
        max_model_len=config.max_model_len or 2048,
        max_num_seqs=config.max_num_seqs or 8,
        max_num_batched_tokens=config.max_num_batched_tokens or 64,
        block_size=config.block_size,
        blocks=blocks,
        kv_bytes_per_token=64,
        eos_ids=(END,),
        device="cpu",
        dtype="bfloat16",
        weights_digest="0" * 64,
        kernels="scripted",
        process=os.getpid(),
        memory=(
            MemoryLine(bucket="weights", planned=3000, allocated=3000),
            MemoryLine(bucket="cache", planned=blocks * 1024, allocated=blocks * 1024),
            MemoryLine(bucket="activations", planned=5000, allocated=5000),
            MemoryLine(bucket="runtime", planned=1 << 28, allocated=0),
            MemoryLine(bucket="host", planned=1 << 28, allocated=0),
        ),
        memory_budget=1 << 20,
        batch_invariant=True,
        batch_invariance_reason="nothing is computed",
        load_seconds=0.0,
    )


def build(config: EngineConfig, step_seconds: float = 0.0) -> tuple[Scheduler, PositionRunner, Ready]:
    if config.model == "missing":
        raise MissingModelError("there is no model called missing")
    state = ready(config, config.kv_blocks or 1024)
    limits = Limits(state.max_num_seqs, state.max_num_batched_tokens, state.max_model_len, state.block_size)
    hasher = PrefixHasher(state.block_size) if config.prefix_caching else None
    scheduler = Scheduler(BlockPool(state.blocks), hasher, limits, state.eos_ids)
    return scheduler, PositionRunner(step_seconds), state


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-seconds", type=float, default=0.0)
    parser.add_argument("--load-until", default="")
    parser.add_argument("descriptor", type=int)
    arguments = parser.parse_args()

    def load(config: EngineConfig, report: Callable[[Loading], None]) -> tuple[Scheduler, PositionRunner, Ready]:
        report(Loading(phase="loading weights", progress=0.5))
        while arguments.load_until and not Path(arguments.load_until).exists():
            time.sleep(0.01)
        return build(config, arguments.step_seconds)

    prepare_process()
    channel = Channel(socket.socket(fileno=arguments.descriptor))
    return serve(channel, load)


if __name__ == "__main__":
    sys.exit(main())
