"""What the endpoints of other shapes share: their request becomes a chat, and its one answer is told their way."""

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Protocol

from fastapi import Request
from starlette.responses import Response

from octavo.server.choice import Choice, Delta
from octavo.server.errors import APIError
from octavo.server.life import Origin
from octavo.server.prepare import Prepared, prepare_chat
from octavo.server.protocol import ChatRequest, Message, SamplingFields
from octavo.server.stream import EventStream, Framing, answer_whole

if TYPE_CHECKING:
    from octavo.server.app import Service

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


class Teller(Protocol):
    """Tells one answer in the shape of an endpoint."""

    framing: Framing

    def whole(self, choice: Choice, text: str, last: Delta) -> dict[str, Any]:
        """The answer in one piece."""
        ...

    def events(self, choice: Choice) -> AsyncGenerator[dict[str, Any]]:
        """The answer as it grows."""
        ...


def message(role: str, content: str) -> Message:
    """A message of a chat."""
    return Message.model_validate({"role": role, "content": content})


def as_chat(request: SamplingFields, messages: list[Message], max_tokens: int | None, **more: Any) -> ChatRequest:
    """The chat that a request means: its sampling fields, as far as they were given, and its messages."""
    shared = {name: getattr(request, name) for name in request.model_fields_set & SamplingFields.model_fields.keys()}
    return ChatRequest(messages=messages, max_completion_tokens=max_tokens, **shared, **more)


async def answer_chat(
    service: "Service", request: Request, chat: ChatRequest, teller: Callable[[Prepared], Teller]
) -> Response:
    """Run a chat and answer, whole or as a stream. Raises APIError."""
    service.check_model(chat.model)
    service.admit(1)
    prepared = await prepare_chat(chat, service.tokenizer, service.renderer, service.client.ready, service.options)
    told = teller(prepared)
    origin = Origin.of(request, "chat", chat.model)
    choices = service.start(chat, prepared, await service.grammar(chat), origin)
    headers = {"x-octavo-seed": str(prepared.seed)}
    if chat.stream:
        return EventStream(told.events(choices[0]), choices, headers, told.framing)
    return await answer_whole(request.receive, choices, _whole(told, choices[0]), headers)


async def _whole(teller: Teller, choice: Choice) -> dict[str, Any]:
    text, last = "", Delta()
    async with aclosing(choice.deltas()) as deltas:
        async for last in deltas:
            text += last.text
    return teller.whole(choice, text, last)


def renamed(error: APIError, names: Mapping[str, str]) -> APIError:
    """The same error with the parameter called as this endpoint does."""
    param = names.get(error.param or "")
    if param is None:
        return error
    message = error.message.replace(f"'{error.param}'", f"'{param}'")
    return APIError(error.status, message, param=param, code=error.code, headers=error.headers)
