"""POST /v1/messages and /v1/messages/count_tokens in the shape of Anthropic's Messages API: text in, text out."""

import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, BeforeValidator, Field, WithJsonSchema
from starlette.responses import Response

from octavo.server import protocol
from octavo.server.choice import Choice, Delta, complete
from octavo.server.errors import APIError
from octavo.server.generate import respond
from octavo.server.prepare import Prepared
from octavo.server.prompts import render
from octavo.server.service import Service
from octavo.server.stream import Framing, named_event
from octavo.server.translation import ONE_ANSWER, as_chat, message

UNSUPPORTED = {
    **ONE_ANSWER,
    "container": (None,),
    "context_management": (None,),
    "mcp_servers": (None, []),
    "output_config": (None, {}),
    "output_format": (None,),
    "stop": (None,),
    "thinking": (None, {"type": "disabled"}),
}
"""Fields that change the answer and are not built, beside those of all endpoints."""

Text = Annotated[str, BeforeValidator(protocol.join_text), WithJsonSchema(protocol.text_schema())]


class Turn(protocol.RequestModel):
    """One message."""

    role: Literal["user", "assistant"]
    content: Text


class _Conversation(BaseModel):
    """What both routes read."""

    messages: list[Turn] = Field(min_length=1, max_length=protocol.MAX_MESSAGES)
    system: Text | None = None

    def as_messages(self) -> list[protocol.Message]:
        """The conversation of a chat. Turns of one role that follow each other are one, as Anthropic has it."""
        found = [] if self.system is None else [message("system", self.system)]
        for turn in self.messages:
            if found and found[-1].role == turn.role:
                turn = Turn(role=turn.role, content=f"{found.pop().content}{turn.content}")  # noqa: PLW2901
            found.append(message(turn.role, turn.content))
        return found

    def prefill(self) -> dict[str, Any]:
        """An assistant's turn at the end is the beginning of the answer."""
        open_end = self.messages[-1].role == "assistant"
        return {"continue_final_message": True, "add_generation_prompt": False} if open_end else {}


class MessagesRequest(protocol.SamplingFields, _Conversation):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=1, lt=2**31)
    stop_sequences: list[protocol.Stop] | None = Field(None, max_length=protocol.MAX_STOPS)
    temperature: float | None = Field(1.0, ge=0, le=1, allow_inf_nan=False)

    def chat(self) -> protocol.ChatRequest:
        """The same as a chat."""
        return as_chat(self, self.as_messages(), self.max_tokens, **self.prefill()).model_copy(
            update={"stop": self.stop_sequences or []}
        )


class CountTokensRequest(protocol.RequestModel, _Conversation):
    """POST /v1/messages/count_tokens."""

    model: str = Field(max_length=512)

    def chat(self) -> protocol.ChatRequest:
        """The chat whose prompt is counted."""
        return protocol.ChatRequest(model=self.model, messages=self.as_messages(), **self.prefill())


def add_messages_routes(app: FastAPI, service: Service) -> None:
    """Add POST /v1/messages and /v1/messages/count_tokens."""

    @app.post("/v1/messages", tags=["generate"], summary="Answer a conversation, in Anthropic's shape")
    async def messages(request: Request) -> Response:
        body = await service.read(request, partial(protocol.parse, MessagesRequest, unsupported=UNSUPPORTED))
        return await respond(service, request, body.chat(), partial(MessageTeller, body))

    @app.post("/v1/messages/count_tokens", tags=["tokens"], summary="The tokens of a conversation's prompt")
    async def count_tokens(request: Request) -> Response:
        body = await service.read(request, partial(protocol.parse, CountTokensRequest, unsupported=UNSUPPORTED))
        service.check_model(body.model)
        ids = await service.tokenizer.encode_aside(
            await render(body.chat(), service.renderer), add_special_tokens=False
        )
        return JSONResponse({"input_tokens": len(ids)})


class MessageTeller:
    """Tells an answer as a message with one text block, or as the events of its growth."""

    framing = Framing(named_event, APIError.messages_envelope, b"")

    def __init__(self, request: MessagesRequest, prepared: Prepared) -> None:
        self._model = request.model
        self._prompt_tokens = len(prepared.prompts[0])
        self._id = f"msg_{uuid.uuid4().hex}"

    async def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """A message that has ended."""
        [last] = await complete(choices)
        return self._message([{"type": "text", "text": last.text}], self._usage(choices[0]), _ending(last))

    async def events(self, choices: Sequence[Choice]) -> AsyncGenerator[dict[str, Any]]:
        """The events that Anthropic documents for a message of one text, in their order."""
        [choice] = choices
        usage = {"input_tokens": self._prompt_tokens, "output_tokens": 0}
        yield {"type": "message_start", "message": self._message([], usage, _ending(Delta()))}
        yield {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        last = Delta()
        async with aclosing(choice.deltas()) as deltas:
            async for last in deltas:
                if last.text:
                    delta = {"type": "text_delta", "text": last.text}
                    yield {"type": "content_block_delta", "index": 0, "delta": delta}
        yield {"type": "content_block_stop", "index": 0}
        yield {"type": "message_delta", "delta": _ending(last), "usage": self._usage(choice)}
        yield {"type": "message_stop"}

    def _usage(self, choice: Choice) -> dict[str, int]:
        """Anthropic counts tokens that were found in a cache apart from the others."""
        return {
            "input_tokens": self._prompt_tokens - choice.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": choice.cached_tokens,
            "output_tokens": choice.generated,
        }

    def _message(
        self, content: list[dict[str, Any]], usage: dict[str, int], ending: dict[str, str | None]
    ) -> dict[str, Any]:
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self._model}
        return {**head, "content": content, **ending, "usage": usage}


def _ending(last: Delta) -> dict[str, str | None]:
    sequence = last.stop_reason if isinstance(last.stop_reason, str) else None
    reasons = {"stop": "end_turn" if sequence is None else "stop_sequence", "length": "max_tokens"}
    return {"stop_reason": reasons.get(last.finish_reason or ""), "stop_sequence": sequence}
