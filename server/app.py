"""The HTTP application: routes, and one place where every error becomes an answer."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.server import __version__
from octavo.server.access import AccessRules, check_host
from octavo.server.errors import APIError, answer, internal_error
from octavo.server.gate import Gate, Judge, identify, lookout
from octavo.server.generate import add_generation_routes
from octavo.server.health import add_health_routes
from octavo.server.inspection import add_inspection_routes
from octavo.server.messages_api import add_messages_routes
from octavo.server.metrics import CONTENT_TYPE, Metrics
from octavo.server.openapi import document
from octavo.server.responses import add_responses_route
from octavo.server.service import Service

log = logging.getLogger(__name__)


def create_app(service: Service, rules: AccessRules | None = None, origins: Sequence[str] = ()) -> FastAPI:
    """Make the application around a running engine. `origins`: web pages whose scripts may call it.

    Its `state.sight` is for the wire: what can be refused without the application.
    """
    app = bare_app(service.client.metrics, rules, origins)
    app.openapi = lambda: document(app)  # type: ignore[method-assign]
    add_generation_routes(app, service)
    _add_model_routes(app, service)
    add_health_routes(app, service.condition, lambda: None)
    add_metrics_route(app, service.client.metrics)
    add_inspection_routes(app, service)
    add_responses_route(app, service)
    add_messages_routes(app, service)
    judges = [check_host, (rules or AccessRules()).check, _add_queue_check(app, service)]
    # What pages are told beside an error is the application's to say.
    app.state.sight = lookout([] if origins else judges, service.client.metrics.responded)
    return app


def bare_app(metrics: Metrics, rules: AccessRules | None, origins: Sequence[str]) -> FastAPI:
    """Make an application without routes of its own: who may call it, and the shape of its errors."""
    # Without redirects, which would be put together from the client's Host header.
    app = FastAPI(title="Octavo", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.add_exception_handler(APIError, _api_error)  # type: ignore[arg-type]
    app.add_exception_handler(HTTPException, _http_error)  # type: ignore[arg-type]
    # Each layer wraps those added before it.
    app.add_middleware(Gate, judge=(rules or AccessRules()).check)
    if origins:  # outside of the keys: a browser asks whether it may send one before it sends it
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "x-octavo-seed"],
        )
    app.add_middleware(Gate, judge=check_host)
    app.add_middleware(RequestContext, responded=metrics.responded)
    return app


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


def _add_queue_check(app: FastAPI, service: Service) -> Judge:
    """Refuse to generate where not even one more request could wait, before anything is made of what was sent.

    Returns what judges that, unless the server is draining. What depends on a request, such as the room that its tokens
    or its choices need, is judged once that is known.
    """
    paths = {route.path for route in app.routes if isinstance(route, APIRoute) and "generate" in route.tags}

    def check(scope: Scope) -> None:
        if scope["path"] in paths and scope["method"] == "POST":
            service.admit(1)

    app.user_middleware.append(Middleware(Gate, judge=check))  # within those that ask who it is
    return lambda scope: None if service.draining else check(scope)


async def _api_error(request: Request, error: APIError) -> Response:
    return answer(error, request.scope)


async def _http_error(request: Request, error: HTTPException) -> Response:
    ours = {404: "There is no such route.", 405: f"This route does not answer {request.method}."}
    message = ours.get(error.status_code, str(error.detail))
    return await _api_error(request, APIError(error.status_code, message, headers=error.headers))


class RequestContext:
    """Outermost layer: counts responses, gives each a request id, and turns an unexpected exception into a 500."""

    def __init__(self, app: ASGIApp, responded: Callable[[int], None]) -> None:
        self._app = app
        self._responded = responded

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        identification = identify(scope)
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self._responded(message["status"])
                message["headers"] = [*message["headers"], *identification]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            log.exception("request %s failed", scope["state"]["request_id"])
            if started:
                raise
            await answer(internal_error(), scope)(scope, receive, send_with_id)
