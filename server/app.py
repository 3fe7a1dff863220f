"""The HTTP application: routes, and one place where every error becomes an answer."""

import hashlib
import logging
import re
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.model.config import ModelConfig
from octavo.server import __version__
from octavo.server.access import AccessRules, Authentication, HostCheck
from octavo.server.answer import ChatWriter, CompletionWriter, Echo, Head, Shown, Writer, chunks, whole
from octavo.server.body import read
from octavo.server.calls import ToolWriter
from octavo.server.choice import Choice
from octavo.server.client import EngineClient, EngineError
from octavo.server.errors import APIError, answer, draining, engine_unavailable, internal_error, invalid, queue_full
from octavo.server.health import READY, STALL_SECONDS, add_health_routes
from octavo.server.inspection import add_inspection_routes
from octavo.server.life import Origin
from octavo.server.messages_api import add_messages_routes
from octavo.server.metrics import CONTENT_TYPE, Metrics
from octavo.server.openapi import document
from octavo.server.prepare import GenerationOptions, Prepared, prepare_chat, prepare_completion
from octavo.server.protocol import ChatRequest, CompletionRequest, SamplingFields, parse
from octavo.server.rendering import Renderer
from octavo.server.responses import add_responses_route
from octavo.server.stream import EventStream, answer_whole
from octavo.server.structured import GrammarCompiler, constraint_of, vocabulary_of
from octavo.server.template import ChatTemplate
from octavo.server.text import TextStream
from octavo.server.tokenizer import Tokenizer
from octavo.server.tool_grammar import with_calls
from octavo.server.tool_parsers import ToolFormat
from octavo.server.tools import choose_format, usable_tools

log = logging.getLogger(__name__)

REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(slots=True)
class Service:
    """What the routes share."""

    client: EngineClient
    tokenizer: Tokenizer
    template: ChatTemplate | None
    names: Sequence[str]
    """Served model names; the first is the one that answers carry by default."""
    config: ModelConfig
    max_body_bytes: int = 4 * 1024 * 1024
    max_queued_requests: int = 1024
    max_queued_tokens: int = 1 << 20
    queue_timeout: float = 0.0
    """Seconds; 0 is no limit. The same of `request_timeout`."""
    request_timeout: float = 0.0
    options: GenerationOptions = field(default_factory=GenerationOptions)
    stall_seconds: float = STALL_SECONDS
    draining: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    tool_call_parser: str = "auto"
    grammars: GrammarCompiler = field(init=False)
    tool_format: ToolFormat = field(init=False)
    renderer: Renderer | None = field(init=False)

    def __post_init__(self) -> None:
        self.tool_format = choose_format(self.tool_call_parser, self.template, self.tokenizer)
        waiting = self.client.ready.max_num_seqs + self.max_queued_requests
        self.renderer = Renderer(self.template, waiting) if self.template is not None else None
        self.grammars = GrammarCompiler(vocabulary_of(self.tokenizer, self.client.ready))

    def open(self) -> None:
        """Prepare the engine for requests that follow a grammar. To be called on the loop."""
        self.client.learn(self.grammars.vocabulary)

    async def close(self) -> None:
        """End what was started beside the engine."""
        await self.grammars.close()
        if self.renderer is not None:
            await self.renderer.close()

    @property
    def fingerprint(self) -> str:
        """Identifies what computes the answers: weights, dtype, code path and version."""
        ready = self.client.ready
        parts = (ready.architecture, ready.weights_digest, ready.dtype, ready.quantised, ready.kernels, __version__)
        return "fp_" + hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    def condition(self) -> str:
        """READY, or why requests should be sent elsewhere."""
        if self.draining:
            return "draining"
        if not self.client.alive:
            return "engine dead"
        if self.client.restarting:
            return "engine restarting"
        return "stalled" if self.client.metrics.heartbeat_age > self.stall_seconds else READY

    def check_model(self, name: str) -> None:
        """Raise the 404 for a model that is not served."""
        if name not in self.names:
            raise APIError(
                404,
                "The requested model is not served here; ask for the list of models.",
                param="model",
                code="model_not_found",
            )

    def admit(self, generations: int, prompt_tokens: int = 0) -> None:
        """Raise 503 or 429 where new work cannot be taken now.

        Whatever its prompt, a request is taken where no other waits: else some could never be.
        """
        metrics = self.client.metrics
        if self.draining:
            metrics.rejected("draining")
            raise draining()
        if not self.client.alive:
            raise engine_unavailable()
        if self.client.live + generations > self.client.ready.max_num_seqs + self.max_queued_requests:
            metrics.rejected("queue_full")
            raise queue_full(f"{self.max_queued_requests} requests")
        if metrics.queued_tokens and metrics.queued_tokens + prompt_tokens > self.max_queued_tokens:
            metrics.rejected("queue_tokens")
            raise queue_full(f"{self.max_queued_tokens} prompt tokens")

    async def grammar(self, request: SamplingFields) -> str | None:
        """Return the grammar that every choice must follow, if there is one. Raises APIError (400, 429)."""
        constraint = constraint_of(request.response_format, request.structured_outputs)
        if isinstance(request, ChatRequest):
            constraint = with_calls(request, constraint, self.tool_format, self.tokenizer)
        if constraint is None:
            return None
        for name in ("ignore_eos", "allowed_token_ids", "bad_words"):
            if getattr(request, name):
                raise invalid(name, f"'{name}' cannot be combined with '{constraint.param}'.")
        return await self.grammars.compile(constraint)

    def start(self, request: SamplingFields, prepared: Prepared, grammar: str | None, origin: Origin) -> list[Choice]:
        """Submit every choice of every prompt. Choice i of prompt p has index p * n + i."""
        generations = len(prepared.prompts) * prepared.choices
        self.admit(generations, prepared.choices * sum(map(len, prepared.prompts)))
        tools = isinstance(request, ChatRequest) and usable_tools(request.tools, request.tool_choice)
        show_stop = request.include_stop_str_in_output is True
        choices: list[Choice] = []
        try:
            for prompt, limit in zip(prepared.prompts, prepared.max_tokens, strict=True):
                for params in prepared.params:
                    text = TextStream(
                        self.tokenizer,
                        request.stop,
                        include_stop=show_stop,
                        # The marks of calls may be special tokens.
                        skip_special_tokens=request.skip_special_tokens is not False and not tools,
                        # What follows a grammar begins with its first character.
                        continuing=isinstance(request, CompletionRequest) or grammar is not None,
                    )
                    generation = self.client.submit(
                        prompt, params, limit, prepared.salt, grammar, request.priority or 0
                    )
                    number = f"/{len(choices)}" if generations > 1 else ""
                    own = replace(origin, identity=origin.identity + number)
                    self.client.metrics.originates(generation.request, own)
                    generation.expire(self.queue_timeout, self.request_timeout)
                    choices.append(Choice(len(choices), generation, text, show_stop_ids=show_stop))
        except EngineError:
            raise engine_unavailable() from None
        return choices


def create_app(service: Service, rules: AccessRules | None = None, origins: Sequence[str] = ()) -> FastAPI:
    """Make the application around a running engine. `origins`: web pages whose scripts may call it."""
    app = bare_app(service.client.metrics, rules, origins)
    app.openapi = lambda: document(app)  # type: ignore[method-assign]
    _add_generation_routes(app, service)
    _add_model_routes(app, service)
    add_health_routes(app, service.condition, lambda: None)
    add_metrics_route(app, service.client.metrics)
    _add_operation_routes(app)
    add_inspection_routes(app, service)
    add_responses_route(app, service)
    add_messages_routes(app, service)
    return app


def bare_app(metrics: Metrics, rules: AccessRules | None, origins: Sequence[str]) -> FastAPI:
    """Make an application without routes of its own: who may call it, and the shape of its errors."""
    # Without redirects, which would be put together from the client's Host header.
    app = FastAPI(title="Octavo", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.add_exception_handler(APIError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    # Each layer wraps those added before it.
    app.add_middleware(Authentication, rules=rules or AccessRules())
    if origins:  # outside of the keys: a browser asks whether it may send one before it sends it
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "x-octavo-seed"],
        )
    app.add_middleware(HostCheck)
    app.add_middleware(RequestContext, responded=metrics.responded)
    return app


