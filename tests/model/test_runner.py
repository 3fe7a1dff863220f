import math
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from support.checkpoints import tiny_model
from support.driving import GREEDY, Driver, Request, fresh
from support.runners import SMALL, build, cpu_kernels, formats_of, logits_of

from octavo.kvcache.ledger import BUCKETS
from octavo.model.kernels import Linear
from octavo.model.memory import plan_memory
from octavo.model.runner import ModelRunner
from octavo.model.selftest import check_batch_invariance
from octavo.model.step import Admission, Growth, Row, SamplingParams, Step

VOCABULARY = 128
POISON = 77
"""Its embedding is NaN in the poisoned model."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tiny_model(directory, "llama", heads=6, kv_heads=2, width=96, vocabulary=VOCABULARY)
    return directory


@pytest.fixture(scope="module")
def runner(checkpoint: Path) -> ModelRunner:
    return build(checkpoint)[0]


@pytest.fixture
def poisoned(checkpoint: Path) -> ModelRunner:
    runner = build(checkpoint)[0]
    embedding = runner.model.destinations()["model.embed_tokens.weight"]
    embedding.load(POISON, torch.full((1, embedding.shape[1]), math.nan))
    return runner


def prompt(seed: int, length: int) -> tuple[int, ...]:
    random = Random(seed)
    return tuple(random.choice([token for token in range(VOCABULARY) if token != POISON]) for _ in range(length))


def mixture() -> list[Request]:
    sampled = SamplingParams(temperature=1.0, seed=7, logprobs=3)
    scored = replace(GREEDY, prompt_logprobs=2)
    return [
        Request(prompt(0, 5), 12),
        Request(prompt(1, 40), 6, sampled),
        Request(prompt(2, 1), 20),
        Request(prompt(3, 70), 9, scored),
        Request(prompt(4, 16), 3, replace(sampled, seed=8)),
        Request(prompt(5, 33), 1, scored),
    ]


def results(requests: list[Request]) -> list[object]:
    return [(request.output, request.logprobs, request.prompt_logprobs) for request in requests]


def test_a_requests_results_do_not_depend_on_its_neighbours_or_on_chunks(runner: ModelRunner) -> None:
    alone = mixture()
    for request in alone:
        Driver(runner, 16, 64).run([request])
    for seed in range(4):
        random = Random(seed)
        requests = mixture()
        driver = Driver(runner, 16, 64, chunk=lambda turn, wanted, random=random: random.randint(1, wanted))
        driver.run(requests, delays=[random.randint(0, 8) for _ in requests])
        assert results(requests) == results(alone)


def test_prompt_log_probabilities_are_the_log_softmax_of_the_logits(runner: ModelRunner) -> None:
    tokens = prompt(6, 60)
    (request,) = Driver(runner, 16, 64).run([Request(tokens, 0, replace(GREEDY, prompt_logprobs=3))])
    expected = logits_of(runner, list(tokens)).double().log_softmax(dim=1)
    assert [entry.token for entry in request.prompt_logprobs] == list(tokens[1:])
    for entry, row in zip(request.prompt_logprobs, expected, strict=False):
        assert entry.logprob == pytest.approx(float(row[entry.token]), abs=1e-5)
        top = row.topk(3)
        assert [token for token, _ in entry.top] == top.indices.tolist()
        assert [logprob for _, logprob in entry.top] == pytest.approx(top.values.tolist(), abs=1e-5)
    assert request.output == []


def test_a_scored_prompt_longer_than_the_head_is_scored_in_slices(runner: ModelRunner) -> None:
    tokens = prompt(7, 64)
    assert runner.arena.max_rows < 60
    row = Row(0, 0, 64, sample=True, score=True)
    admission = Admission(0, tokens, 64, (0, 1, 2, 3), replace(GREEDY, prompt_logprobs=0))
    (result,) = runner.submit(Step((), (admission,), (), (row,))).wait().rows
    runner.submit(Step((0,), (), (), ())).wait()
    assert [entry.token for entry in result.prompt_logprobs] == list(tokens[1:])
    assert result.token is not None


def test_only_prompt_tokens_are_scored_after_a_preemption(runner: ModelRunner) -> None:
    known = prompt(8, 20)
    admission = Admission(0, known, 12, (0, 1), replace(GREEDY, prompt_logprobs=0))
    rows = (Row(0, 5, 15, sample=True, score=True),)
    (result,) = runner.submit(Step((), (admission,), (), rows)).wait().rows
    runner.submit(Step((0,), (), (), ())).wait()
    assert [entry.token for entry in result.prompt_logprobs] == list(known[6:12])


def test_a_request_whose_numbers_are_not_finite_fails_alone(poisoned: ModelRunner) -> None:
    healthy = [Request(prompt(9, 30), 8), Request(prompt(10, 3), 8, replace(GREEDY, prompt_logprobs=0))]
    expected = fresh(healthy)
    for request in expected:
        Driver(poisoned, 16, 64).run([request])
    sick = Request((1, 2, POISON, 3), 8)
    sick_and_scored = Request((1, POISON, 3, 4), 0, replace(GREEDY, prompt_logprobs=0))
    Driver(poisoned, 16, 64).run([healthy[0], sick, healthy[1], sick_and_scored])
    assert sick.failed
    assert sick.output == []
    assert sick_and_scored.failed
    assert results(healthy) == results(expected)


def test_blocks_that_held_values_that_are_not_finite_are_as_good_as_new(poisoned: ModelRunner) -> None:
    (before,) = Driver(poisoned, 16, 64).run([Request(prompt(11, 20), 8)])
    (sick,) = Driver(poisoned, 16, 64).run([Request((POISON,) * 60, 8)])
    (after,) = Driver(poisoned, 16, 64).run([Request(prompt(11, 20), 8)])
    assert sick.failed
    assert results([after]) == results([before])


def test_a_runner_that_broke_within_a_step_computes_the_same_after_a_reset(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = build(checkpoint)[0]
    expected = Driver(runner, 16, 64).run(mixture())

    def broken(*arguments: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(runner.model, "logits", broken)
        with pytest.raises(MemoryError):
            Driver(runner, 16, 64).run(mixture())
    runner.reset()
    assert results(Driver(runner, 16, 64).run(mixture())) == results(expected)


def test_a_step_without_rows_only_changes_slots(runner: ModelRunner) -> None:
    admission = Admission(3, (1, 2), 2, (0,), GREEDY)
    assert runner.submit(Step((), (admission,), (Growth(3, (1,)),), ())).wait().rows == ()
    assert runner.submit(Step((3,), (), (), ())).wait().rows == ()
    with pytest.raises(ValueError, match="free"):
        runner.submit(Step((3,), (), (), ()))


def test_a_step_larger_than_the_runner_is_refused(checkpoint: Path) -> None:
    runner, _ = build(checkpoint)
    admission = Admission(0, prompt(12, 80), 80, (0, 1, 2, 3, 4), GREEDY)
    with pytest.raises(ValueError, match="80 tokens exceeds the 64"):
        runner.submit(Step((), (admission,), (), (Row(0, 0, 80, sample=True),)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_allocated_is_what_was_planned(checkpoint: Path, dtype: torch.dtype) -> None:
    _, ledger = build(checkpoint, dtype)
    for bucket in BUCKETS:
        assert ledger.allocated[bucket] == ledger.plan.planned(bucket) > 0


def test_memory_beyond_the_plan_is_refused(checkpoint: Path) -> None:
    with pytest.raises(MemoryError, match="cache"):
        build(checkpoint, planned=replace(SMALL, blocks=SMALL.blocks - 1))


def test_a_plan_without_blocks_tells_what_is_fixed(runner: ModelRunner) -> None:
    config, kernels = runner.model.config, cpu_kernels(torch.float32)
    plans = [
        plan_memory(config, formats_of(kernels, torch.float32), replace(SMALL, blocks=blocks), budget=1 << 30)
        for blocks in (0, 10)
    ]
    assert plans[0].total == plans[0].fixed == plans[1].fixed
    block = 2 * 2 * 2 * 16 * 16 * 4  # layers, K and V, KV heads, head_dim, positions, bytes
    assert plans[1].total == plans[1].fixed + 10 * block


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_self_test_of_batch_invariance_passes(checkpoint: Path, dtype: torch.dtype) -> None:
    passed, reason = check_batch_invariance(build(checkpoint, dtype)[0].model)
    assert passed, reason


class OtherOrder:
    """A product of one row that adds from the other end: what a library's special case for one row looks like."""

    def __init__(self, linear: Linear, weight: torch.Tensor) -> None:
        self.out_features, self.in_features, self.nbytes = linear.out_features, linear.in_features, linear.nbytes
        self._weight, self._linear = weight, linear

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self._linear(x, out=out)
        if x.shape[0] <= 8:
            out.copy_((x[:, None, :].flip(2) * self._weight.flip(1)).float().cumsum(dim=2)[:, :, -1])


def test_the_self_test_notices_another_order_of_additions(checkpoint: Path) -> None:
    model = build(checkpoint)[0].model
    weight = torch.empty(VOCABULARY, 96)
    model.head.gather(torch.arange(VOCABULARY, dtype=torch.int32), out=weight)
    model.head = OtherOrder(model.head, weight)  # type: ignore[assignment]
    passed, reason = check_batch_invariance(model)
    assert not passed
    assert reason == "1 rows of a 128 x 96 product differ from the same rows among 64"
