"""The probes: whether the server lives, is ready, and how far it has come in starting.

No probe asks the engine for anything: each answers from what the server knows already, so it is as quick under load as
when idle. That the engine computes shows in the age of its last finished step, never in the fate of a request.
"""

import asyncio
from collections.abc import Callable

from fastapi import FastAPI
from fastapi.responses import JSONResponse

from octavo.scheduler.messages import Loading

READY = "ok"
LOADING = "loading"
STALL_SECONDS = 30.0
"""An engine that has work and finishes no step for this long is not ready."""
LAG_INTERVAL_SECONDS = 0.5


async def watch_event_loop(lagged: Callable[[float], None]) -> None:
    """Tell again and again how late the event loop comes back to a timer, in seconds. Never ends."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + LAG_INTERVAL_SECONDS
        await asyncio.sleep(LAG_INTERVAL_SECONDS)
        lagged(max(0.0, loop.time() - due))


def add_health_routes(app: FastAPI, condition: Callable[[], str], loading: Callable[[], Loading | None]) -> None:
    """Add the probes. `condition` returns READY, or in a word or two why no request should be sent here.

    `loading` returns how far loading has come, and None from its end on.
    """

    @app.head("/health/live", include_in_schema=False)
    @app.get("/health/live", tags=["operate"], summary="200 while the server runs, loading and restarting included")
    async def live() -> JSONResponse:
        return JSONResponse({"status": READY})

    @app.head("/health", include_in_schema=False)
    @app.get("/health", tags=["operate"], summary="The same as /health/ready")
    @app.head("/health/ready", include_in_schema=False)
    @app.get("/health/ready", tags=["operate"], summary="200 while requests are served, else 503")
    async def ready() -> JSONResponse:
        status = condition()
        return JSONResponse({"status": status}, 200 if status == READY else 503)

    @app.head("/health/startup", include_in_schema=False)
    @app.get("/health/startup", tags=["operate"], summary="200 once the model is loaded; before, 503 and how far it is")
    async def started() -> JSONResponse:
        state = loading()
        if state is None:
            return JSONResponse({"status": READY})
        return JSONResponse({"status": LOADING, "phase": state.phase, "progress": state.progress}, 503)
