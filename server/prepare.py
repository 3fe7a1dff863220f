"""From a parsed request to what the engine can run: everything a client could get wrong is refused here.

All checks that need the model (its vocabulary, its context) are made before the first byte of an answer is sent.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from octavo.model.philox import choice_seed
from octavo.model.step import SamplingParams
from octavo.scheduler.messages import Ready
from octavo.server.errors import invalid
from octavo.server.prompts import check_ids, encode_prompt, limit, needed_room, render, truncate
from octavo.server.protocol import ChatRequest, CompletionRequest, SamplingFields
from octavo.server.rendering import Renderer
from octavo.server.restrictions import restrictions
from octavo.server.tokenizer import Tokenizer

GREEDY_BELOW = 1e-5
"""Temperatures below this divide logits into infinities; they mean greedy."""

SEED_BITS = 53
"""Drawn seeds survive a client whose JSON numbers are doubles."""


DEFAULT_MAX_TOKENS = 16
"""Of completions; an answer in a chat may fill the context."""


@dataclass(frozen=True, slots=True)
class Served:
    """What requests are checked against."""

    tokenizer: Tokenizer
    renderer: Renderer | None
    """None where the model has no chat template."""
    ready: Ready
    max_tokens_policy: str
    """What becomes of a max_tokens beyond the context: "strict" refuses it, "clamp" takes it for an upper bound."""
    defaults: SamplingParams
    """What holds where a request says nothing."""

    def strict(self, endpoint: Literal["completions", "chat"]) -> bool:
        """Whether a max_tokens beyond the context is refused. By default as OpenAI documents the endpoints."""
        if self.max_tokens_policy == "auto":
            return endpoint == "completions"
        return self.max_tokens_policy == "strict"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that the engine can run: its prompts and how each of them is to be continued."""

    prompts: tuple[tuple[int, ...], ...]
    choices: int
    """Choices for each prompt."""
    max_tokens: tuple[int, ...]
    """For each prompt."""
    seed: int
    """Given by the client or drawn; choice i of every prompt uses choice_seed(seed, i)."""
    params: tuple[SamplingParams, ...]
    """For each choice."""
    salt: bytes

    @property
    def seeds(self) -> tuple[int, ...]:
        """Of all choices of all prompts, in the order of their indices."""
        return tuple(params.seed for params in self.params) * len(self.prompts)


async def prepare_completion(request: CompletionRequest, served: Served) -> Prepared:
    """Tokenise the prompts and check them against the model. Raises APIError (400)."""
    context, strict = served.ready.max_model_len, served.strict("completions")
    given = request.max_tokens if "max_tokens" in request.model_fields_set else None
    asked = DEFAULT_MAX_TOKENS if given is None else given
    prompts: list[tuple[int, ...]] = []
    for index, prompt in enumerate(request.prompt):
        where = f"prompt[{index}]" if len(request.prompt) > 1 else "prompt"
        ids: Sequence[int]
        if isinstance(prompt, str):
            special = request.add_special_tokens is not False
            ids = await encode_prompt(prompt, request, served.tokenizer, context, add_special_tokens=special)
        else:
            ids = prompt
        if not ids:
            raise invalid("prompt", f"Invalid '{where}': it is empty, and this model adds no token of its own.")
        check_ids(ids, served.ready.vocabulary, "prompt", where)
        prompts.append(tuple(truncate(ids, request, context, needed_room(asked, strict=strict))))
    strict = strict and given is not None  # the default gives way to a long prompt
    limits = tuple(limit(request, asked, context - len(prompt), context, strict=strict) for prompt in prompts)
    echoed = request.logprobs if request.echo else None
    return _prepared(request, tuple(prompts), limits, (request.logprobs, echoed), served)


async def prepare_chat(request: ChatRequest, served: Served) -> Prepared:
    """Render and tokenise the conversation and check it against the model. Raises APIError (400)."""
    context, strict = served.ready.max_model_len, served.strict("chat")
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid("top_logprobs", "'top_logprobs' needs 'logprobs': true.")
    asked = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    text, special = await render(request, served.renderer), request.add_special_tokens is True
    ids = await encode_prompt(text, request, served.tokenizer, context, add_special_tokens=special)
    prompt = tuple(truncate(ids, request, context, needed_room(asked, strict=strict)))
    most = limit(request, asked, context - len(prompt), context, strict=strict)
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    return _prepared(request, (prompt,), (most,), (logprobs, None), served)


def _prepared(
    request: SamplingFields,
    prompts: tuple[tuple[int, ...], ...],
    limits: tuple[int, ...],
    logprobs: tuple[int | None, int | None],
    served: Served,
) -> Prepared:
    """logprobs: alternatives of each sampled and of each prompt token."""
    if request.prompt_logprobs is not None and request.stream:
        raise invalid("prompt_logprobs", "'prompt_logprobs' is not available in a stream.")
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options", "'stream_options' needs 'stream': true.")
    choices = 1 if request.n is None else request.n
    if request.best_of not in (None, choices):
        raise invalid("best_of", f"'best_of' must equal 'n' ({choices}) on this server.", "unsupported_parameter")
    seed = request.seed if request.seed is not None else secrets.randbits(SEED_BITS)
    minimum = request.min_tokens or 0
    if minimum > min(limits):
        raise invalid("min_tokens", f"'min_tokens' ({minimum}) is above the room for new tokens ({min(limits)}).")
    params = _sampling_params(request, logprobs, served)
    params_of_choices = tuple(replace(params, seed=choice_seed(seed, i)) for i in range(choices))
    salt = request.cache_salt.encode() if request.cache_salt else b""
    return Prepared(prompts, choices, limits, seed, params_of_choices, salt)


def _sampling_params(
    request: SamplingFields, logprobs: tuple[int | None, int | None], served: Served
) -> SamplingParams:
    """Bring nulls to their defaults and check every token id against the width of the logits. Leaves the seed out."""
    vocabulary, given = served.ready.vocabulary, partial(_given, request, served.defaults)
    scored = [count for count in (logprobs[1], request.prompt_logprobs) if count is not None]
    allowed, bad_words = restrictions(request, served.tokenizer, vocabulary)
    if request.logit_bias:
        check_ids(request.logit_bias, vocabulary, "logit_bias", "logit_bias")
    if request.stop_token_ids:
        check_ids(request.stop_token_ids, vocabulary, "stop_token_ids", "stop_token_ids")
    temperature, top_p, top_k = given("temperature"), given("top_p"), max(0, int(given("top_k")))
    if top_p == 0:
        top_p, top_k = 1.0, 1
    return SamplingParams(
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_p=top_p,
        top_k=0 if top_k >= vocabulary else top_k,
        min_p=given("min_p"),
        repetition_penalty=given("repetition_penalty"),
        presence_penalty=given("presence_penalty"),
        frequency_penalty=given("frequency_penalty"),
        logit_bias=tuple(request.logit_bias.items()),
        allowed=allowed,
        bad_words=bad_words,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        min_tokens=request.min_tokens or 0,
        logprobs=logprobs[0],
        prompt_logprobs=max(scored, default=None),
    )


def _given(request: SamplingFields, defaults: SamplingParams, name: str) -> float:
    """A field's value; the default where it is absent or null."""
    value = getattr(request, name) if name in request.model_fields_set else None
    return float(getattr(defaults, name) if value is None else value)
