"""An engine without a model that tells stories: `python story_engine.py STORIES.json FD`.

STORIES.json maps a marker token to a list of tokens, or of nulls, at which the device fails. A prompt that begins with
a marker is continued with that story (the token at position p of the sequence is the story's p-th), then with EOS. Any
other prompt is continued with tokens that are a pure function of the sequence so far. Scheduler, loop and channel are
the real ones.
"""

import json
import socket
import sys
import time
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path

import msgspec

from octavo.kvcache.pool import BlockPool
from octavo.kvcache.prefix import PrefixHasher
from octavo.model.step import Step
from octavo.scheduler.channel import Channel
from octavo.scheduler.messages import EngineConfig, Ready
from octavo.scheduler.policy import Scheduler
from octavo.scheduler.process import prepare_process, serve
from octavo.scheduler.request import Limits

sys.path.insert(0, str(Path(__file__).parent.parent))
from support.fake_device import PendingStep, ScriptedRunner
from support.scripted_engine import END, ready

VOCABULARY = 49_152
EOS = END
SLOW = 777
"""A prompt that begins with this token is computed slowly and never ends by itself."""
STEP_SECONDS = 0.01
CRASH = 778
"""A prompt that begins with this token breaks the device."""


class StoryRunner(ScriptedRunner):
    def submit(self, step: Step) -> PendingStep:
        if any(slot.tokens[0] == SLOW for slot in self.slots.values()):
            time.sleep(STEP_SECONDS)
        return super().submit(step)


def narrator(stories: dict[int, list[int | None]]) -> Callable[[Sequence[int]], int | None]:
    def next_token(tokens: Sequence[int]) -> int | None:
        if tokens[0] == CRASH:
            raise RuntimeError("the device broke at /home/somebody/secret.py, address 0xdeadbeef")
        story = stories.get(tokens[0])
        if story is not None:
            return story[len(tokens)] if len(tokens) < len(story) else EOS
        digest = blake2b(repr(tuple(tokens)).encode(), digest_size=4).digest()
        return 3 + int.from_bytes(digest) % (VOCABULARY - 3)

    return next_token


def build(config: EngineConfig, stories: dict[int, list[int | None]]) -> tuple[Scheduler, StoryRunner, Ready]:
    blocks = config.kv_blocks or 1024
    limits = Limits(config.max_num_seqs or 8, 64, config.max_model_len or 2048, config.block_size)
    scheduler = Scheduler(BlockPool(blocks), PrefixHasher(config.block_size), limits, (EOS,))
    state = msgspec.structs.replace(
        ready(config, blocks), architecture="Story", vocabulary=VOCABULARY, max_num_batched_tokens=limits.max_tokens
    )
    return scheduler, StoryRunner(narrator(stories), VOCABULARY), state


def main() -> int:
    stories = {int(marker): story for marker, story in json.loads(Path(sys.argv[1]).read_text()).items()}
    prepare_process()
    return serve(Channel(socket.socket(fileno=int(sys.argv[2]))), lambda config, _: build(config, stories))


if __name__ == "__main__":
    sys.exit(main())
