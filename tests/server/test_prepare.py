"""What becomes of a request's numbers: limits, truncation, and the defaults that an operator chooses."""

import asyncio
import json
import logging
from pathlib import Path

import msgspec
import pytest
from support.scripted_engine import ready
from support.vocabularies import smollm2

from octavo.model.step import SamplingParams
from octavo.model.weights.errors import CheckpointError
from octavo.scheduler.messages import EngineConfig
from octavo.server.errors import APIError
from octavo.server.prepare import Prepared, Served, prepare_chat, prepare_completion
from octavo.server.protocol import ChatRequest, CompletionRequest, parse
from octavo.server.rendering import Renderer
from octavo.server.responses import NAMES, ResponsesRequest
from octavo.server.sampling_defaults import choose_sampling_defaults, model_sampling_defaults
from octavo.server.template import ChatTemplate
from octavo.server.template_worker import Rendered, render
from octavo.server.translation import renamed

CONTEXT = 100
READY = ready(EngineConfig(model="scripted", max_model_len=CONTEXT), blocks=100)
TEMPLATE = ChatTemplate("{{ messages[0].content }}")
LONG = list(range(3, 203))
AUTO, CLAMP, STRICT = "auto", "clamp", "strict"
PLAIN = SamplingParams()


class RendererHere(Renderer):
    """What a worker does, without the worker."""

    async def render(self, question: bytes) -> str:
        return msgspec.json.decode(render(self.template, question), type=Rendered).text


def completion(policy: str = AUTO, defaults: SamplingParams = PLAIN, **fields: object) -> Prepared:
    body = json.dumps({"model": "m", "prompt": [5, 6, 7], **fields}).encode()
    return asyncio.run(
        prepare_completion(parse(CompletionRequest, body), Served(smollm2(), None, READY, policy, defaults))
    )


def chat(policy: str = AUTO, **fields: object) -> Prepared:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "a b c"}], **fields}).encode()

    renderer = RendererHere(TEMPLATE)
    return asyncio.run(prepare_chat(parse(ChatRequest, body), Served(smollm2(), renderer, READY, policy, PLAIN)))


def refusal(call: object, *arguments: object, **fields: object) -> APIError:
    with pytest.raises(APIError) as raised:
        call(*arguments, **fields)  # type: ignore[operator]
    return raised.value


def test_max_tokens_beyond_the_context_follow_the_policy() -> None:
    room = CONTEXT - 3
    assert refusal(completion, max_tokens=room + 1).code == "context_length_exceeded"
    assert refusal(completion, STRICT, max_tokens=room + 1).code == "context_length_exceeded"
    assert completion(CLAMP, max_tokens=10**6).max_tokens == (room,)
    assert completion(max_tokens=room).max_tokens == (room,)
    room = CONTEXT - len(chat().prompts[0])
    assert chat().max_tokens == (room,)
    assert chat(max_tokens=10**6).max_tokens == (room,)
    assert chat(CLAMP, max_completion_tokens=10**6).max_tokens == (room,)
    assert refusal(chat, STRICT, max_tokens=room + 1).code == "context_length_exceeded"
    assert chat(STRICT, max_tokens=room).max_tokens == (room,)
    assert chat(STRICT).max_tokens == (room,)


def test_what_is_too_long_is_named_as_the_client_calls_it() -> None:
    body = json.dumps({"model": "m", "input": "a b c", "max_output_tokens": CONTEXT}).encode()
    response = parse(ResponsesRequest, body).chat().model_dump(exclude_unset=True)
    for error, named in (
        (refusal(completion, max_tokens=CONTEXT - 2), "max_tokens"),
        (refusal(completion, prompt=[LONG[:9], LONG[:99]], max_tokens=2), "max_tokens"),
        (refusal(chat, STRICT, max_tokens=CONTEXT), "max_tokens"),
        (refusal(chat, STRICT, max_completion_tokens=CONTEXT), "max_completion_tokens"),
        (refusal(chat, STRICT, max_tokens=1, max_completion_tokens=CONTEXT), "max_completion_tokens"),
        (renamed(refusal(chat, STRICT, **response), NAMES), "max_output_tokens"),
    ):
        assert (error.param, error.code) == (named, "context_length_exceeded")
        assert f"'{named}'" in error.message
    for asked in (1, 2, 10**6):
        assert refusal(completion, prompt=LONG[:100], max_tokens=asked).param == "prompt"
        message = {"role": "user", "content": "a " * 100}
        assert refusal(chat, STRICT, messages=[message], max_tokens=asked).param == "messages"


@pytest.mark.parametrize("policy", [AUTO, CLAMP, STRICT])
def test_one_token_must_fit_unless_none_is_asked_for(policy: str) -> None:
    assert completion(policy, prompt=LONG[:99]).max_tokens == (1,), "the default of 16 gives way"
    for fields in ({}, {"max_tokens": 1}):
        error = refusal(completion, policy, prompt=LONG[:100], **fields)
        assert (error.param, error.code) == ("prompt", "context_length_exceeded")
    assert completion(policy, prompt=LONG[:100], max_tokens=0).max_tokens == (0,)
    assert refusal(completion, policy, prompt=LONG[:101], max_tokens=0).code == "context_length_exceeded"


