"""The routes that generate, and the way of every request from its body to its answer, whatever the shape of both."""

import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import Any, Protocol

from fastapi import FastAPI, Request
from starlette.responses import Response

from octavo.server.answer import ChatWriter, CompletionWriter, Head, Shown
from octavo.server.calls import ToolWriter
from octavo.server.choice import Choice
from octavo.server.life import Origin
from octavo.server.prepare import Prepared
from octavo.server.protocol import ChatRequest, CompletionRequest, parse
from octavo.server.service import Service
from octavo.server.stream import EventStream, Framing, answer_whole
from octavo.server.tools import usable_tools


class Teller(Protocol):
    """Tells an answer in the shape of an endpoint."""

    framing: Framing

    async def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Wait for the answer and tell it in one piece."""
        ...

    def events(self, choices: Sequence[Choice]) -> AsyncGenerator[dict[str, Any]]:
        """Tell the answer as it grows."""
        ...


def add_generation_routes(app: FastAPI, service: Service) -> None:
    """Add the two routes of OpenAI."""

    @app.post("/v1/completions", tags=["generate"], summary="Continue one or several prompts")
    async def completions(request: Request) -> Response:
        body = await service.read(request, partial(parse, CompletionRequest))

        def writer(prepared: Prepared) -> Teller:
            head = Head(body.model, service.fingerprint, f"cmpl-{uuid.uuid4().hex}")
            shown = Shown.of(body, service.tokenizer, body.logprobs)
            return CompletionWriter(head, prepared, shown, body.prompt if body.echo else ())

        return await respond(service, request, body, writer)

    @app.post("/v1/chat/completions", tags=["generate"], summary="Continue a conversation")
    async def chat_completions(request: Request) -> Response:
        body = await service.read(request, partial(parse, ChatRequest))

        def writer(prepared: Prepared) -> Teller:
            head = Head(body.model, service.fingerprint, f"chatcmpl-{uuid.uuid4().hex}")
            shown = Shown.of(body, service.tokenizer, (body.top_logprobs or 0) if body.logprobs else None)
            if usable_tools(body.tools, body.tool_choice):
                return ToolWriter(head, prepared, shown, service.tool_format)
            return ChatWriter(head, prepared, shown)

        return await respond(service, request, body, writer)


async def respond(
    service: Service, request: Request, body: CompletionRequest | ChatRequest, make_teller: Callable[[Prepared], Teller]
) -> Response:
    """Run a request and answer, whole or as a stream. Raises APIError until the answer begins."""
    prompts, operation = (1, "chat") if isinstance(body, ChatRequest) else (len(body.prompt), "text_completion")
    service.check_model(body.model)
    service.admit(prompts * (body.n or 1))  # and again in `start`: this spares a full server the work
    prepared = await service.prepare(body)
    teller = make_teller(prepared)
    origin = Origin.of(request, operation, body.model)
    choices = service.start(body, prepared, await service.grammar(body), origin)
    headers = {"x-octavo-seed": str(prepared.seed)}
    if body.stream:
        return EventStream(teller.events(choices), choices, headers, teller.framing)
    return await answer_whole(request.receive, choices, teller.whole(choices), headers)
