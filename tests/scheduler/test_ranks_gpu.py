"""Tensor parallelism as it runs on GPUs, on CPU tensors: real processes and collectives, FlashInfer emulated."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from support import rank_gpu
from support.checkpoints import tiny_model
from support.flashinfer_emulation import emulated_flashinfer
from support.gpu_runners import GREEDY, LENGTHS, scenario
from support.rank_gpu import MODES, OPTIONS, SERVED, TOKENS, build, tokens_of
from support.runners import logits_of, reference_logits
from transformers import PreTrainedModel

from octavo.kvcache.ledger import BUCKETS
from octavo.model.weights.checkpoint import Checkpoint, open_checkpoint
from octavo.scheduler.messages import Submission
from octavo.server.cli import main

SIZE = 2
THREE_ROUNDINGS = 3**0.5
"""How much farther a divided model may be from exact numbers than the whole one, in the root mean square.

A product that two ranks add up is rounded three times instead of once, each part and the sum, and nothing else is
rounded more often. Roundings are independent to first order, so the mean square grows threefold at the most. In 8 bits
a rank's part of a row, of W_O, W_down or of activations, has its own largest number, and so a scale that is no larger.
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("divided")


@pytest.fixture(scope="module")
def reference(directory: Path) -> PreTrainedModel:
    """Biases everywhere, and a vocabulary that 2 does not divide; saved in bfloat16, and here in float32."""
    options = {"attention_bias": True, "mlp_bias": True, "dtype": torch.bfloat16}
    return tiny_model(directory, "llama", heads=4, kv_heads=2, head_dim=64, vocabulary=1101, **options).float()


@pytest.fixture(scope="module")
def exact(reference: PreTrainedModel) -> np.ndarray:
    return reference_logits(reference, TOKENS).numpy()


@pytest.fixture(scope="module")
def checkpoint(reference: PreTrainedModel, directory: Path) -> Iterator[Checkpoint]:
    with emulated_flashinfer():
        yield open_checkpoint(directory)


@pytest.fixture(scope="module")
def ranks(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the ranks have left behind."""
    directory = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, rank_gpu.__file__, str(checkpoint.path), str(directory), str(SIZE)]
    subprocess.run(command, env=environment, check=True, timeout=300)
    return directory


def root_mean_square(difference: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(difference, dtype=np.float64))))


@pytest.mark.parametrize("mode", ["bfloat16", "cache", "fp8"])
def test_a_divided_model_is_as_far_from_exact_numbers_as_its_roundings_allow_and_the_same_on_every_rank(
    mode: str, checkpoint: Checkpoint, exact: np.ndarray, ranks: Path
) -> None:
    whole = logits_of(build(checkpoint, **MODES[mode]), TOKENS).numpy()
    found = [np.load(ranks / f"{mode}-{rank}.npy") for rank in range(SIZE)]
    np.testing.assert_array_equal(found[0], found[1])
    off = root_mean_square(whole - exact)
    assert 0 < off < 0.2 * exact.std()
    assert root_mean_square(found[0] - exact) <= THREE_ROUNDINGS * off


def served(ranks: Path, mode: str) -> list[dict[int, list[int]]]:
    """Tokens of the divided model in each run: kernel by kernel, and with captured steps."""
    found = json.loads((ranks / f"{mode}.json").read_text())
    return [{int(number): tokens for number, tokens in run.items()} for run in found]


@pytest.mark.parametrize("mode", SERVED)
def test_captured_steps_with_their_collectives_yield_the_tokens_of_single_kernels(mode: str, ranks: Path) -> None:
    eager, captured = served(ranks, mode)
    assert captured == eager
    assert {number: len(tokens) for number, tokens in captured.items()} == LENGTHS


def test_captured_steps_of_a_divided_model_yield_the_tokens_of_the_whole_one(
    checkpoint: Checkpoint, reference: PreTrainedModel, exact: np.ndarray, ranks: Path
) -> None:
    """A greedy token may differ only where it leads the next by less than both models are off exact numbers."""
    runner = build(checkpoint)
    computed = [logits_of(runner, TOKENS).numpy(), *(np.load(ranks / f"{mode}-0.npy") for mode in ("bfloat16", "xqa"))]
    off = max(float(np.abs(logits - exact).max()) for logits in computed)
    whole = tokens_of(runner, checkpoint)
    for mode in ("bfloat16", "xqa"):
        divided, same = served(ranks, mode)[1], 0
        for request in greedy_requests(checkpoint):
            prompt, tokens, others = request.prompt, whole[request.request], divided[request.request]
            logits = reference_logits(reference, [*prompt, *tokens[:-1]])[len(prompt) - 1 :]
            leads = logits.topk(2).values.diff(dim=1)[:, 0].abs()
            first = next((place for place in range(len(tokens)) if tokens[place] != others[place]), len(tokens))
            assert first == len(tokens) or leads[first] <= 2 * off
            same += first
        assert same > 25


def test_an_engine_that_is_loaded_from_its_options_holds_what_octavo_plan_says_on_every_rank(
    checkpoint: Checkpoint, ranks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    assert main(["plan", str(checkpoint.path), "--device", "h200", "--devices", str(SIZE), "--json", *options]) == 0
    plan = json.loads(capsys.readouterr().out)
    expected = {bucket: plan[bucket] for bucket in BUCKETS}
    assert [json.loads((ranks / f"memory-{rank}.json").read_text()) for rank in range(SIZE)] == [expected] * SIZE
    assert served(ranks, "loaded") == served(ranks, "fp8")[1:]


def greedy_requests(checkpoint: Checkpoint) -> list[Submission]:
    found = [message for batch in scenario(checkpoint.config.vocabulary) for message in batch]
    return [request for request in found if isinstance(request, Submission) and request.params is GREEDY]
