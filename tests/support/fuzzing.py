"""Whatever reads bytes that nobody vouches for: one function for each reader, which fails if the reader does.

A reader may refuse what it is given, in one line and as the error that it declares. `FOUND` keeps what once made one
fail. `support/fuzz.py` searches for more.
"""

import contextlib
import functools
import json
import math
import re
import struct
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from octavo.model.step import SamplingParams
from octavo.model.weights.configuration import directory_config
from octavo.model.weights.errors import CheckpointError
from octavo.model.weights.gguf_file import GGUFFile
from octavo.model.weights.safetensors_header import INDEX, read_header, read_headers
from octavo.scheduler.channel import FrameDecoder, FrameEncoder, ProtocolError
from octavo.scheduler.messages import (
    Abort,
    EngineStats,
    FromEngine,
    Shutdown,
    StepReport,
    Submission,
    ToEngine,
    TokenEvent,
)
from octavo.server.errors import APIError
from octavo.server.messages_api import CountTokensRequest, MessagesRequest
from octavo.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeChat, TokenizeText, parse
from octavo.server.responses import ResponsesRequest
from octavo.server.stream import event, named_event
from octavo.server.template import ChatTemplate, TemplateError, TemplateRequestError

REQUESTS = (
    *(CompletionRequest, ChatRequest, ResponsesRequest, MessagesRequest),
    *(CountTokensRequest, TokenizeText, TokenizeChat, DetokenizeRequest),
)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
}
SUBMISSION = Submission(request=1, prompt=(1, 2), params=SamplingParams(temperature=0.5), max_tokens=3)
REPORT = StepReport(events=(TokenEvent(request=1, token=5, finish="stop"),), stats=EngineStats())
USER = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
BODIES: list[dict[str, object]] = [
    {"prompt": ["a", "b"], "stop": "c", "logit_bias": {"1": 2.0}, "n": 2},
    {"messages": [*USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}], "tools": []},
    {"messages": USER, "max_tokens": 1, "system": "b"},
    {"input": [{"type": "message", "role": "user", "content": "a"}], "text": {"format": {"type": "text"}}},
    {"tokens": [1, 2]},
]
SECRET = "what another file says"
HEADER = {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
SHARD = (len(json.dumps(HEADER))).to_bytes(8, "little") + json.dumps(HEADER).encode() + bytes(4)
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message['content'] }}"
    "{% for call in message.tool_calls or [] %}{{ call | tojson }}{% endfor %}{% endfor %}"
)


def _shaped(shape: list[int]) -> bytes:
    """A file with one tensor of this shape."""
    header = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(4)


def server_sent_events(body: bytes) -> list[tuple[str, str]]:
    """Type and data of each event, as https://html.spec.whatwg.org/multipage/server-sent-events.html reads them."""
    events = []
    kind, data = "", list[str]()
    for line in re.split("\r\n|\n|\r", body.decode("utf-8")):
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if not line:
            if data:
                events.append((kind or "message", "\n".join(data)))
            kind, data = "", []
        elif name == "data":
            data.append(value)
        elif name == "event":
            kind = value
    return events


def one_line(error: Exception) -> None:
    text = str(error)
    assert text
    assert text.isprintable(), repr(text)
    assert len(text) < 2000, len(text)
    assert SECRET not in text


@functools.cache
def surroundings() -> tempfile.TemporaryDirectory[str]:
    """The place of a model, with links that lead out of it and round in it."""
    made = tempfile.TemporaryDirectory(prefix="fuzzing")
    outside, model = Path(made.name, "outside.safetensors"), Path(made.name, "model")
    model.mkdir()
    outside.write_text(SECRET)
    (model / "linked.safetensors").symlink_to(outside)
    (model / "round.safetensors").symlink_to(model / "round.safetensors")
    (model / "folder.safetensors").mkdir()
    (model / "a.safetensors").write_bytes(SHARD)
    return made


def model() -> Path:
    return Path(surroundings().name, "model")


def gguf_header(data: bytes) -> None:
    path = model() / "x.gguf"
    path.write_bytes(data)
    try:
        GGUFFile(path)
    except CheckpointError as error:
        one_line(error)


def safetensors_header(data: bytes) -> None:
    path = model() / "model.safetensors"
    path.write_bytes(data)
    try:
        shapes = read_header(path)
    except CheckpointError as error:
        one_line(error)
    else:
        assert sum(4 * math.prod(shape) for shape in shapes.values()) <= 2 * len(data)


