"""HTTP/1.1 as it arrives: uvicorn's protocol with bounds on what a client can send, and how slowly it may do so."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any, cast

from starlette.responses import Response
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from octavo.server.errors import APIError, answer
from octavo.server.settings import ServerSettings

MAX_HEAD_BYTES = 64 << 10
"""Request line and headers together."""
MAX_HEADERS = 100

Sight = Callable[[Scope], Response | None]
"""Returns the answer to a request of which nothing but the head is needed to refuse it, or None."""


class _TooLargeError(Exception):
    """Raised within the parser, to end it."""


class BoundedProtocol(HttpToolsProtocol):
    """Answers 431 to a head that is too large and 400 to what is no HTTP, in our error shape, and closes.

    Trailers of a chunked body are dropped: they would join the headers after those were judged.
    """

    _reading_head = True
    _overhead_bytes = 0
    """Received since something came of them."""
    _too_large = False

    def data_received(self, data: bytes) -> None:
        """Take in bytes. All count that are no piece of a body: no line, and no trailers, are longer than a head."""
        self._overhead_bytes += len(data)
        super().data_received(data)
        if self._overhead_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._too_large = True
            self.send_400_response("")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Drop a trailer."""
        if self._reading_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Hand on the request, unless its head is too large; what follows is its body."""
        size = len(self.url) + sum([len(name) + len(value) + 4 for name, value in self.headers])
        if size > MAX_HEAD_BYTES or len(self.headers) > MAX_HEADERS:
            self._too_large = True
            raise _TooLargeError
        self._reading_head, self._overhead_bytes = False, 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Hand on a piece of the body."""
        self._overhead_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """What follows is the next request's head."""
        super().on_message_complete()
        self._reading_head, self._overhead_bytes = True, 0

    def send_400_response(self, msg: str) -> None:
        """Answer and close; nothing that was sent is repeated."""
        message = f"The request line and headers exceed {MAX_HEAD_BYTES} bytes or {MAX_HEADERS} headers."
        self._answer(APIError(431, message) if self._too_large else APIError(400, msg))

    def _unsupported_upgrade_warning(self) -> None:
        """Say nothing: uvicorn would advise the operator, as often as a client likes, to install what is not used."""

    def _answer(self, error: APIError) -> None:
        self._write(answer(error, self.scope or {}), last=True)
        self.transport.close()

    def _write(self, response: Response, *, last: bool) -> None:
        """Send an answer. `last`: the connection is closed after it."""
        headers = self.server_state.default_headers + response.raw_headers + [(b"connection", b"close")] * last
        head = b"".join(b"%b: %b\r\n" % header for header in headers)
        self.transport.write(STATUS_LINE[response.status_code] + head + b"\r\n" + bytes(response.body))


class _Deadline:
    """A clock that is started and stopped, and acts if it runs out.

    Its timer is moved only when it fires: most clocks are stopped long before that.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, act: Callable[[], None]) -> None:
        """`seconds` 0: it never runs out."""
        self._loop = loop
        self.seconds = seconds
        self._act = act
        self.due: float | None = None
        """When it runs out; None while it is stopped."""
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start it from the beginning."""
        if self.seconds:
            self.due = self._loop.time() + self.seconds
            if self._timer is None:
                self._timer = self._loop.call_at(self.due, self._fire)

    def stop(self) -> None:
        """Stop it."""
        self.due = None

    def close(self) -> None:
        """Stop it for good."""
        self.stop()
        if self._timer is not None:
            self._timer.cancel()

    def _fire(self) -> None:
        self._timer = None
        if self.due is None:
            return
        if self._loop.time() < self.due:
            self._timer = self._loop.call_at(self.due, self._fire)
        else:
            self._act()


class GuardedProtocol(BoundedProtocol):
    """Also ends connections that are too slow, or too many, and refuses on sight of a head.

    A connection that begins a request must bring it to its end in time: bytes that drip in do not extend the deadline.
    One that does not read is cut off, and its request ends as if the client had left.
    """

    def __init__(self, *arguments: Any, settings: ServerSettings, sight: Sight, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._sight = sight
        self._current: RequestResponseCycle | None = None
        """The request whose turn it is; uvicorn's `cycle` is the last that has arrived, and may wait behind it."""
        self._refused = False
        """Whether the request was answered on sight while its body is still to come."""
        self._most_connections = settings.max_connections
        self._receiving = _Deadline(self.loop, settings.receive_timeout, self._give_up)
        self._sending = _Deadline(self.loop, settings.send_timeout, self._cut_off)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to count the time."""
        super().connection_made(transport)
        # Where too little is left unread for `pause_writing`, in a connection that is being closed, too.
        unread = round(1000 * self._sending.seconds)
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unread)
        if len(self.connections) > self._most_connections:
            self._refuse(APIError(503, "The server has too many connections.", code="too_many_connections"))
        else:
            self._receiving.start()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all clocks."""
        self._receiving.close()
        self._sending.close()
        self._let_go()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """The first byte after an answer begins a request, whatever it is."""
        if self._receiving.due is None and (self.cycle is None or self.cycle.response_complete):
            self._receiving.start()
        super().data_received(data)

    def on_headers_complete(self) -> None:
        """The body has a time of its own."""
        super().on_headers_complete()
        self._receiving.start()

    def on_body(self, body: bytes) -> None:
        """Drop what nobody will read."""
        super().on_body(b"" if self._refused else body)

    def on_message_complete(self) -> None:
        """All is there."""
        self._receiving.stop()
        super().on_message_complete()
        if self._refused:
            self._end_refusal()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Hand on a request whose turn it is, unless it can be refused on sight.

        Not if others wait behind it on its connection, or the client does not read: the application can wait.
        """
        if self.transport.is_closing():
            return
        self._current = cycle
        response = None if self.pipeline or self.flow.write_paused else self._sight(cast("Scope", cycle.scope))
        if response is None:
            super()._start_asgi_task(cycle, app)
            return
        cycle.response_started = self._refused = True
        cycle.on_response = lambda: None  # lets go of the connection
        self._write(response, last=not cycle.keep_alive)
        if not cycle.more_body:
            self._end_refusal()

    def _end_refusal(self) -> None:
        """Go on once the body has arrived: a connection that is closed before that is reset, and the answer lost."""
        self._refused, self.cycle.response_complete = False, True
        if not self.cycle.keep_alive:
            self.transport.close()
        self.on_response_complete()

    def pause_writing(self) -> None:
        """The client has more to read than the socket takes."""
        super().pause_writing()
        self._sending.start()

    def resume_writing(self) -> None:
        """It has read enough of it."""
        self._sending.stop()
        super().resume_writing()

    def _cut_off(self) -> None:
        """End the request and then the connection: a stream that is let go first has more computed before it hears."""
        self._let_go()
        self.loop.call_later(0.1, self.transport.abort)

    def _let_go(self) -> None:
        if self._current is not None:
            self._current.disconnected = True
            self._current.message_event.set()

    def _give_up(self) -> None:
        if self.pipeline:  # it may not have been read: that is for its turn
            self._receiving.start()
        elif self._current is not None and self._current.response_started and not self._current.response_complete:
            self._cut_off()
        else:
            self._refuse(APIError(408, "The request did not arrive in time."))

    def _refuse(self, error: APIError) -> None:
        """Answer and close, whether or not the client reads it."""
        self._answer(error)
        self.loop.call_later(1.0, self._cut_off)
