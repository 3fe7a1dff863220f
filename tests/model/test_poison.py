"""The poison shows whatever is read before it is written, and leaves alone what may be read."""

from pathlib import Path

import pytest
import torch
from support.checkpoints import tiny_model
from support.runners import build

from octavo.model.runner import ModelRunner
from octavo.model.step import Admission, Growth, Row, RowResult, SamplingParams, Step

GREEDY = SamplingParams(temperature=0)
PROMPT = tuple(range(40))


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=str)
def runner(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    tiny_model(tmp_path, "llama")
    monkeypatch.setenv("OCTAVO_POISON", "1")
    return build(tmp_path, request.param)[0]


def compute(runner: ModelRunner, row: Row, *admitted: Admission, grown: tuple[Growth, ...] = ()) -> RowResult:
    return runner.submit(Step((), admitted, grown, (row,))).wait().rows[0]


def request(slot: int, *blocks: int) -> Admission:
    return Admission(slot, PROMPT, len(PROMPT), blocks, GREEDY)


def test_pool_and_arena_are_poisoned_at_the_start(runner: ModelRunner) -> None:
    assert bool(runner._attention._store.data.isnan().all())  # type: ignore[attr-defined]
    assert bool(runner.arena.view("spine", 1).isnan().all())


def test_a_block_that_nobody_wrote_fails_the_row_that_reads_it(runner: ModelRunner) -> None:
    assert compute(runner, Row(0, 16, 24, sample=True), request(0, 0, 1, 2)).failed


def test_what_is_written_first_is_read_and_the_rest_of_a_block_is_not(runner: ModelRunner) -> None:
    first = compute(runner, Row(0, 0, 40, sample=True), request(0, 0, 1, 2))
    in_chunks = [compute(runner, Row(1, 0, 7, sample=False), request(1, 3, 4, 5))]
    in_chunks += [compute(runner, Row(1, start, 11, sample=start == 29)) for start in (7, 18, 29)]
    assert not first.failed
    assert first.token is not None
    assert in_chunks[-1].token == first.token


def test_shared_blocks_stay_as_they_are_and_those_handed_out_are_poisoned(runner: ModelRunner) -> None:
    token = compute(runner, Row(0, 0, 40, sample=True), request(0, 0, 1, 2)).token
    assert compute(runner, Row(1, 32, 8, sample=True), request(1, 0, 1, 3)).token == token
    # A prompt that is found as a whole computes its last token again, within a block that is shared.
    assert compute(runner, Row(2, 39, 1, sample=True), request(2, 0, 1, 3)).token == token
    assert compute(runner, Row(3, 16, 24, sample=True), request(3, 4, 1, 2)).failed, "the first block was never written"
    compute(runner, Row(4, 0, 4, sample=False), request(4, 0, 1, 2))
    assert compute(runner, Row(4, 30, 10, sample=True)).failed, "blocks 0 to 2 were given to somebody else meanwhile"


def test_blocks_that_a_request_grows_by_are_poisoned(runner: ModelRunner) -> None:
    compute(runner, Row(0, 0, 40, sample=True), request(0, 0, 1, 2))
    compute(runner, Row(1, 0, 10, sample=False), request(1, 3))
    assert compute(runner, Row(1, 39, 1, sample=True), grown=(Growth(1, (1, 2)),)).failed
