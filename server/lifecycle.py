"""One serving process, from a bound socket to an exit code."""

import asyncio
import contextlib
import logging
import math
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from octavo.model.weights.configuration import read_config
from octavo.model.weights.locate import locate
from octavo.scheduler.launch import find_launch
from octavo.scheduler.messages import Loading, MemoryLine, Ready
from octavo.server.access import AccessRules
from octavo.server.client import EngineClient
from octavo.server.entrance import Entrance
from octavo.server.health import watch_event_loop
from octavo.server.listening import HTTPServer
from octavo.server.logs import INTERVAL_SECONDS, ActivityLog, log_request
from octavo.server.metrics import Metrics
from octavo.server.page import Page
from octavo.server.rendering import load_template
from octavo.server.revival import RestartPolicy
from octavo.server.sampling_defaults import choose_sampling_defaults
from octavo.server.service import Service
from octavo.server.settings import Settings
from octavo.server.spawning import ENGINE_COMMAND, EngineError, Spawned
from octavo.server.tokenizer_files import load_tokenizer
from octavo.server.values import OptionError

if TYPE_CHECKING:
    from octavo.server.tracing import Tracing

DRAIN_POLL_SECONDS = 0.05
"""How often a server that shuts down looks whether the last request has ended."""

_log = logging.getLogger(__name__)


