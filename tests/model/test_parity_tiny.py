"""Tiny models of every family, written by transformers, read by Octavo, and compared number by number."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import LLAMA3_ROPE, tiny_model, write_gguf
from support.driving import Driver, Request
from support.runners import build, logits_of, reference_logits

from octavo.model.runner import ModelRunner
from octavo.model.weights.checkpoint import open_checkpoint

BLOCK = 16


@dataclass(frozen=True)
class Case:
    family: str
    heads: int = 6
    kv_heads: int = 2
    options: dict[str, Any] = field(default_factory=dict)


CASES = {
    "llama, a KV head for every 3": Case("llama"),
    "llama, a KV head for each, odd widths": Case("llama", 3, 3, {"width": 72, "ffn_width": 100, "vocabulary": 131}),
    "llama 3.1 rope, one KV head for 8, sharded": Case("llama", 8, 1, {"rope_parameters": LLAMA3_ROPE, "shards": 3}),
    "llama, linear rope, tied": Case(
        "llama",
        options={"tied": True, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "llama with all biases": Case("llama", options={"attention_bias": True, "mlp_bias": True}),
    "mistral": Case("mistral", 8, 1, {"sliding_window": None}),
    "mistral with a sliding window": Case("mistral", 8, 1, {"sliding_window": 24}),
    "qwen 2, tied": Case("qwen2", 3, 3, {"tied": True}),
    "qwen 2, sharded": Case("qwen2", 6, 2, {"shards": 2}),
    "qwen 3, heads wider than the model": Case("qwen3", 8, 1, {"head_dim": 32}),
    "qwen 3, tied": Case("qwen3", 6, 2, {"tied": True}),
}
TOKENS = torch.randint(0, 128, (75,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    case = CASES[request.param]
    directory = tmp_path_factory.mktemp("tiny")
    model = tiny_model(
        directory, case.family, heads=case.heads, kv_heads=case.kv_heads, **{"width": 96, **case.options}
    )
    runner, _ = build(directory, max_tokens=96)
    return model, runner


def test_logits_of_every_position_are_as_close_to_the_exact_ones_as_transformers(pair: Any) -> None:
    model, runner = pair
    ours, theirs = logits_of(runner, TOKENS), reference_logits(model, TOKENS)
    exact = reference_logits(model.double(), TOKENS)
    model.float()
    # Two float32 implementations round in different orders, so neither is the other's oracle: float64 is. A wrong
    # epsilon, scale or rotation shows at 1e-3 and above.
    allowed = 4 * (theirs.double() - exact).abs().max()
    assert (ours.double() - exact).abs().max() <= allowed
    assert allowed < 1e-4
    assert exact.abs().max() > 0.5


def generate(runner: ModelRunner, **driver: Any) -> Request:
    (request,) = Driver(runner, BLOCK, 64, **driver).run([Request(tuple(TOKENS[:30]), 24)])
    return request


def test_the_greedy_continuation_is_that_of_transformers(pair: Any) -> None:
    model, runner = pair
    request = generate(runner)
    # One pass over prompt and output says, position by position, what transformers would have chosen.
    theirs = reference_logits(model, [*TOKENS[:30], *request.output]).argmax(dim=1)
    assert request.output == theirs[29:-1].tolist()


def test_chunks_of_a_prompt_change_no_bit(pair: Any) -> None:
    _, runner = pair
    whole = generate(runner)
    for size in (1, 7, 16):
        chunked = generate(runner, chunk=lambda turn, wanted, size=size: min(wanted, size))
        assert chunked.output == whole.output
        assert chunked.logprobs == whole.logprobs


def test_a_gguf_file_of_the_same_model_gives_the_same_logits(tmp_path: Path) -> None:
    model = tiny_model(tmp_path, "llama", heads=6, kv_heads=2, width=96, tied=True)
    write_gguf(tmp_path / "model.gguf", model)
    from_safetensors, _ = build(tmp_path)
    from_gguf, _ = build(tmp_path / "model.gguf")
    assert torch.equal(logits_of(from_gguf, TOKENS[:40]), logits_of(from_safetensors, TOKENS[:40]))


def test_bfloat16_is_as_close_to_the_exact_logits_as_transformers_in_bfloat16(tmp_path: Path) -> None:
    model = tiny_model(tmp_path, "llama", heads=6, kv_heads=2, width=96, dtype=torch.bfloat16)
    runner, _ = build(tmp_path, torch.bfloat16, max_tokens=96)
    model.set_attn_implementation("eager")  # torch's own attention in bfloat16 fails where ATEN_CPU_CAPABILITY is avx2
    theirs = reference_logits(model, TOKENS).double()
    exact = reference_logits(model.double(), TOKENS)
    ours = logits_of(runner, TOKENS).double()
    assert (ours - exact).pow(2).mean().sqrt() <= 1.2 * (theirs - exact).pow(2).mean().sqrt()


def test_the_checkpoint_of_every_case_has_what_the_case_is_about(tmp_path: Path) -> None:
    case = CASES["llama 3.1 rope, one KV head for 8, sharded"]
    tiny_model(tmp_path, case.family, heads=8, kv_heads=1, **case.options)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    scaling = open_checkpoint(tmp_path).config.rope_scaling
    assert scaling is not None
    assert scaling.kind == "llama3"
