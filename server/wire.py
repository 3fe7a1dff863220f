"""HTTP/1.1 as it arrives: uvicorn's protocol with bounds on what a client can send before anybody looks at it."""

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from octavo.server.errors import APIError

MAX_HEAD_BYTES = 64 << 10
"""Request line and headers together."""
MAX_HEADERS = 100


class _TooLargeError(Exception):
    """Raised within the parser, to end it."""


class BoundedProtocol(HttpToolsProtocol):
    """Answers 431 to a head that is too large and 400 to what is no HTTP, in our error shape, and closes.

    Trailers of a chunked body are dropped: they would join the headers after those were judged.
    """

    _reading_head = True
    _head_bytes = 0
    _too_large = False

    def data_received(self, data: bytes) -> None:
        """Take in bytes; of a head that does not end in them, all count."""
        if self._reading_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._reading_head and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._too_large = True
            self.send_400_response("")

    def on_message_begin(self) -> None:
        """Begin to count."""
        super().on_message_begin()
        self._counted = 0

    def on_url(self, url: bytes) -> None:
        """Count the target."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header; drop a trailer."""
        if not self._reading_head:
            return
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            self._count(MAX_HEAD_BYTES)

    def on_headers_complete(self) -> None:
        """Hand on the request; what follows is its body."""
        self._reading_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """What follows is the next request's head."""
        super().on_message_complete()
        self._reading_head, self._head_bytes = True, 0

    def _count(self, size: int) -> None:
        self._counted += size
        if self._counted > MAX_HEAD_BYTES:
            self._too_large = True
            raise _TooLargeError

    def send_400_response(self, msg: str) -> None:
        """Answer and close; nothing that was sent is repeated."""
        message = f"The request line and headers exceed {MAX_HEAD_BYTES} bytes or {MAX_HEADERS} headers."
        error = APIError(431, message) if self._too_large else APIError(400, msg)
        body = msgspec.json.encode(error.envelope())
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()