class Daemon:
    """Listens, runs the engine and serves HTTP until a signal or the end of the engine.

    The first SIGINT or SIGTERM lets running requests finish, while new ones are answered 503. A second one ends
    everything at once, as does the first one while the model is still being loaded.
    """

    def __init__(
        self,
        settings: Settings,
        listener: socket.socket,
        command: Sequence[str] = ENGINE_COMMAND,
        policy: RestartPolicy | None = None,
        spawned: Spawned | None = None,
    ) -> None:
        """`policy`: when to replace the engine; by default what the settings say. `spawned`: the first one."""
        self._settings = settings
        self._policy = policy or _restart_policy(settings)
        self._listener = listener
        self._command = command
        self._spawned = spawned
        server = settings.server
        keys = server.api_key + server.api_key_file
        rules = AccessRules(keys, metrics_open=server.metrics_open, metrics_key=server.metrics_key)
        self._metrics = Metrics(model=server.served_model_name[0])
        self._metrics.observers.append(log_request)
        self._tracing = _start_tracing(server.otlp_traces_endpoint, self._metrics)
        self._entrance = Entrance(self._metrics, rules, server.cors_origin)
        self._main: asyncio.Task[Any] | None = None
        self._serving = False
        self._drain = asyncio.Event()
        """Set by the first signal that comes while serving."""

    async def run(self) -> int:
        """Serve; return the exit code. Raises whatever keeps the server from starting."""
        self._main = asyncio.current_task()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        try:
            async with self._listening() as server:
                reading = loop.run_in_executor(None, _read_model, self._settings)
                reading.add_done_callback(lambda reading: reading.cancelled() or reading.exception())  # if unheard
                client = await EngineClient.start(
                    self._settings.engine,
                    command=self._command,
                    metrics=self._metrics,
                    hear_loading=self._entrance.hear,
                    policy=self._policy,
                    spawned=self._spawned,
                )
                try:
                    self._entrance.hear(Loading(phase="loading the tokenizer", progress=1.0))
                    await self._serve(client, server, await reading)
                    if not self._drain.is_set():
                        return _death(client)
                finally:
                    await client.close()
        except asyncio.CancelledError:
            _log.warning("ended at once by a signal")
        finally:
            if self._tracing is not None:
                self._tracing.close()
        return 0

    def _on_signal(self) -> None:
        if self._serving and not self._drain.is_set():
            self._drain.set()
        elif self._main is not None:
            self._main.cancel()

    @contextlib.asynccontextmanager
    async def _listening(self) -> AsyncIterator[HTTPServer]:
        """Answer HTTP while the block runs. Raises BindError."""
        settings = self._settings.server
        app = Page(self._entrance) if settings.page else self._entrance
        server = HTTPServer(app, self._entrance.sight, settings, self._listener)
        await server.listen()
        _log.info("listening on %s; until the model is loaded, requests are answered with 503", server.url)
        try:
            yield server
        finally:
            await server.end()

    async def _serve(self, client: EngineClient, server: HTTPServer, make: Callable[[EngineClient], Service]) -> None:
        """Serve requests until all is drained or the engine is gone."""
        service = await asyncio.to_thread(make, client)
        for line in describe(client.ready, client.metrics.memory()):
            _log.info("%s", line)
        self._serving = True
        service.open()
        background = (_log_activity(client), watch_event_loop(self._metrics.lagged), self._end(server, service))
        tasks = [asyncio.create_task(work) for work in background]
        self._entrance.open(service)
        _log.info("serving on %s", server.url)
        try:
            await server.until_ended()
        finally:
            await service.close()
            for task in tasks:
                task.cancel()

    async def _end(self, server: HTTPServer, service: Service) -> None:
        """Wait for a signal or the end of the engine, then bring the server to an end."""
        client, timeout = service.client, self._settings.server.shutdown_timeout
        waits = [asyncio.create_task(self._drain.wait()), asyncio.create_task(client.lost.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        service.draining = True
        if self._drain.is_set() and client.live:
            _log.info("shutting down: %d requests may run for up to %g s more", client.live, timeout)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                # The listener stays open meanwhile, so that a router hears 503 instead of a reset connection.
                while client.live and client.alive:
                    await asyncio.sleep(DRAIN_POLL_SECONDS)
                server.should_exit = True
                await asyncio.sleep(math.inf)  # until serving ends, which cancels this task
        server.should_exit = True
        await client.close()  # what still runs ends with an error


def _read_model(settings: Settings) -> Callable[[EngineClient], Service]:
    """Read what the server itself needs of the model; what is left to do needs the engine.

    Raises an exception with an exit code.
    """
    path, server = locate(settings.engine.model), settings.server
    tokenizer = load_tokenizer(path)
    return partial(
        Service,
        tokenizer=tokenizer,
        template=load_template(server.chat_template, tokenizer),
        names=server.served_model_name,
        config=read_config(path),
        settings=server,
        defaults=choose_sampling_defaults(path, wanted=server.use_model_sampling_defaults),
    )


def _start_tracing(endpoint: str | None, metrics: Metrics) -> "Tracing | None":
    """Export traces of every request from now on. Raises OptionError where OpenTelemetry is not installed."""
    if endpoint is None:
        return None
    try:
        from octavo.server.tracing import Tracing  # noqa: PLC0415 - an extra, which takes long to import
    except ImportError:
        raise OptionError(
            "--otlp-traces-endpoint: OpenTelemetry is not installed; run pip install opentelemetry-sdk "
            "opentelemetry-exporter-otlp-proto-http"
        ) from None
    tracing = Tracing.to(endpoint)
    metrics.observers.append(tracing.hear)
    return tracing


def _restart_policy(settings: Settings) -> RestartPolicy:
    policy = RestartPolicy(stall_seconds=settings.server.stall_timeout)
    if find_launch(settings.engine.tensor_parallel_size) is None:
        return policy
    return replace(policy, deaths=0)  # its ranks end with an engine, and only their launcher can start others


async def _log_activity(client: EngineClient) -> None:
    activity = ActivityLog(client.metrics)
    while True:
        await asyncio.sleep(INTERVAL_SECONDS)
        line = activity.line()
        if line is not None:
            _log.info("%s", line)


def _death(client: EngineClient) -> int:
    failure = client.failure or EngineError("the server ended by itself")
    _log.error("%s; the server ends", failure)
    return failure.exit_code


def describe(ready: Ready, memory: Sequence[MemoryLine]) -> Iterator[str]:
    """Yield the lines of the start-up table: the engine, the ledger, what it has room for."""
    pool = ready.blocks * ready.block_size
    request = -(-ready.max_model_len // ready.block_size) * ready.block_size
    rows = {"model": f"{ready.architecture}, {ready.parameters:,} parameters, loaded in {ready.load_seconds:.1f} s"}
    ranks = f", {ready.tensor_parallel_size} ranks, of which this is one" if ready.tensor_parallel_size > 1 else ""
    rows["device"] = f"{ready.device}, {ready.dtype}, kernels {ready.kernels}{ranks}"
    if ready.quantised:
        rows["quantised"] = f"matrices kept in {' and '.join(ready.quantised)}"
    rows |= {line.bucket: f"{line.allocated:,} B of {line.planned:,} B planned" for line in memory}
    rows["budget"] = f"{ready.memory_budget:,} B for weights, cache and activations"
    rows["KV cache"] = f"{ready.blocks:,} blocks of {ready.block_size} = {pool:,} tokens"
    rows["requests"] = f"{pool // request} of full length ({ready.max_model_len:,} tokens) fit into the cache"
    rows["a step"] = f"up to {ready.max_num_seqs} requests, {ready.max_num_batched_tokens:,} tokens"
    rows["batch-invariant"] = f"{'yes' if ready.batch_invariant else 'no'}: {ready.batch_invariance_reason}"
    for name, text in rows.items():
        yield f"{name:<16} {text}"