def _add_generation_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", tags=["generate"], summary="Continue one or several prompts")
    async def completions(request: Request) -> Response:
        body = await read(request, service.max_body_bytes, partial(parse, CompletionRequest))
        service.check_model(body.model)
        service.admit(len(body.prompt) * (body.n or 1))  # and again below: this spares a full server the work
        prepared = await prepare_completion(body, service.tokenizer, service.client.ready, service.options)
        head = Head(body.model, service.fingerprint, "cmpl")
        writer = CompletionWriter(head, prepared, Shown.of(body, service.tokenizer, body.logprobs))
        if body.echo:
            echoes = [Echo.of(service.tokenizer, *pair) for pair in zip(prepared.prompts, body.prompt, strict=True)]
            for index in range(len(prepared.seeds)):
                writer.echo(index, echoes[index // prepared.choices])
        return await _answer(service, request, body, prepared, writer)

    @app.post("/v1/chat/completions", tags=["generate"], summary="Continue a conversation")
    async def chat_completions(request: Request) -> Response:
        body = await read(request, service.max_body_bytes, partial(parse, ChatRequest))
        service.check_model(body.model)
        service.admit(body.n or 1)
        prepared = await prepare_chat(body, service.tokenizer, service.renderer, service.client.ready, service.options)
        head = Head(body.model, service.fingerprint, "chatcmpl")
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        shown = Shown.of(body, service.tokenizer, logprobs)
        tools = usable_tools(body.tools, body.tool_choice)
        writer = ToolWriter(head, prepared, shown, service.tool_format) if tools else ChatWriter(head, prepared, shown)
        return await _answer(service, request, body, prepared, writer)


async def _answer(
    service: Service, request: Request, body: SamplingFields, prepared: Prepared, writer: Writer
) -> Response:
    """Run the choices and answer, whole or as a stream. Nothing is left running when the client has gone."""
    origin = Origin.of(request, "chat" if isinstance(body, ChatRequest) else "text_completion", body.model)
    choices = service.start(body, prepared, await service.grammar(body), origin)
    headers = {"x-octavo-seed": str(prepared.seed)}
    if body.stream:
        include_usage = body.stream_options is not None and body.stream_options.include_usage is True
        source = chunks(writer, prepared.prompts, choices, include_usage=include_usage)
        return EventStream(source, choices, headers)
    return await answer_whole(request.receive, choices, whole(writer, prepared.prompts, choices), headers)


def _add_model_routes(app: FastAPI, service: Service) -> None:
    def describe(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "octavo",
            "max_model_len": service.client.ready.max_model_len,
        }

    @app.get("/v1/models", tags=["models"], summary="List the served names of the model")
    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [describe(name) for name in service.names]})

    @app.get("/v1/models/{name:path}", tags=["models"], summary="Describe one served name")
    async def model(name: str) -> JSONResponse:
        service.check_model(name)
        return JSONResponse(describe(name))


def add_metrics_route(app: FastAPI, metrics: Metrics) -> None:
    """Add the route that Prometheus scrapes."""

    @app.get("/metrics", tags=["operate"], summary="Prometheus metrics", response_class=PlainTextResponse)
    async def exposition() -> Response:
        return PlainTextResponse(metrics.exposition(), media_type=CONTENT_TYPE)


def _add_operation_routes(app: FastAPI) -> None:
    @app.get("/version", tags=["operate"], summary="The version of this server")
    async def version() -> JSONResponse:
        return JSONResponse({"version": __version__})


async def _api_error(request: Request, error: Exception) -> Response:  # noqa: ARG001
    if not isinstance(error, APIError):
        raise error
    return answer(error)


async def _http_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    if error.status_code == 404:
        return answer(APIError(404, "There is no such route."))
    if error.status_code == 405:
        return answer(APIError(405, f"This route does not answer {request.method}.", headers=error.headers))
    return answer(APIError(error.status_code, str(error.detail)))


class RequestContext:
    """Outermost layer: counts responses, gives each a request id, and turns an unexpected exception into a 500."""

    def __init__(self, app: ASGIApp, responded: Callable[[int], None]) -> None:
        self._app = app
        self._responded = responded

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        identity = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = identity
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self._responded(message["status"])
                message["headers"] = [*message["headers"], (b"x-request-id", identity.encode())]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            log.exception("request %s failed", identity)
            if started:
                raise
            await answer(internal_error())(scope, receive, send_with_id)


def _request_id(scope: Scope) -> str:
    """The client's own id where it is harmless, else a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            given = value.decode("latin-1")
            if REQUEST_ID.fullmatch(given):
                return str(given)
    return uuid.uuid4().hex
