"""From a parsed request to what the engine can run: everything a client could get wrong is refused here.

All checks that need the model (its vocabulary, its context) are made before the first byte of an answer is sent.
"""

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.model.philox import choice_seed
from octavo.model.step import SamplingParams
from octavo.scheduler.messages import Ready
from octavo.server.errors import invalid
from octavo.server.protocol import ChatRequest, CompletionRequest, Conversation, SamplingFields
from octavo.server.template import ChatTemplate, TemplateRequestError
from octavo.server.tokenizer import Tokenizer

GREEDY_BELOW = 1e-5
"""Temperatures below this divide logits into infinities; they mean greedy."""

SEED_BITS = 53
"""Drawn seeds survive a client whose JSON numbers are doubles."""


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


async def prepare_completion(request: CompletionRequest, tokenizer: Tokenizer, ready: Ready) -> Prepared:
    """Tokenise the prompts and check them against the model. Raises APIError (400)."""
    special = request.add_special_tokens is not False
    prompts = []
    for index, prompt in enumerate(request.prompt):
        ids: Sequence[int] = (
            await _encode_prompt(prompt, tokenizer, ready.max_model_len, "prompt", add_special_tokens=special)
            if isinstance(prompt, str)
            else prompt
        )
        where = f"prompt[{index}]" if len(request.prompt) > 1 else "prompt"
        if not ids:
            raise invalid("prompt", f"Invalid '{where}': it is empty, and this model adds no token of its own.")
        check_ids(ids, ready.vocabulary, "prompt", where)
        prompts.append(tuple(ids))
    given = request.max_tokens if "max_tokens" in request.model_fields_set else None
    limits = tuple(_completion_limit(given, len(prompt), ready.max_model_len) for prompt in prompts)
    scoring = request.logprobs if request.echo else None
    return _prepared(request, tuple(prompts), limits, (request.logprobs, scoring), ready)


async def prepare_chat(
    request: ChatRequest, tokenizer: Tokenizer, template: ChatTemplate | None, ready: Ready
) -> Prepared:
    """Render and tokenise the conversation and check it against the model. Raises APIError (400)."""
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid("top_logprobs", "'top_logprobs' needs 'logprobs': true.")
    text = await render(request, template)
    special = request.add_special_tokens is True
    ids = await _encode_prompt(text, tokenizer, ready.max_model_len, "messages", add_special_tokens=special)
    prompt = tuple(ids)
    room = _room(len(prompt), ready.max_model_len, "messages")
    asked = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    limit = room if asked is None else min(asked, room)
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    return _prepared(request, (prompt,), (limit,), (logprobs, None), ready)


async def render(request: Conversation, template: ChatTemplate | None) -> str:
    """Return a conversation as the model's template writes it. Raises APIError (400)."""
    if template is None:
        raise invalid(
            "messages",
            "This model has no chat template: use /v1/completions, or start the server with --chat-template.",
            "unsupported_parameter",
        )
    return await asyncio.to_thread(_render, template, request)


def _render(template: ChatTemplate, request: Conversation) -> str:
    extra: Mapping[str, Any] = request.chat_template_kwargs or {}
    reserved = {"messages", "tools", "add_generation_prompt", "continue_final_message"} & extra.keys()
    if reserved:
        raise invalid("chat_template_kwargs", f"'chat_template_kwargs' must not set '{min(reserved)}'.")
    continued = request.continue_final_message is True
    opens_answer = request.add_generation_prompt is not False
    if continued and "add_generation_prompt" in request.model_fields_set and opens_answer:
        raise invalid("continue_final_message", "'continue_final_message' excludes 'add_generation_prompt'.")
    try:
        return template.render(
            [message.for_template() for message in request.messages],
            add_generation_prompt=opens_answer and not continued,
            continue_final_message=continued,
            **extra,
        )
    except TemplateRequestError as error:
        raise invalid("messages", f"The chat template refuses this conversation: {error}") from None


