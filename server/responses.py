"""POST /v1/responses, without state: text in, text out. What would need memory between requests is refused."""

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request
from pydantic import BeforeValidator, Field, WithJsonSchema
from starlette.responses import Response

from octavo.server import protocol
from octavo.server.choice import Choice, Delta, complete
from octavo.server.errors import APIError
from octavo.server.generate import respond
from octavo.server.prepare import Prepared
from octavo.server.service import Service
from octavo.server.stream import Framing, named_event
from octavo.server.structured import TextFormat
from octavo.server.translation import ONE_ANSWER, as_chat, message, renamed

UNSUPPORTED = {
    **ONE_ANSWER,
    "background": (None, False),
    "conversation": (None,),
    "include": (None, []),
    "max_completion_tokens": (None,),
    "max_tokens": (None,),
    "max_tool_calls": (None,),
    "messages": (None,),
    "previous_response_id": (None,),
    "prompt": (None,),
    "reasoning": (None, {}),
    "store": (None, False),
    "truncation": (None, "disabled"),
}
"""Fields that change the answer and are not built, beside those of all endpoints."""

NAMES = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"}
"""What fields of a chat are called here."""

ROLES = ("user", "assistant", "system", "developer")
TEXT_PARTS = ("input_text", "output_text", "text")
_ITEM = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "type": {"const": "message"},
        "role": {"enum": list(ROLES)},
        "content": protocol.text_schema(TEXT_PARTS),
    },
}


def _items(value: Any) -> Any:
    """Bring a string or a list of items to messages; nothing but text is served."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of messages")  # noqa: TRY004 - pydantic's kind of error
    return [_message(index, item) for index, item in enumerate(value)]


def _message(index: int, item: Any) -> dict[str, Any]:
    if not isinstance(item, dict) or item.get("type", "message") != "message" or item.get("role") not in ROLES:
        raise ValueError(f"item {index} must be a message of the role {', '.join(ROLES)}")
    content = protocol.join_text(item.get("content"), TEXT_PARTS)
    if not isinstance(content, str):
        raise ValueError(f"item {index} needs content: a string or a list of text parts")  # noqa: TRY004
    return {"role": item["role"], "content": content}


class TextOptions(protocol.RequestModel):
    """What the text of an answer is to be."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None
    """Other values would change the answer, and are not built."""


class ResponsesRequest(protocol.SamplingFields):
    """POST /v1/responses."""

    input: Annotated[
        list[protocol.Message],
        BeforeValidator(_items),
        WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _ITEM, "minItems": 1}]}),
    ] = Field(min_length=1, max_length=protocol.MAX_MESSAGES)
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, lt=2**31)
    metadata: dict[str, str] | None = Field(None, max_length=16)
    text: TextOptions | None = None

    @property
    def format(self) -> TextFormat:
        """What the text must follow."""
        return (self.text and self.text.format) or TextFormat()

    def chat(self) -> protocol.ChatRequest:
        """The same as a chat: instructions are its system message."""
        system = [] if self.instructions is None else [message("system", self.instructions)]
        wanted = self.format.as_response_format()
        return as_chat(self, [*system, *self.input], self.max_output_tokens, response_format=wanted)


def add_responses_route(app: FastAPI, service: Service) -> None:
    """Add POST /v1/responses."""

    @app.post("/v1/responses", tags=["generate"], summary="Answer a text or a conversation, without state")
    async def responses(request: Request) -> Response:
        body = await service.read(request, partial(protocol.parse, ResponsesRequest, unsupported=UNSUPPORTED))
        try:
            return await respond(service, request, body.chat(), partial(ResponseTeller, body))
        except APIError as error:
            raise renamed(error, NAMES) from error


class ResponseTeller:
    """Tells an answer as a response with one message, or as the events of its growth."""

    def __init__(self, request: ResponsesRequest, prepared: Prepared) -> None:
        self.framing = Framing(named_event, self._failure, b"")
        self._request = request
        self._prepared = prepared
        self._id = f"resp_{uuid.uuid4().hex}"
        self._message_id = f"msg_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._sent = 0

    async def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """A response that has ended."""
        [last] = await complete(choices)
        return self._ended(choices[0], last.text, last)

    async def events(self, choices: Sequence[Choice]) -> AsyncGenerator[dict[str, Any]]:
        """The events that OpenAI documents for one message of one text, in their order."""
        [choice] = choices
        place = {"item_id": self._message_id, "output_index": 0, "content_index": 0}
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))
        item = self._message("in_progress")
        yield self._event("response.output_item.added", output_index=0, item=item)
        yield self._event("response.content_part.added", **place, part=_text_part(""))
        text, last = "", Delta()
        async with aclosing(choice.deltas()) as deltas:
            async for last in deltas:
                if last.text:
                    text += last.text
                    yield self._event("response.output_text.delta", **place, delta=last.text, logprobs=[])
        response = self._ended(choice, text, last)
        yield self._event("response.output_text.done", **place, text=text, logprobs=[])
        yield self._event("response.content_part.done", **place, part=_text_part(text))
        yield self._event("response.output_item.done", output_index=0, item=response["output"][0])
        yield self._event(f"response.{response['status']}", response=response)

    def _ended(self, choice: Choice, text: str, last: Delta) -> dict[str, Any]:
        stopped = last.finish_reason == "stop"
        status = "completed" if stopped else "incomplete"
        return self._response(
            status,
            output=[self._message(status, text)],
            usage=self._usage(choice),
            incomplete_details=None if stopped else {"reason": "max_output_tokens"},
        )

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        number, self._sent = self._sent, self._sent + 1
        return {"type": kind, "sequence_number": number, **fields}

    def _failure(self, error: APIError) -> dict[str, Any]:
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        problem = {"code": code, "message": renamed(error, NAMES).message}
        return self._event("response.failed", response=self._response("failed", error=problem))

    def _message(self, status: str, text: str | None = None) -> dict[str, Any]:
        content = [] if text is None else [_text_part(text)]
        return {"type": "message", "id": self._message_id, "status": status, "role": "assistant", "content": content}

    def _usage(self, choice: Choice) -> dict[str, Any]:
        prompt = len(self._prepared.prompts[0])
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": choice.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": choice.generated,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + choice.generated,
        }

    def _response(self, status: str, **fields: Any) -> dict[str, Any]:
        """A response object with every field that OpenAI documents as required."""
        request, params = self._request, self._prepared.params[0]
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": request.model,
            "output": [],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": params.temperature,
            "text": {"format": request.format.spelled()},
            "tool_choice": "auto",
            "tools": [],
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
            **fields,
        }


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
