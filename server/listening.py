"""What lies under the application: an address, a certificate, and uvicorn in the background."""

import asyncio
import contextlib
import math
import socket
import ssl
from collections.abc import Iterator
from functools import partial

import uvicorn
from starlette.types import ASGIApp

from octavo.server.settings import ServerSettings
from octavo.server.values import OptionError
from octavo.server.wire import GuardedProtocol, Sight

KEEP_ALIVE_SECONDS = 75
"""Longer than the 60 s after which common proxies drop an idle connection: they should be the ones to close it."""

SEND_BUFFER_BYTES = 256 << 10
"""What the kernel keeps of an answer that is not read. By itself it would let that grow to several megabytes."""


class BindError(OSError):
    """The address cannot be listened on: one line."""

    exit_code = 73


def bind(host: str, port: int) -> socket.socket:
    """Reserve the address before anything slow happens.

    Raises BindError.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise _bind_error(host, port, error) from error
    return listener


def _bind_error(host: str, port: int, error: OSError) -> BindError:
    return BindError(f"cannot listen on {host} port {port}: {error.strerror}; choose another with --host and --port")


def check_certificate(settings: ServerSettings) -> None:
    """Raise OptionError for a certificate without its key, or files that are something else."""
    if settings.ssl_certfile is None and settings.ssl_keyfile is None:
        return
    if settings.ssl_certfile is None or settings.ssl_keyfile is None:
        missing = "--ssl-keyfile" if settings.ssl_keyfile is None else "--ssl-certfile"
        raise OptionError(f"{missing} is missing: HTTPS needs a certificate and its private key")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
    except OSError as error:
        raise OptionError(
            f"--ssl-certfile, --ssl-keyfile: not a certificate and its private key: {error.strerror or error}"
        ) from None


class HTTPServer(uvicorn.Server):
    """uvicorn in the background, and the signals are the daemon's."""

    def __init__(self, app: ASGIApp, sight: Sight, settings: ServerSettings, listener: socket.socket) -> None:
        http = partial(GuardedProtocol, settings=settings, sight=sight)
        configuration = uvicorn.Config(
            app,
            log_config=None,
            lifespan="off",
            http=http,  # type: ignore[arg-type]
            ws="none",
            server_header=False,
            ssl_certfile=settings.ssl_certfile,
            ssl_keyfile=settings.ssl_keyfile,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            # A client that does not read what it is sent must not keep the server from ending.
            timeout_graceful_shutdown=math.ceil(settings.shutdown_timeout) + 1,
        )
        super().__init__(configuration)
        self._settings = settings
        self._listener = listener
        host, port = listener.getsockname()[:2]
        scheme = "https" if settings.ssl_certfile else "http"
        self.url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    async def listen(self) -> None:
        """Begin to answer. Raises BindError where another process listens on the same address."""
        self._running = asyncio.create_task(self.serve(sockets=[self._listener]))
        while not self.started:
            if self._running.done():
                try:
                    await self._running
                except OSError as error:
                    raise _bind_error(self._settings.host, self._settings.port, error) from error
            await asyncio.sleep(0)

    async def until_ended(self) -> None:
        """Wait for an orderly end, which setting `should_exit` brings about."""
        await asyncio.shield(self._running)

    async def end(self) -> None:
        """End at once, if it has not ended already."""
        for listening in self.servers:
            listening.close()
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the handlers alone."""
        yield
