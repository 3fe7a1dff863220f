"""The spine is the embedding and everything that was added to it, and nothing else."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.checkpoints import tiny_model
from support.runners import build, cpu_kernels, logits_of

from octavo.model.device import CPU
from octavo.model.placement import Placement
from octavo.model.runner import ModelRunner
from octavo.model.trace import trace
from octavo.model.weights.checkpoint import open_checkpoint

TOKENS = tuple(range(7, 40))


def again(runner: ModelRunner, observe: Callable[[torch.Tensor], None]) -> None:
    """Run the step that was submitted last once more, in as many rows as every kernel takes."""
    rows = 40
    for name in ("tokens", "positions"):
        runner.arena.view(name, rows)[len(TOKENS) :].zero_()
    runner.model.forward(runner.arena, rows, runner._attention, observe)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_the_final_spine_is_the_embedding_plus_two_contributions_a_block(family: str, tmp_path: Path) -> None:
    reference = tiny_model(tmp_path, family, layers=3)
    runner, _ = build(tmp_path)
    logits_of(runner, list(TOKENS))
    added: list[torch.Tensor] = []
    again(runner, lambda part: added.append(part[: len(TOKENS)].double()))
    assert len(added) == 1 + 2 * 3
    assert {part.shape for part in added} == {(len(TOKENS), reference.config.hidden_size)}
    spine = runner.arena.view("spine", len(TOKENS)).double()
    # Six additions, each rounded to float32 once: half a unit in the last place of the largest partial sum.
    bound = 6 * 2.0**-24 * torch.stack(added).cumsum(0).abs().amax(0) * 1.001
    assert bool(((torch.stack(added).sum(0) - spine).abs() <= bound).all())


def test_every_block_hands_on_what_transformers_says(tmp_path: Path) -> None:
    reference = tiny_model(tmp_path, "llama", layers=3)
    checkpoint = open_checkpoint(tmp_path)
    placement = Placement(CPU, torch.float32, cpu_kernels(torch.float32), None)
    found = trace(checkpoint, placement, TOKENS, lambda done, total: None)
    inputs: list[torch.Tensor] = []
    branches: dict[str, list[torch.Tensor]] = {"attention": [], "feed_forward": []}
    for layer in reference.model.layers:
        layer.register_forward_hook(lambda module, given, out: inputs.append(out))
        layer.self_attn.register_forward_hook(lambda module, given, out: branches["attention"].append(out[0]))
        layer.mlp.register_forward_hook(lambda module, given, out: branches["feed_forward"].append(out))
    with torch.no_grad():
        reference(torch.tensor([TOKENS]))
        embedded = reference.model.embed_tokens(torch.tensor(TOKENS))

    def norm(vectors: torch.Tensor) -> float:
        return float(vectors.reshape(len(TOKENS), -1).norm(dim=1).mean())

    assert found.embedding == pytest.approx(norm(embedded), rel=1e-6)
    for index, block in enumerate(found.blocks):
        expected = (branches["attention"][index], branches["feed_forward"][index], inputs[index])
        assert block == pytest.approx([norm(part) for part in expected], rel=1e-5)
    assert len(found.blocks) == 3
    assert found.largest_error < 1e-5


def test_who_observes_changes_nothing(tmp_path: Path) -> None:
    tiny_model(tmp_path, "llama")
    runner, _ = build(tmp_path)
    plain = logits_of(runner, list(TOKENS))
    again(runner, lambda part: None)
    observed = runner.model.logits(runner.arena, torch.arange(8)).clone()
    assert torch.equal(observed, plain[:8])
