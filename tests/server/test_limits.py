"""Bounds at the edge: what is too much is refused before it costs anything, and the server goes on."""

import asyncio
import gc
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
from support.live import NO_TLS, Live, live_server, story_command
from support.raw import exchange, get, status_of
from support.story_engine import SLOW
from support.vocabularies import smollm2

from octavo.scheduler.messages import EngineConfig
from octavo.server import protocol, wire
from octavo.server.protocol import CompletionRequest
from octavo.server.rendering import Renderer
from octavo.server.structured import GrammarCompiler
from octavo.server.tokenizer import Tokenizer

MEGABYTE = 1 << 20


def resident_bytes() -> int:
    """What this process, in which the server runs, holds in RAM."""
    gc.collect()
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) << 10


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> Iterator[None]:
    """Whatever is there before these tests is not looked through again."""
    gc.freeze()
    yield
    gc.unfreeze()


def post(live: Live, body: bytes, path: str = "/v1/completions") -> httpx.Response:
    return httpx.post(
        live.url + path, content=body, headers={"Content-Type": "application/json"}, timeout=60, verify=NO_TLS
    )


def ordinary(live: Live) -> None:
    assert live.completion(prompt="ordinary", max_tokens=2)["usage"]["completion_tokens"] == 2


def nested(depth: int) -> bytes:
    return b'{"model":"smollm2","prompt":"a","max_tokens":1,"metadata":' + b'{"a":' * depth + b"1" + b"}" * depth + b"}"


def test_a30_objects_nested_too_deep_are_refused(live: Live) -> None:
    assert post(live, nested(protocol.MAX_DEPTH - 1)).status_code == 200
    for depth in (protocol.MAX_DEPTH, 500, 100_000):
        refused = post(live, nested(depth))
        assert refused.status_code == 400
        assert "nested" in refused.json()["error"]["message"]
    lists = b'{"model":"smollm2","prompt":"a","metadata":' + b"[" * 32 + b"]" * 32 + b"}"
    assert post(live, lists).status_code == 400
    ordinary(live)


def test_a30_numbers_of_any_length_are_read_or_refused(live: Live) -> None:
    for number in (b"1" + b"0" * 5000, b"-" + b"9" * 5000, b"1e" + b"9" * 400, b"0." + b"1" * 5000):
        for field in (b"seed", b"max_tokens", b"temperature", b"top_k"):
            response = post(live, b'{"model":"smollm2","prompt":"a","max_tokens":1,"' + field + b'":' + number + b"}")
            assert response.status_code == (200 if (field, number[:2]) == (b"temperature", b"0.") else 400), field
    ordinary(live)


def test_a30_of_a_doubled_key_the_last_counts(live: Live) -> None:
    response = post(live, b'{"model":"other","prompt":"a","model":"smollm2","max_tokens":1}')
    assert response.status_code == 200


def test_a_head_that_is_too_large_is_refused(live: Live) -> None:
    host = "Host: a"
    fits = [f"X-{number}: {number}" for number in range(wire.MAX_HEADERS - 2)]
    assert status_of(exchange(live.url, get("/version", host, *fits))) == 200
    too_many = get("/version", host, *fits, "X-Last: 1")
    too_long = get("/version", host, "X-Long: " + "a" * wire.MAX_HEAD_BYTES)
    long_target = get("/version?" + "a" * wire.MAX_HEAD_BYTES, host)
    for request in (too_many, too_long, long_target):
        for parts in ([request], [request[index : index + 5000] for index in range(0, len(request), 5000)]):
            response = exchange(live.url, parts)
            assert status_of(response) == 431
            assert b"invalid_request_error" in response
            assert b"connection: close" in response
    ordinary(live)


def test_a_head_that_never_ends_is_not_kept(live: Live) -> None:
    """The server's memory stays flat while a client sends 64 MB of header; it stops reading long before."""
    before, sent = resident_bytes(), 0

    def pour() -> Iterator[bytes]:
        nonlocal sent
        yield b"GET /version HTTP/1.1\r\nHost: a\r\nX-Long: "
        for _ in range(1024):
            sent += 1 << 16
            yield b"a" * (1 << 16)

    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        exchange(live.url, pour())
    assert sent < 32 * MEGABYTE, "socket buffers aside"
    assert resident_bytes() - before < 4 * MEGABYTE
    ordinary(live)


