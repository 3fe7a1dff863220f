"""A request's tokens and log-probabilities have the same bits whatever else is served, and however it is computed.

`make invariance` runs it with 500 prompts.
"""

import os
import random
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import pytest
from support.invariance import OUTPUT_TOKENS, Answers, Conditions, Loaded, renumbered, varied_requests
from support.reference_attention import ReferenceAttention

from octavo.model.attention import AttentionBackend
from octavo.scheduler.messages import Submission

PROMPTS = int(os.environ.get("OCTAVO_INVARIANCE_PROMPTS", "8"))
MANY = PROMPTS >= 100
DTYPES = os.environ.get("OCTAVO_INVARIANCE_DTYPES", "bfloat16").split()


@pytest.fixture(scope="module", params=DTYPES)
def model(request: pytest.FixtureRequest) -> Loaded:
    return Loaded(request.param)


@pytest.fixture(scope="module")
def requests() -> list[Submission]:
    return varied_requests(PROMPTS)


@pytest.fixture(scope="module")
def alone(model: Loaded, requests: list[Submission]) -> Answers:
    """Each request with nobody beside it, its prompt in one piece as far as a step is large enough."""
    assert model.ready.batch_invariant
    return model.answer(requests, Conditions(rows=1))


def shuffled(requests: list[Submission], seed: int) -> list[Submission]:
    return random.Random(seed).sample(requests, len(requests))


def that_fit(requests: list[Submission]) -> Iterator[list[Submission]]:
    """Parts of the requests whose blocks all stay in the pool: in a cycle through more, none is found again."""
    for start in range(0, len(requests), 250):
        yield requests[start : start + 250]


def equal(found: Answers, expected: Answers, requests: list[Submission]) -> bool:
    numbers = [request.request for request in requests]
    return found.of(numbers) == expected.of(numbers)


@pytest.mark.parametrize("rows", [2, 5, 16, 32, 64] if MANY else [2, 5, 64])
def test_in_mixed_batches(model: Loaded, requests: list[Submission], alone: Answers, rows: int) -> None:
    assert equal(model.answer(shuffled(requests, rows), Conditions(rows=rows)), alone, requests)


@pytest.mark.parametrize("tokens", [16, 64, 256] if MANY else [16, 64])
def test_in_chunks(model: Loaded, requests: list[Submission], alone: Answers, tokens: int) -> None:
    conditions = Conditions(rows=min(tokens, 24), tokens=tokens)
    assert equal(model.answer(shuffled(requests, tokens), conditions), alone, requests)


def test_on_a_prefix_hit(model: Loaded, requests: list[Submission], alone: Answers) -> None:
    for some in that_fit(requests):
        found = model.answer(some, Conditions(rows=16, rounds=2, blocks=model.ready.blocks))
        assert found.cached_tokens > 0
        assert equal(found, alone, some)


def test_preempted_and_resumed(model: Loaded, requests: list[Submission], alone: Answers) -> None:
    longest = max(len(request.prompt) for request in requests) + OUTPUT_TOKENS
    copies = range(1 + 8 // len(requests))
    crowd = [renumbered(request, request.request + 10_000 * copy) for copy in copies for request in requests]
    crowd.sort(key=lambda request: len(request.prompt))  # short ones run together, and grow together
    found = model.answer(crowd, Conditions(rows=32, blocks=-(-longest // 16) + 2))
    assert found.preemptions > 0
    assert equal(found, alone, requests)


def test_in_memory_full_of_nan(
    model: Loaded, requests: list[Submission], alone: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is read that was not written since it was given out, neither on prefix hits nor after preemptions."""
    monkeypatch.setenv("OCTAVO_POISON", "1")
    poisoned = Loaded(model.ready.dtype)
    for some in that_fit(requests):
        hits = poisoned.answer(some, Conditions(rows=16, rounds=2, blocks=model.ready.blocks))
        assert hits.cached_tokens > 0
        assert equal(hits, alone, some)
    longest = max(len(request.prompt) for request in requests) + OUTPUT_TOKENS
    crowded = poisoned.answer(requests, Conditions(rows=32, tokens=48, blocks=-(-longest // 16) + 4))
    assert crowded.preemptions > 0
    assert equal(crowded, alone, requests)


def test_after_an_engine_restart(model: Loaded, requests: list[Submission], alone: Answers) -> None:
    """A new engine, perhaps after a crash, is given the prompt and the tokens that were sent already."""
    half = OUTPUT_TOKENS // 2
    plain = [request for request in requests if request.params.repetition_penalty == 1]
    continued = [
        msgspec.structs.replace(
            request,
            prompt=request.prompt + tuple(alone.tokens[request.request][:half]),
            max_tokens=OUTPUT_TOKENS - half,
        )
        for request in plain
    ]
    found = Loaded(model.ready.dtype).answer(continued, Conditions(rows=32))
    for request in plain:
        assert found.tokens[request.request] == alone.tokens[request.request][half:]
        assert found.logprobs[request.request] == alone.logprobs[request.request][half:]


def test_choices_of_one_prompt_in_any_order(model: Loaded, requests: list[Submission], alone: Answers) -> None:
    """Beside the request itself, whose seed stays, stand its siblings with seeds of their own."""
    sampled = [request for request in requests if request.params.temperature > 0]
    choices = [
        renumbered(
            msgspec.structs.replace(request, params=replace(request.params, seed=seed)), 10_000 * seed + request.request
        )
        for request in sampled
        for seed in (11, 12, 13)
    ]
    first = model.answer([*sampled, *choices])
    second = model.answer(shuffled([*choices, *sampled], 4), Conditions(rows=7))
    assert equal(first, second, [*sampled, *choices])
    assert equal(first, alone, sampled)
    assert len({tuple(first.tokens[choice.request]) for choice in choices}) > len(choices) // 2


def test_attention_whose_sums_depend_on_the_length_of_the_row_is_found_out(
    model: Loaded, requests: list[Submission]
) -> None:
    """The comparison has power: attention in one piece per row, as libraries do it, does not pass it."""
    longest = sorted(requests, key=lambda request: len(request.prompt))[-3:]
    short = [msgspec.structs.replace(request, max_tokens=6) for request in longest]
    runner = model.runner
    ours, runner._attention, record, runner._record = runner._attention, plain_attention(model), runner._record, None
    repeats, runner._repeats = runner._repeats, {}
    try:
        by_itself = model.answer(short, Conditions(rows=1))
        in_chunks = model.answer(short, Conditions(rows=3, tokens=16))
    finally:
        runner._attention, runner._record, runner._repeats = ours, record, repeats
    assert not equal(by_itself, in_chunks, short)


def plain_attention(model: Loaded) -> AttentionBackend:
    ours = model.runner._attention
    return ReferenceAttention(model.runner.model.config, ours._store)  # type: ignore[attr-defined]
