"""SmolLM2-135M-Instruct from its GGUF file against transformers on the same numbers, both in float32.

Octavo runs thirty prompts in one changing batch. Transformers then reads each prompt with Octavo's answer in one pass:
what it would have chosen at every position, given the same past, is the argmax of its logits there.
"""

from dataclasses import replace

import pytest
import torch
from support.driving import GREEDY, Driver, Request
from support.prompts import LONG_TEXT, LONG_TOKENS, TEXTS
from support.runners import build
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from octavo.model.config import ModelConfig
from octavo.model.step import TokenLogprobs
from octavo.model.weights.checkpoint import Checkpoint, open_checkpoint
from octavo.model.weights.locate import locate
from octavo.server.tokenizer_files import load_tokenizer

NEW_TOKENS = 64
TIE = 1e-4
"""Logits closer than this may rank either way: rounding in float32 was seen to set the two sides 8e-5 apart."""


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint(locate("smollm2"))


@pytest.fixture(scope="module")
def reference(checkpoint: Checkpoint) -> LlamaForCausalLM:
    tensors = {name: checkpoint.read(name).float() for name in checkpoint.shapes}
    with torch.device("meta"):
        model = LlamaForCausalLM(hugging_face(checkpoint.config))
    model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    assert not any(parameter.is_meta for parameter in [*model.parameters(), *model.buffers()])
    assert model.num_parameters() == sum(tensor.numel() for tensor in tensors.values()) == 134_515_008
    return model.eval()


def hugging_face(config: ModelConfig) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=config.width,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        intermediate_size=config.ffn_width,
        vocab_size=config.vocabulary,
        max_position_embeddings=config.max_context,
        rms_norm_eps=config.norm_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=config.tied_embeddings,
    )


@pytest.fixture(scope="module")
def answered(checkpoint: Checkpoint) -> list[Request]:
    tokenizer = load_tokenizer(locate("smollm2"))
    prompts = [tuple(tokenizer.encode(text)) for text in TEXTS]
    prompts.append(tuple(tokenizer.encode(LONG_TEXT)[:LONG_TOKENS]))
    assert len(prompts) == 30
    assert len(prompts[-1]) == LONG_TOKENS
    requests = [Request(prompt, NEW_TOKENS, replace(GREEDY, prompt_logprobs=0)) for prompt in prompts]
    runner, _ = build(checkpoint, max_model_len=2048, max_rows=32, max_tokens=256, blocks=512)
    Driver(runner, 16, 256).run(requests, delays=[index // 6 for index in range(30)])
    return requests


@torch.no_grad()
def reference_logits(model: LlamaForCausalLM, request: Request) -> Tensor:
    """Logits for every token of prompt and output but the first: float32 [tokens - 1, vocabulary]."""
    return model(torch.tensor([[*request.prompt, *request.output][:-1]])).logits[0]


def worst_difference(entries: list[TokenLogprobs], expected: Tensor) -> float:
    """How far reported log-probabilities lie from those of logits [entries, vocabulary]."""
    tokens = torch.tensor([[entry.token] for entry in entries])
    ours = torch.tensor([entry.logprob for entry in entries])
    return float((ours - expected.log_softmax(dim=1).gather(1, tokens)[:, 0]).abs().max())


def test_greedy_answers_and_log_probabilities_are_those_of_transformers(
    answered: list[Request], reference: LlamaForCausalLM
) -> None:
    for request in answered:
        assert len(request.output) == NEW_TOKENS
        logits = reference_logits(reference, request)
        assert worst_difference(request.prompt_logprobs + request.logprobs, logits) < 1e-3
        assert [entry.token for entry in request.logprobs] == request.output
        choices = logits[-NEW_TOKENS:]
        given_up = choices.amax(dim=1) - choices.gather(1, torch.tensor(request.output)[:, None])[:, 0]
        # 0 where both chose the same token.
        assert float(given_up.max()) < TIE, request.prompt[:10]