REFUSED: dict[str, tuple[dict, str]] = {
    "a08 n": ({"prompt": "a", "n": 5_000_000}, "n"),
    "a08 logprobs": ({"prompt": "a", "logprobs": 10**9}, "logprobs"),
    "a08 token ids": ({"prompt": [999_999_999]}, "prompt"),
    "a15 prompts": ({"prompt": ["a"] * 100_000}, "prompt"),
    "a20 all of the vocabulary": ({"prompt": "a", "prompt_logprobs": -1}, "prompt_logprobs"),
    "stop strings": ({"prompt": "a", "stop": ["a"] * 17}, "stop"),
    "a long stop string": ({"prompt": "a", "stop": "a" * 257}, "stop"),
    "a text beyond any context": ({"prompt": "a" * (3 * MEGABYTE)}, "prompt"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a08_a_refusal_does_no_work_and_keeps_no_memory(live: Live, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    fields, param = REFUSED[case]
    body = json.dumps({"model": "smollm2", **fields}).encode()
    encoded = count_calls(monkeypatch, Tokenizer, "encode")
    started = live.metric("octavo_request_started_total")
    held = [resident_bytes()]
    for _ in range(4):  # an allocator may grow for a thread once or twice; what is kept of a request shows every time
        for _ in range(5):
            refused = post(live, body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        held.append(resident_bytes())
    assert min(after - before for before, after in pairwise(held)) < MEGABYTE
    assert encoded == [], "nothing was tokenised"
    assert live.metric("octavo_request_started_total") == started, "nothing reached the engine"
    ordinary(live)


def test_f17_a_full_server_refuses_before_it_renders_compiles_or_tokenises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = story_command(tmp_path, {})
    config = EngineConfig(model="smollm2", max_num_seqs=1)
    with live_server(config, command=command, max_queued_requests=1) as live, ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(live.completion, prompt=[SLOW], max_tokens=80) for _ in range(2)]
        while live.service.client.live < 2:
            time.sleep(0.01)
        parts = ((Tokenizer, "encode"), (Renderer, "render"), (GrammarCompiler, "compile"))
        work = [count_calls(monkeypatch, *part) for part in parts]
        chat = {"response_format": {"type": "json_object"}, "messages": [{"role": "user", "content": "a"}]}
        for path, fields in (("/v1/completions", {"prompt": "a " * 1000}), ("/v1/chat/completions", chat)):
            refused = live.post(path, **fields)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert work == [[], [], []]
        for answer in waiting:
            assert answer.result()["usage"]["completion_tokens"] == 80
        assert live.chat(**chat, max_tokens=2)["choices"]
        assert all(work), "once there is room it is done"


def count_calls(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> list[int]:
    calls: list[int] = []
    original: Callable[..., object] = getattr(owner, name)

    def counted(self: object, *arguments: object, **options: object) -> object:
        calls.append(len(str(arguments[0])))
        return original(self, *arguments, **options)

    monkeypatch.setattr(owner, name, counted)
    return calls


def test_a_text_that_cannot_fit_is_refused_with_both_numbers(live: Live) -> None:
    longest = live.tokenizer.longest_piece
    assert longest == max(len(live.tokenizer.token_bytes(token)) for token in range(live.tokenizer.vocabulary))
    error = post(live, json.dumps({"model": "smollm2", "prompt": "a" * (2048 * longest + 1)}).encode()).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "2048 tokens" in error["message"]
    assert "at least 2049 tokens" in error["message"]
    messages = [{"role": "user", "content": "a" * (2048 * longest + 1)}]
    error = live.post("/v1/chat/completions", messages=messages).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


@pytest.mark.parametrize(
    ("owner", "name", "path", "fields"),
    [
        (Tokenizer, "encode", "/v1/completions", {"prompt": "a " * 4000}),
        (Tokenizer, "encode", "/tokenize", {"prompt": "a " * 100_000}),
        (CompletionRequest, "model_validate", "/v1/completions", {"prompt": [5] * 50_000}),
    ],
)
def test_d11_slow_work_on_a_request_holds_up_nobody_else(
    live: Live, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, path: str, fields: dict
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    original = getattr(owner, name)

    def slow(*arguments: object, **options: object) -> object:
        begun.set()
        assert go_on.wait(60)
        return original(*arguments, **options)

    monkeypatch.setattr(owner, name, slow)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(live.post, path, **fields)
        assert begun.wait(60)
        try:
            for _ in range(5):
                assert httpx.get(f"{live.url}/health").status_code == 200
            assert not answer.done()
        finally:
            go_on.set()
        assert answer.result().status_code in (200, 400)


def test_d11_the_event_loop_turns_while_two_megabytes_are_tokenised() -> None:
    async def turns_meanwhile() -> int:
        task = asyncio.ensure_future(smollm2().encode_aside("hello world, this is " * 100_000))
        turns = 0
        while not task.done():
            await asyncio.sleep(0.001)
            turns += 1
        assert len(await task) == 500_000 + 1
        return turns

    # A tokenizer that kept the interpreter to itself would leave the loop one turn or two.
    assert asyncio.run(turns_meanwhile()) > 20
