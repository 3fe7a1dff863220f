"""Nothing but the arena holds activations: within a step no tensor larger than 4 KiB is made, whatever rows ask for.

Two witnesses that know nothing of the arena: a dispatch mode that sees the storage of every tensor an operation
returns, and torch's profiler, which sees every request to torch's allocator, also from inside an operation.
"""

import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from support.checkpoints import tiny_model
from support.live_storage import made_by_operations
from support.runners import build, cpu_kernels
from torch.profiler import ProfilerActivity, profile

from octavo.model.runner import ModelRunner
from octavo.model.step import Admission, Row, RowResult, SamplingParams, Step

SMALL_BYTES = 4096
VOCABULARY = 20_001
LENGTH, TOKENS, ROWS = 1024, 128, 8
SHORT, LONG = 20, 540
"""Lengths of prompts. The longer has more tokens than a penalty takes at once."""

EVERYTHING = SamplingParams(
    temperature=0.8, top_k=5000, top_p=0.97, min_p=0.001, seed=7, repetition_penalty=1.2, presence_penalty=0.5,
    frequency_penalty=0.1, logit_bias=((3, 2.0), (4, -100.0)), min_tokens=50, logprobs=20, prompt_logprobs=20,
)  # fmt: skip
PARAMS = {
    "greedy": SamplingParams(temperature=0),
    "temperature": SamplingParams(),
    "min_p": SamplingParams(min_p=0.05),
    "top_k": SamplingParams(top_k=40),
    "top_p that needs the whole vocabulary": SamplingParams(temperature=50.0, top_p=0.9),
    "log-probabilities": SamplingParams(temperature=0, logprobs=20),
    "penalties": SamplingParams(temperature=0, repetition_penalty=1.1, presence_penalty=1.0, frequency_penalty=0.2),
    "everything": EVERYTHING,
}


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float32], ids=str)
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    if cpu_kernels(request.param).name == "torch":
        pytest.skip("the operators in torch make temporary tensors, as they say")
    directory = tmp_path_factory.mktemp("tiny")
    tiny_model(directory, "qwen3", width=64, ffn_width=192, vocabulary=VOCABULARY)
    limits = {"max_model_len": LENGTH, "max_tokens": TOKENS, "max_rows": ROWS, "blocks": ROWS * LENGTH // 16}
    return build(directory, request.param, **limits)[0]


def steps() -> Iterator[tuple[str, Step]]:
    """Requests of every kind: prompts in chunks, the last of them scored, then decodes, then decodes under masks."""
    blocks = LENGTH // 16
    lengths = [LONG if params.repetition_penalty != 1 else SHORT for params in PARAMS.values()]
    for slot, (params, length) in enumerate(zip(PARAMS.values(), lengths, strict=True)):
        tokens, pages = tuple(i * i % VOCABULARY for i in range(length)), range(slot * blocks, (slot + 1) * blocks)
        yield "an admission", Step((), (Admission(slot, tokens, length, tuple(pages), params, (1, 2)),), (), ())
        for start in range(0, length, TOKENS):
            last = start + TOKENS >= length
            row = Row(slot, start, min(TOKENS, length - start), sample=last, score=last)
            yield f"prompt of slot {slot} from {start}", Step((), (), (), (row,))
    for mask in (None, None, bytes([0b1010_0110]) * (4 * -(-VOCABULARY // 32))):
        rows = tuple(Row(slot, length, 1, sample=True, mask=mask) for slot, length in enumerate(lengths))
        yield f"a token of all, mask: {mask is not None}", Step((), (), (), rows)
        lengths = [length + 1 for length in lengths]
    yield "the end", Step(tuple(range(len(lengths))), (), (), ())


def asked_of_the_allocator(run: Callable[[], object]) -> list[int]:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    events = found.profiler.kineto_results.events()  # type: ignore[union-attr]
    return [event.nbytes() for event in events if event.name() == "[memory]"]


@pytest.mark.parametrize("witness", [made_by_operations, asked_of_the_allocator])
def test_the_witnesses_see_what_operations_make(witness: Callable[[Callable[[], object]], list[int]]) -> None:
    logits = torch.randn(VOCABULARY)
    assert max(witness(lambda: logits.softmax(0))) >= 4 * VOCABULARY
    assert max(witness(lambda: torch.softmax(logits, 0, out=logits)), default=0) == 0


@pytest.mark.parametrize("witness", [made_by_operations, asked_of_the_allocator])
def test_no_step_makes_a_tensor_larger_than_4_kib(
    runner: ModelRunner, witness: Callable[[Callable[[], object]], list[int]]
) -> None:
    for name, step in steps():
        results: list[RowResult] = []
        work = partial(execute, runner, step, results)
        assert max(witness(work), default=0) <= SMALL_BYTES, name
        assert not any(row.failed for row in results)
        assert [row.token is not None for row in results] == [row.sample for row in step.rows]


def execute(runner: ModelRunner, step: Step, results: list[RowResult]) -> None:
    results += runner.submit(step).wait().rows


def test_numpy_makes_nothing_as_large_as_a_row_of_logits_either(runner: ModelRunner) -> None:
    tracemalloc.start()
    try:
        for name, step in steps():
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            pending = runner.submit(step)
            _, peak = tracemalloc.get_traced_memory()
            # Python's objects are in there too; each position of a prompt that is scored has a few tensors.
            assert peak - before < 2 * VOCABULARY, name
            pending.wait()
    finally:
        tracemalloc.stop()