async def _encode_prompt(
    text: str, tokenizer: Tokenizer, context: int, param: str, *, add_special_tokens: bool
) -> Sequence[int]:
    """Tokenise a prompt, unless it is so long that it cannot fit however it is divided. Raises APIError (400)."""
    longest = tokenizer.longest_piece
    if longest is not None and len(text) > longest * context:
        raise invalid(
            param,
            f"This model's maximum context length is {context} tokens; the prompt has {len(text)} characters, "
            f"which are at least {-(-len(text) // longest)} tokens.",
            "context_length_exceeded",
        )
    return await tokenizer.encode_aside(text, add_special_tokens)


def check_ids(ids: Any, vocabulary: int, param: str, where: str) -> None:
    """Raise the 400 that names the first id which the model does not know."""
    if min(ids) >= 0 and max(ids) < vocabulary:
        return
    position = next(i for i, token in enumerate(ids) if not 0 <= token < vocabulary)
    raise invalid(param, f"Invalid '{where}[{position}]': token ids must be in 0..{vocabulary - 1}.")


def _room(prompt: int, context: int, param: str, needed: int = 1) -> int:
    """Tokens that may follow a prompt. Raises if fewer than `needed` do."""
    room = context - prompt
    if room < needed:
        raise invalid(
            param,
            f"This model's maximum context length is {context} tokens; the prompt has {prompt}, "
            f"which leaves no room for {max(needed, 1)} more.",
            "context_length_exceeded",
        )
    return room


def _completion_limit(given: int | None, prompt: int, context: int) -> int:
    """max_tokens as documented for completions: prompt and max_tokens together may not exceed the context."""
    if given is None:
        return min(16, _room(prompt, context, "prompt"))
    _room(prompt, context, "prompt", needed=given)
    return given


def _prepared(
    request: SamplingFields,
    prompts: tuple[tuple[int, ...], ...],
    limits: tuple[int, ...],
    logprobs: tuple[int | None, int | None],
    ready: Ready,
) -> Prepared:
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options", "'stream_options' needs 'stream': true.")
    choices = 1 if request.n is None else request.n
    if request.best_of not in (None, choices):
        raise invalid("best_of", f"'best_of' must equal 'n' ({choices}) on this server.", "unsupported_parameter")
    seed = request.seed if request.seed is not None else secrets.randbits(SEED_BITS)
    minimum = request.min_tokens or 0
    if minimum > min(limits):
        raise invalid("min_tokens", f"'min_tokens' ({minimum}) is above the room for new tokens ({min(limits)}).")
    params = tuple(_sampling_params(request, choice_seed(seed, i), logprobs, ready) for i in range(choices))
    salt = request.cache_salt.encode() if request.cache_salt else b""
    return Prepared(prompts, choices, limits, seed, params, salt)


def _sampling_params(
    request: SamplingFields, seed: int, logprobs: tuple[int | None, int | None], ready: Ready
) -> SamplingParams:
    """Bring nulls to their defaults and check every token id against the width of the logits."""
    if request.logit_bias:
        check_ids(request.logit_bias, ready.vocabulary, "logit_bias", "logit_bias")
    if request.stop_token_ids:
        check_ids(request.stop_token_ids, ready.vocabulary, "stop_token_ids", "stop_token_ids")
    temperature = _or(request.temperature, 1.0)
    top_p, top_k = _or(request.top_p, 1.0), max(0, int(_or(request.top_k, 0)))
    if top_p == 0:
        top_p, top_k = 1.0, 1
    return SamplingParams(
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_p=top_p,
        top_k=0 if top_k >= ready.vocabulary else top_k,
        min_p=_or(request.min_p, 0.0),
        seed=seed,
        repetition_penalty=_or(request.repetition_penalty, 1.0),
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        logit_bias=tuple(request.logit_bias.items()),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        min_tokens=request.min_tokens or 0,
        logprobs=logprobs[0],
        prompt_logprobs=logprobs[1],
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
