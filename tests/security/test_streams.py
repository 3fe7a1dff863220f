"""Whatever bytes a model generates, a stream says them as text, and says nothing else."""

import json
import random
from collections.abc import Iterator

import httpx
import pytest
from support.fuzzing import server_sent_events
from support.live import NO_TLS, Live, live_server, story_command

from octavo.model.weights.locate import locate
from octavo.server.tokenizer import Tokenizer
from octavo.server.tokenizer_files import load_tokenizer

HOSTILE = [
    b'\r\n\r\ndata: {"error": 1}\r\n\r\n',
    b"\n\ndata: [DONE]\n\n",
    b"\rdata: a\r\rid: 7\rretry: 1\r",
    b'event: error\ndata: "}]}\n\n: a\n',
    "\u2028data: a\u2029\u0085\ufeff\u202e".encode(),
    b"\0\x01\x1b[2J\x7f\x08",
    b"a\xff\xfe\xed\xa0\x80\xc3(b\xf0\x9f\x8c",
    b"</script><script>\\u000a\\n\\",
    b"\n" * 300 + b"data: x\n\n" * 100,
    *(random.Random(number).randbytes(200) for number in range(8)),
]


def markers(tokenizer: Tokenizer) -> list[int]:
    """Tokens that make up a prompt alone, as their number and as their text."""
    found = (token for token in range(1000, 2000) if tokenizer.encode(tokenizer.decode([token])) == [token])
    return [token for token, _ in zip(found, HOSTILE, strict=False)]


@pytest.fixture(scope="module")
def narrating(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server around an engine that tells these stories byte by byte, whatever route asks for them."""
    tokenizer = load_tokenizer(locate("smollm2"))
    tokenizer.chat_template = "{{ messages[-1].content }}"
    single = {tokenizer.token_bytes(token): token for token in reversed(range(tokenizer.vocabulary))}
    told = {}
    for marker, text in zip(markers(tokenizer), HOSTILE, strict=True):
        told[marker] = [marker, *(single[byte] for byte in map(bytes, zip(text)) if byte in single)]
    with live_server(command=story_command(tmp_path_factory.mktemp("told"), told), tokenizer=tokenizer) as server:
        yield server


def streamed(live: Live, path: str, fields: dict[str, object]) -> tuple[str, list[str]]:
    """The text, and the types of all events."""
    body = {"model": "smollm2", "stream": True, **fields}
    with httpx.stream("POST", live.url + path, json=body, timeout=60, verify=NO_TLS) as response:
        assert response.status_code == 200
        events = server_sent_events(response.read())
    text, types = "", []
    for name, data in events:
        if data == "[DONE]":
            types.append(data)
            continue
        payload = json.loads(data)
        types.append(name)
        assert name == payload.get("type", "message")
        assert "error" not in payload
        for choice in payload.get("choices", []):
            text += choice.get("text", "") + (choice.get("delta", {}).get("content") or "")
        if name == "response.output_text.delta":
            text += payload["delta"]
        if name == "content_block_delta":
            text += payload["delta"]["text"]
    return text, types


def whole(live: Live, path: str, fields: dict[str, object]) -> str:
    body = live.post(path, **fields).json()
    match path:
        case "/v1/completions":
            return body["choices"][0]["text"]
        case "/v1/chat/completions":
            return body["choices"][0]["message"]["content"]
        case "/v1/responses":
            return body["output"][0]["content"][0]["text"]
        case _:
            return body["content"][0]["text"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_no_text_of_a_model_makes_an_event_of_its_own(narrating: Live, path: str, number: int) -> None:
    marker = markers(narrating.tokenizer)[number]
    story = narrating.tokenizer
    prompt = story.decode([marker])
    user = [{"role": "user", "content": prompt}]
    limit = {"max_output_tokens" if path.endswith("responses") else "max_tokens": 1500}
    asked = {"/v1/completions": {"prompt": [marker]}, "/v1/responses": {"input": prompt}}.get(path, {"messages": user})
    text, types = streamed(narrating, path, {**asked, **limit})
    single = {story.token_bytes(token) for token in range(story.vocabulary)}
    told = b"".join(byte for byte in map(bytes, zip(HOSTILE[number])) if byte in single)
    assert text == whole(narrating, path, {**asked, **limit}) == told.decode("utf-8", "replace")
    end = {"/v1/responses": "response.completed", "/v1/messages": "message_stop"}.get(path, "[DONE]")
    assert types[-1] == end
    assert types.count(end) == 1
