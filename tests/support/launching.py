"""A small model for ranks that something else has started, and what it says when it is not divided."""

from pathlib import Path

from support.checkpoints import tiny_model
from support.vocabularies import byte_level_backend

from octavo.model.step import SamplingParams
from octavo.scheduler.loading import load
from octavo.scheduler.messages import EngineConfig, Submission

PROMPT = (7, 3, 90, 41, 12)
TOKENS = 12
LIMITS = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "kv_blocks": 32}
FLAGS = ["--dtype=float32", *(f"--{name.replace('_', '-')}={value}" for name, value in LIMITS.items())]


def divided_model(directory: Path) -> Path:
    vocabulary = byte_level_backend().get_vocab_size()
    tiny_model(directory, "llama", heads=8, kv_heads=4, vocabulary=vocabulary, eos_token_id=0)
    byte_level_backend().save(str(directory / "tokenizer.json"))
    return directory


def tokens_of_one(model: Path) -> list[int | None]:
    """The first TOKENS of the undivided model after PROMPT."""
    scheduler, runner, _ = load(EngineConfig(model=str(model), dtype="float32", **LIMITS))
    greedy = SamplingParams(temperature=0.0, ignore_eos=True)
    scheduler.add(Submission(request=1, prompt=PROMPT, params=greedy, max_tokens=TOKENS))
    tokens = []
    while (step := scheduler.schedule()) is not None:
        tokens += [event.token for event in scheduler.commit(step, runner.submit(step).wait())]
    return tokens