def safetensors_index(data: bytes) -> None:
    (model() / INDEX).write_bytes(data)
    try:
        _, files = read_headers(model())
    except CheckpointError as error:
        one_line(error)
    else:
        assert {file.parent for file in files.values()} <= {model()}


def config(data: bytes) -> None:
    (model() / "config.json").write_bytes(data)
    try:
        directory_config(model())
    except CheckpointError as error:
        one_line(error)


def frames(data: bytes) -> None:
    """Bytes as they are, and as the payload of a frame that is otherwise sound."""
    sound = len(data).to_bytes(4, "little") + zlib.crc32(data).to_bytes(4, "little") + data
    for union in (ToEngine, FromEngine):
        for stream in (data, sound):
            with contextlib.suppress(ProtocolError):
                FrameDecoder[Any](union).feed(stream)


def events(data: bytes) -> None:
    """Any text in an event is that text, and makes no other event."""
    text = data.decode("utf-8", "replace")
    for payload in ({"type": "delta", "text": text}, {"type": "delta", text: [text, {"": text}]}):
        for body, kind in ((event(payload), "message"), (named_event(payload), "delta")):
            [(found, content)] = server_sent_events(body)
            assert (found, json.loads(content)) == (kind, payload)


def requests(data: bytes) -> None:
    """Bodies, on all routes; conversations that are taken are rendered, too."""
    for kind in REQUESTS:
        try:
            request = parse(kind, data)
        except APIError as error:
            told(error)
            continue
        if isinstance(request, ChatRequest | TokenizeChat):
            render(ChatTemplate(TEMPLATE), [message.model_dump() for message in request.messages])


def told(error: APIError) -> None:
    """An error of the client's own, that can be said."""
    assert 400 <= error.status < 500
    assert b"Traceback" not in msgspec.json.encode(error.envelope())


def template(data: bytes) -> None:
    """Templates without digits: what they cost grows with their length alone. The others' limits are tested apart."""
    source = re.sub(r"\d", "", data.decode("utf-8", "replace"))
    conversation = [{"role": "user", "content": SECRET}, {"role": "assistant", "content": "a", "tool_calls": []}]
    with contextlib.suppress(TemplateError):
        render(ChatTemplate(source), conversation)


def render(template: ChatTemplate, messages: list[dict[str, Any]]) -> None:
    with contextlib.suppress(TemplateRequestError):
        assert isinstance(template.render(messages), str)


TARGETS: dict[str, Callable[[bytes], None]] = {
    reader.__name__: reader
    for reader in (gguf_header, safetensors_header, safetensors_index, config, frames, events, requests, template)
}
SEEDS: dict[str, list[bytes]] = {
    "gguf_header": [
        b"GGUF"
        + struct.pack("<IQQ", 3, 1, 1)
        + b"".join(
            (
                *(struct.pack("<Q", 17), b"general.alignment", struct.pack("<II", 4, 32)),
                *(struct.pack("<Q", 1), b"a", struct.pack("<IQIQ", 1, 4, 0, 0), bytes(64)),
            )
        )
    ],
    "safetensors_header": [SHARD],
    "safetensors_index": [json.dumps({"weight_map": {"a": "a.safetensors"}}).encode()],
    "config": [json.dumps(CONFIG).encode()],
    "frames": [FrameEncoder().encode(message)[8:] for message in (Abort(request=1), Shutdown(), SUBMISSION, REPORT)],
    "events": ["a\r\n\ndata: b\u2028\x00é".encode()],
    "requests": [json.dumps({"model": "a", **fields}).encode() for fields in BODIES],
    "template": [TEMPLATE.encode(), b"{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}"],
}
"""What a search begins with."""
FOUND: dict[str, list[bytes]] = {
    "safetensors_header": [_shaped([1] * 9), _shaped([255] * 300_000)],
    "safetensors_index": [
        json.dumps({"weight_map": {"a": name}}).encode()
        for name in (
            *("a\n.safetensors", "\x1b[2J.safetensors", "\0.safetensors", "\ud800.safetensors"),
            *("a" * 300 + ".safetensors", "linked.safetensors", "round.safetensors", "folder.safetensors"),
        )
    ],
}
"""What once ended otherwise than it should."""
