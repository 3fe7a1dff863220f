"""Whole requests through the scheduler and a real runner, in one process, under whatever conditions a test names."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from octavo.kvcache.pool import BlockPool
from octavo.kvcache.prefix import PrefixHasher
from octavo.model.runner import ModelRunner
from octavo.model.step import SamplingParams, Step, TokenLogprobs
from octavo.scheduler.loading import load
from octavo.scheduler.messages import EngineConfig, Submission
from octavo.scheduler.policy import Limits, Scheduler

BLOCK_SIZE = 16
MAX_ROWS, MAX_TOKENS, MAX_LENGTH = 64, 256, 512
OUTPUT_TOKENS = 36
VOCABULARY = range(100, 40_000)


@dataclass(frozen=True)
class Conditions:
    """How requests are computed, which must change nothing."""

    rows: int = MAX_ROWS
    tokens: int = MAX_TOKENS
    blocks: int | None = None
    """Of the pool; None takes as many as are never missed."""
    rounds: int = 1
    """How often the same requests are sent, one round after another, to the same prefix cache."""


@dataclass
class Answers:
    """What the last round of requests got, by the number of the request."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    cached_tokens: int = 0
    preemptions: int = 0

    def of(self, numbers: Iterable[int]) -> list[tuple[list[int], list[TokenLogprobs]]]:
        """Tokens and log-probabilities of some requests."""
        return [(self.tokens[number], self.logprobs[number]) for number in numbers]


class Loaded:
    """A model that any number of schedulers may drive, one after another."""

    def __init__(self, dtype: str = "bfloat16") -> None:
        config = EngineConfig(
            model="smollm2",
            dtype=dtype,
            max_model_len=MAX_LENGTH,
            max_num_seqs=MAX_ROWS,
            max_num_batched_tokens=MAX_TOKENS,
            kv_blocks=MAX_ROWS * MAX_LENGTH // BLOCK_SIZE,
        )
        self.runner: ModelRunner
        _, self.runner, self.ready = load(config)

    def answer(self, requests: Sequence[Submission], conditions: Conditions | None = None) -> Answers:
        """Compute the requests, all of them waiting from the beginning, in the order given."""
        conditions = conditions or Conditions()
        scheduler = Scheduler(
            BlockPool(conditions.blocks or self.ready.blocks),
            PrefixHasher(BLOCK_SIZE) if conditions.rounds > 1 else None,
            Limits(conditions.rows, conditions.tokens, MAX_LENGTH, BLOCK_SIZE),
            eos_ids=[],
        )
        answers, taken = Answers(), set[int]()
        for number in range(conditions.rounds):
            answers = Answers()
            for request in requests:
                refused = scheduler.add(renumbered(request, request.request + number * 1_000_000))
                assert refused is None, refused
            self._run(scheduler, answers, taken)
        self.runner.submit(Step(tuple(sorted(taken)), (), (), ())).wait()
        answers.preemptions = scheduler.preemptions
        return answers

    def _run(self, scheduler: Scheduler, answers: Answers, taken: set[int]) -> None:
        """Compute what waits; `taken` are the runner's slots that are not free yet."""
        while (step := scheduler.schedule()) is not None:
            taken.difference_update(step.retired)
            taken.update(admission.slot for admission in step.admitted)
            for event in scheduler.commit(step, self.runner.submit(step).wait()):
                assert event.error is None, event.error
                number = event.request % 1_000_000
                answers.cached_tokens += event.cached_tokens
                if event.token is not None:
                    answers.tokens.setdefault(number, []).append(event.token)
                if event.logprobs is not None:
                    answers.logprobs.setdefault(number, []).append(event.logprobs)


def varied_requests(count: int, seed: int = 0) -> list[Submission]:
    """Prompts of 1 to about 300 tokens, every second one sampled, each with log-probabilities of three rivals."""
    rng = random.Random(seed)
    settings = [
        SamplingParams(temperature=0.0, logprobs=3, ignore_eos=True),
        SamplingParams(temperature=0.8, top_p=0.95, seed=1, logprobs=3, ignore_eos=True),
        SamplingParams(temperature=0.0, repetition_penalty=1.2, logprobs=3, ignore_eos=True),
        SamplingParams(temperature=1.2, seed=2, logprobs=3, ignore_eos=True),
    ]
    requests = []
    for number in range(count):
        length = int(2 ** rng.uniform(0, 8.2))
        prompt = tuple(rng.choices(VOCABULARY, k=length))
        params = settings[number % len(settings)]
        requests.append(Submission(request=number, prompt=prompt, max_tokens=OUTPUT_TOKENS, params=params))
    return requests


def renumbered(request: Submission, number: int) -> Submission:
    """The same request by another number."""
    return Submission(request=number, prompt=request.prompt, max_tokens=request.max_tokens, params=request.params)
