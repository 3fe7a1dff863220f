"""What the endpoints of other shapes share: their request becomes a chat, and its one answer is told their way."""

from collections.abc import Mapping
from typing import Any

from octavo.server.errors import APIError
from octavo.server.protocol import ChatRequest, Message, SamplingFields

ONE_ANSWER: Mapping[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 0, 1),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "prompt_logprobs": (None,),
    "return_token_ids": (None, False),
    "response_format": (None,),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto", {"type": "none"}, {"type": "auto"}),
}
"""Fields of a chat that these endpoints have no place for, with the values that ask for nothing."""


def message(role: str, content: str) -> Message:
    """A message of a chat."""
    return Message.model_validate({"role": role, "content": content})


def as_chat(request: SamplingFields, messages: list[Message], max_tokens: int | None, **more: Any) -> ChatRequest:
    """The chat that a request means: its sampling fields, as far as they were given, and its messages."""
    shared = {name: getattr(request, name) for name in request.model_fields_set & SamplingFields.model_fields.keys()}
    return ChatRequest(messages=messages, max_tokens=max_tokens, **shared, **more)


def renamed(error: APIError, names: Mapping[str, str]) -> APIError:
    """The same error with the parameter called as this endpoint does."""
    param = names.get(error.param or "")
    if param is None:
        return error
    message = error.message.replace(f"'{error.param}'", f"'{param}'")
    return APIError(error.status, message, param=param, code=error.code, headers=error.headers)
