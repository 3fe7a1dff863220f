"""Prompts as token ids: texts and conversations, cut to the context where a client asks for it, refused where not."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.server.errors import APIError, invalid
from octavo.server.protocol import ChatRequest, CompletionRequest, Conversation, SamplingFields
from octavo.server.rendering import Renderer, conversation
from octavo.server.template import TemplateRequestError
from octavo.server.tokenizer import Tokenizer
from octavo.server.tools import describe, usable_tools

RESERVED_NAMES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token"}
)
"""What `chat_template_kwargs` must not set."""


async def render(request: Conversation, renderer: Renderer | None) -> str:
    """Return a conversation as the model's template writes it. Raises APIError (400, 429)."""
    if renderer is None:
        raise invalid(
            "messages",
            "This model has no chat template: use /v1/completions, or start the server with --chat-template.",
            "unsupported_parameter",
        )
    question = await asyncio.to_thread(_question, request, knows_tools=renderer.template.knows_tools)
    try:
        return await renderer.render(question)
    except TemplateRequestError as error:
        raise invalid("messages", f"The chat template refuses this conversation: {error}") from None


def _question(request: Conversation, *, knows_tools: bool) -> bytes:
    extra: Mapping[str, Any] = request.chat_template_kwargs or {}
    reserved = RESERVED_NAMES & extra.keys()
    if reserved:
        raise invalid("chat_template_kwargs", f"'chat_template_kwargs' must not set '{min(reserved)}'.")
    continued = request.continue_final_message is True
    opens_answer = request.add_generation_prompt is not False
    if continued and "add_generation_prompt" in request.model_fields_set and opens_answer:
        raise invalid("continue_final_message", "'continue_final_message' excludes 'add_generation_prompt'.")
    messages = [message.for_template(f"messages[{index}]") for index, message in enumerate(request.messages)]
    tools = [tool.for_template() for tool in usable_tools(request.tools, request.tool_choice)]
    if not knows_tools:
        messages, tools = describe(messages, tools), []
    options = {
        "tools": tools or None,
        "add_generation_prompt": opens_answer and not continued,
        "continue_final_message": continued,
    }
    try:
        return conversation(messages, **options, **extra)
    except UnicodeEncodeError:
        raise invalid("messages", "Invalid 'messages': a text holds half of a surrogate pair.") from None


async def encode_prompt(
    text: str, request: SamplingFields, tokenizer: Tokenizer, context: int, *, add_special_tokens: bool
) -> Sequence[int]:
    """Tokenise a prompt. Raises APIError (400).

    A text that cannot fit into the context, however it is divided, is refused before, unless it is to be truncated.
    """
    longest = tokenizer.longest_piece
    if request.truncate_prompt_tokens is None and longest is not None and len(text) > longest * context:
        size = f"{len(text)} characters, which are at least {-(-len(text) // longest)} tokens"
        raise _too_long(context, size, prompt_field(request))
    return await tokenizer.encode_aside(text, add_special_tokens)


def check_ids(ids: Any, vocabulary: int, param: str, where: str) -> None:
    """Raise the 400 that names the first id which the model does not know."""
    if min(ids) >= 0 and max(ids) < vocabulary:
        return
    position = next(i for i, token in enumerate(ids) if not 0 <= token < vocabulary)
    raise invalid(param, f"Invalid '{where}[{position}]': token ids must be in 0..{vocabulary - 1}.")


def truncate(ids: Sequence[int], request: SamplingFields, context: int, needed: int) -> Sequence[int]:
    """Cut a prompt as `truncate_prompt_tokens` says; -1 keeps what leaves room for `needed` more. Raises APIError."""
    keep, most = request.truncate_prompt_tokens, context - needed
    if keep is None:
        return ids
    if keep == 0 or keep > most:
        raise invalid(
            "truncate_prompt_tokens",
            f"'truncate_prompt_tokens' must be -1, or 1 to {most}: the context holds {context} tokens, "
            f"and {needed} are needed for the answer.",
        )
    keep = most if keep < 0 else keep
    return ids[:keep] if request.truncation_side == "right" else ids[max(0, len(ids) - keep) :]


def needed_room(asked: int | None, *, strict: bool) -> int:
    """Tokens that must fit after a prompt: all that are asked for if `strict`, else one, unless none is asked for."""
    return 1 if asked is None else asked if strict else min(asked, 1)


def limit(request: CompletionRequest | ChatRequest, asked: int | None, room: int, context: int, *, strict: bool) -> int:
    """Tokens that may be generated in the room behind a prompt: as many as asked for, or as fit. Raises APIError (400).

    The error names the prompt where it is too long by itself, and else the field that asks for too much.
    """
    if room < needed_room(asked, strict=False):
        raise _too_long(context, f"{context - room}, which leaves no room for 1 more", prompt_field(request))
    if strict and asked is not None and asked > room:
        completion = isinstance(request, CompletionRequest) or request.max_completion_tokens is None
        field = "max_tokens" if completion else "max_completion_tokens"
        raise _too_long(context, f"{context - room}, which leaves room for {room}: lower '{field}' ({asked})", field)
    return room if asked is None else min(asked, room)


def prompt_field(request: SamplingFields) -> str:
    """What a request calls its prompt."""
    return "messages" if isinstance(request, Conversation) else "prompt"


def _too_long(context: int, size: str, param: str) -> APIError:
    message = f"This model's maximum context length is {context} tokens; the prompt has {size}."
    return invalid(param, message, "context_length_exceeded")
