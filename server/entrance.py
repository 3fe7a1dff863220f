"""What the HTTP server calls from its first moment on: while the model loads, a few answers; then the application."""

from collections.abc import Sequence
from typing import NoReturn

from fastapi import FastAPI, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.scheduler.messages import Loading
from octavo.server.access import AccessRules
from octavo.server.app import add_metrics_route, bare_app, create_app
from octavo.server.errors import APIError
from octavo.server.health import LOADING, add_health_routes
from octavo.server.metrics import Metrics
from octavo.server.service import Service


class Entrance:
    """The ASGI application of a server that listens before it can serve."""

    def __init__(self, metrics: Metrics, rules: AccessRules, origins: Sequence[str]) -> None:
        self._rules, self._origins = rules, origins
        self._loading = Loading(phase="starting the engine", progress=0.0)
        self._app = self._loading_app(metrics)

    def hear(self, loading: Loading) -> None:
        """Take in how far loading has come."""
        self._loading = loading

    def open(self, service: Service) -> None:
        """Serve requests from now on."""
        self._app = create_app(service, self._rules, self._origins)

    def sight(self, scope: Scope) -> Response | None:
        """Return what the wire is to answer on sight of a head, if anything."""
        return self._app.state.sight(scope)  # type: ignore[no-any-return]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        await self._app(scope, receive, send)

    def _loading_app(self, metrics: Metrics) -> FastAPI:
        """Answer probes and scrapes, and 503 to everything else."""
        app = bare_app(metrics, self._rules, self._origins)
        app.router.routes.clear()  # /openapi.json
        app.state.sight = lambda _: None
        add_health_routes(app, lambda: LOADING, lambda: self._loading)
        add_metrics_route(app, metrics)
        app.add_route("/{path:path}", _refuse, methods=["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"])
        return app


async def _refuse(request: Request) -> NoReturn:  # noqa: ARG001
    raise APIError(503, "The model is being loaded; try again later.", code=LOADING, headers={"Retry-After": "5"})
