"""Framed messages over a connected stream socket: length, checksum, and then msgpack.

Length and checksum are four bytes each, little endian. The checksum is a CRC-32 that begins with the frame's number in
its direction, so that a frame which is damaged, lost, doubled or out of order is noticed.

The two ends are unequal on purpose. The engine's end blocks: it has one thread and nothing to do meanwhile, and a slow
server thereby slows the engine instead of filling its memory. The server's end (`octavo.server.client`) never blocks:
it always reads, and buffers what it writes. So the two can never wait for each other.
"""

import socket
import zlib
from typing import Any, Generic, TypeVar

import msgspec

from octavo.scheduler.messages import FromEngine, Shutdown, ToEngine

MAX_FRAME_BYTES = 64 << 20
"""Far above the largest legal frame: 8,192 scored prompt tokens with 20 alternatives each take about 3 MB."""

_HEADER_BYTES = 8
_READ_BYTES = 256 << 10
_NUMBER_MASK = (1 << 32) - 1

_Message = TypeVar("_Message")


class ProtocolError(Exception):
    """The peer sent bytes that are no message, or a message is too large to send."""


class FrameEncoder:
    """Turns messages of one direction into the bytes that go over the socket."""

    def __init__(self) -> None:
        self._frames = 0

    def encode(self, message: ToEngine | FromEngine) -> bytes:
        """Return the next frame. Raises ProtocolError where it is too large."""
        payload = msgspec.msgpack.encode(message)
        if len(payload) > MAX_FRAME_BYTES:
            raise ProtocolError(f"a message of {len(payload)} bytes exceeds the limit of {MAX_FRAME_BYTES}")
        checksum = zlib.crc32(payload, self._frames & _NUMBER_MASK)
        self._frames += 1
        return len(payload).to_bytes(4, "little") + checksum.to_bytes(4, "little") + payload


class FrameDecoder(Generic[_Message]):
    """Turns bytes that arrive cut anywhere into messages. Keeps at most one incomplete frame."""

    def __init__(self, union: Any) -> None:  # a union of types is no `type` to a type checker
        self._decoder: msgspec.msgpack.Decoder[_Message] = msgspec.msgpack.Decoder(union)
        self._buffer = bytearray()
        self._frames = 0

    def feed(self, data: bytes) -> list[_Message]:
        """Return the messages that these bytes complete. Raises ProtocolError; the stream is unusable after it."""
        buffer = self._buffer
        buffer += data
        messages = []
        start = 0
        while len(buffer) - start >= _HEADER_BYTES:
            body = start + _HEADER_BYTES
            length = int.from_bytes(buffer[start : start + 4], "little")
            if length > MAX_FRAME_BYTES:
                raise ProtocolError(f"a frame of {length} bytes exceeds the limit of {MAX_FRAME_BYTES}")
            if len(buffer) < body + length:
                break
            checksum = int.from_bytes(buffer[start + 4 : body], "little")
            messages.append(self._decode(bytes(buffer[body : body + length]), checksum))
            start = body + length
        del buffer[:start]
        return messages

    def _decode(self, payload: bytes, checksum: int) -> _Message:
        if zlib.crc32(payload, self._frames & _NUMBER_MASK) != checksum:
            raise ProtocolError(f"frame {self._frames} is damaged or out of order")
        self._frames += 1
        try:
            return self._decoder.decode(payload)
        except msgspec.DecodeError as error:  # includes ValidationError: well-formed msgpack of the wrong shape
            raise ProtocolError(f"malformed frame: {error}") from error


class Channel:
    """The engine's end."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(True)
        self._connection = connection
        self._decoder: FrameDecoder[ToEngine] = FrameDecoder(ToEngine)
        self._encoder = FrameEncoder()
        self._closed = False

    def receive(self, block: bool) -> list[ToEngine]:
        """Return the messages that have arrived, in order; with `block`, wait until there is at least one.

        A server that is gone reads as its last message, Shutdown. Raises ProtocolError.
        """
        messages: list[ToEngine] = []
        while not self._closed:
            wait = block and not messages
            try:
                data = self._connection.recv(_READ_BYTES, 0 if wait else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return messages
            except ConnectionError:
                data = b""
            if not data:
                self._closed = True
                break
            messages += self._decoder.feed(data)
        return [*messages, Shutdown()]

    def send(self, message: FromEngine) -> None:
        """Send one message, waiting while the server is slow. To a server that is gone, nothing is sent.

        The next `receive` reports the loss, so that there is one way out of the engine's loop.
        """
        if not self._closed:
            self.write(self._encoder.encode(message))

    def write(self, frame: bytes) -> None:
        """Send bytes that make up a frame."""
        try:
            self._connection.sendall(frame)
        except ConnectionError:
            self._closed = True