def test_a26_a_prompt_is_truncated_only_where_the_client_asks_for_it() -> None:
    assert completion(prompt=LONG[:50], truncate_prompt_tokens=10).prompts == (tuple(LONG[40:50]),)
    assert completion(prompt=LONG, truncate_prompt_tokens=10).prompts == (tuple(LONG[-10:]),)
    right = completion(prompt=LONG, truncate_prompt_tokens=10, truncation_side="right")
    assert right.prompts == (tuple(LONG[:10]),)
    assert completion(prompt=LONG[:5], truncate_prompt_tokens=10).prompts == (tuple(LONG[:5]),)
    assert len(completion(prompt=LONG, truncate_prompt_tokens=-1, max_tokens=30).prompts[0]) == CONTEXT - 30
    assert len(completion(prompt=LONG, truncate_prompt_tokens=-1).prompts[0]) == CONTEXT - 16
    assert len(completion(CLAMP, prompt=LONG, truncate_prompt_tokens=-1, max_tokens=10**6).prompts[0]) == CONTEXT - 1
    assert len(completion(prompt=LONG, truncate_prompt_tokens=-1, max_tokens=0).prompts[0]) == CONTEXT
    for keep in (0, CONTEXT, 10**6):
        assert refusal(completion, prompt=LONG, truncate_prompt_tokens=keep).param == "truncate_prompt_tokens"
    assert refusal(completion, prompt=LONG, truncate_prompt_tokens=-2).param == "truncate_prompt_tokens"
    assert refusal(completion, prompt=LONG, truncation_side="middle", truncate_prompt_tokens=1).param


def test_a_conversation_is_truncated_however_long_it_is() -> None:
    text = "word " * 50_000
    assert refusal(chat, messages=[{"role": "user", "content": text}]).code == "context_length_exceeded"
    fields = {"messages": [{"role": "user", "content": text + "end"}], "truncate_prompt_tokens": 7}
    assert chat(**fields).prompts[0] == tuple(smollm2().encode(text + "end", add_special_tokens=False)[-7:])
    assert len(chat(**{**fields, "truncate_prompt_tokens": -1}).prompts[0]) == CONTEXT - 1


def test_prompt_logprobs_and_echoed_ones_share_the_larger_count() -> None:
    assert completion().params[0].prompt_logprobs is None
    assert completion(prompt_logprobs=0).params[0].prompt_logprobs == 0
    assert completion(prompt_logprobs=3).params[0].prompt_logprobs == 3
    assert completion(prompt_logprobs=3, echo=True, logprobs=5).params[0].prompt_logprobs == 5
    assert completion(prompt_logprobs=7, echo=True, logprobs=5).params[0].prompt_logprobs == 7
    assert chat(prompt_logprobs=2).params[0].prompt_logprobs == 2
    assert chat(prompt_logprobs=2).params[0].logprobs is None


def test_a20_prompt_logprobs_are_bounded_and_not_for_streams() -> None:
    for count in (-1, 21, 49_151, 49_152):
        assert refusal(completion, prompt_logprobs=count).param == "prompt_logprobs"
    assert refusal(completion, prompt_logprobs=1, stream=True).param == "prompt_logprobs"


def test_a_models_sampling_defaults_hold_where_a_request_says_nothing(tmp_path: Path) -> None:
    values = {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 50,
        "repetition_penalty": 1.1,
        "eos_token_id": 2,
        "min_p": None,
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    defaults = model_sampling_defaults(tmp_path)
    assert defaults == SamplingParams(temperature=0.6, top_p=0.9, top_k=50, repetition_penalty=1.1)
    for fields in ({}, {"temperature": None, "top_p": None, "top_k": None}):
        params = completion(defaults=defaults, **fields).params[0]
        assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.6, 0.9, 50, 0)
        assert params.repetition_penalty == 1.1
    given = completion(defaults=defaults, temperature=1.0, top_p=1.0, top_k=0, repetition_penalty=1.0).params[0]
    assert (given.temperature, given.top_p, given.top_k, given.repetition_penalty) == (1, 1, 0, 1)
    plain = completion().params[0]
    assert (plain.temperature, plain.top_p, plain.top_k, plain.repetition_penalty) == (1, 1, 0, 1)


def test_a_model_without_sampling_defaults_has_the_usual_ones(tmp_path: Path) -> None:
    assert model_sampling_defaults(tmp_path) == SamplingParams()
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert model_sampling_defaults(tmp_path) == SamplingParams()
    assert model_sampling_defaults(tmp_path / "model.gguf") == SamplingParams()


@pytest.mark.parametrize("value", [-1, 3, "0.5", True, [1], float("nan")])
def test_sampling_defaults_that_make_no_sense_are_refused(tmp_path: Path, value: object) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": value}))
    with pytest.raises(
        CheckpointError,
        match=r"generation_config\.json: temperature is .*; expected a (finite number|number from 0 to 2)",
    ):
        model_sampling_defaults(tmp_path)


def test_sampling_defaults_are_used_only_if_wanted_and_then_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20}')
    caplog.set_level(logging.INFO)
    assert choose_sampling_defaults(tmp_path, wanted=False) == SamplingParams()
    assert not caplog.records
    assert choose_sampling_defaults(tmp_path, wanted=True) == SamplingParams(temperature=0.6, top_k=20)
    assert caplog.messages == ["sampling defaults of the model: temperature 0.6, top_k 20"]
