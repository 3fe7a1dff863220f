"""The whole engine as it runs on a GPU, on CPU tensors: FlashInfer's own classes over emulated modules."""

from collections.abc import Iterator

import pytest
import torch
from support.checkpoints import tiny_model
from support.flashinfer_emulation import Emulation, emulated_flashinfer
from support.gpu_runners import (
    LENGTHS,
    LIMITS,
    SMALL_WORKSPACES,
    FakeCapture,
    Served,
    build_on_gpu,
    scenario,
    serve,
)

from octavo.kvcache.ledger import BUCKETS
from octavo.model.weights.checkpoint import Checkpoint, open_checkpoint
from octavo.model.weights.locate import locate
from octavo.model.workspaces import Workspaces

WORKSPACES = {
    "fa2": SMALL_WORKSPACES,
    "fa3": Workspaces(prefill="fa3", float_bytes=1 << 20),
    "xqa": Workspaces(decode="xqa", float_bytes=1 << 20),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def emulation() -> Iterator[Emulation]:
    with emulated_flashinfer() as found:
        yield found


@pytest.fixture(scope="module")
def default_model() -> Checkpoint:
    return open_checkpoint(locate("smollm2"))


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3", "mistral"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Every family: biases, norms of heads, a sliding window."""
    directory = tmp_path_factory.mktemp(request.param)
    window = {"sliding_window": 24} if request.param == "mistral" else {}
    tiny_model(directory, request.param, heads=4, kv_heads=2, head_dim=64, vocabulary=1100, **window)
    return open_checkpoint(directory)


def serve_scenario(checkpoint: Checkpoint, **options: object) -> Served:
    runner, ledger = build_on_gpu(checkpoint, LIMITS, **options)
    served = serve(runner, LIMITS, *scenario(checkpoint.config.vocabulary))
    assert served.errors == []
    for bucket in BUCKETS:
        if not options.get("reference"):  # which works in no memory of its own
            assert ledger.allocated[bucket] == ledger.plan.planned(bucket)
    return served


@pytest.fixture(scope="module")
def expected(emulation: Emulation, default_model: Checkpoint) -> Served:
    """The reference attention beside the same dense kernels, step by step the same."""
    return serve_scenario(default_model, reference=True)


@pytest.fixture(scope="module")
def expected_tiny(emulation: Emulation, tiny: Checkpoint) -> Served:
    return serve_scenario(tiny, reference=True)


def test_the_scenario_cuts_prompts_finds_prefixes_puts_requests_back_and_mixes_rows(expected: Served) -> None:
    last = expected.reports[-1].stats
    assert last.preemptions_total > 0
    assert last.prefix_hits_total > 0
    assert any(1 < report.stats.step_rows < report.stats.step_tokens == 24 for report in expected.reports)
    assert any(report.stats.step_rows == report.stats.step_tokens > 2 for report in expected.reports)
    assert {number: len(tokens) for number, tokens in expected.tokens.items()} == LENGTHS


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graphs"])
def test_flashinfer_serves_the_default_model_with_the_tokens_of_the_reference(
    emulation: Emulation, default_model: Checkpoint, expected: Served, captured: bool
) -> None:
    served = serve_scenario(default_model, capture=FakeCapture(emulation) if captured else None)
    assert served.tokens == expected.tokens
    assert served.logprobs == expected.logprobs
    assert any(entry is not None for entry in served.logprobs)


@pytest.mark.parametrize("path", WORKSPACES)
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graphs"])
def test_every_attention_path_and_family_yields_the_tokens_of_the_reference(
    emulation: Emulation, tiny: Checkpoint, expected_tiny: Served, path: str, captured: bool
) -> None:
    capture = FakeCapture(emulation) if captured else None
    first = len(emulation.calls.runs)
    served = serve_scenario(tiny, capture=capture, workspaces=WORKSPACES[path])
    assert served.tokens == expected_tiny.tokens
    assert {kind for kind, _ in emulation.calls.runs[first:]} == {"fa2"} | {path}
    if capture is not None:
        assert capture.sizes == [5, 4, 2, 1]
        assert {2, 4} <= set(capture.replayed)


def test_without_look_ahead_the_tokens_are_the_same(
    emulation: Emulation, tiny: Checkpoint, expected_tiny: Served
) -> None:
    runner, _ = build_on_gpu(tiny, LIMITS, capture=FakeCapture(emulation))
    served = serve(runner, LIMITS, *scenario(tiny.config.vocabulary), lookahead=0)
    assert served.tokens == expected_tiny.tokens
