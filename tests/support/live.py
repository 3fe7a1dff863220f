"""A real HTTP server on a real socket, in a thread of the test process, around whatever engine a test wants."""

import asyncio
import contextlib
import json
import ssl
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import uvicorn

from octavo.model.weights.configuration import read_config
from octavo.model.weights.locate import locate
from octavo.scheduler.messages import EngineConfig
from octavo.server.access import AccessRules
from octavo.server.app import create_app
from octavo.server.client import EngineClient
from octavo.server.flags import resolve
from octavo.server.listening import bind
from octavo.server.revival import RestartPolicy
from octavo.server.service import Service
from octavo.server.spawning import ENGINE_COMMAND
from octavo.server.template import ChatTemplate
from octavo.server.tokenizer import Tokenizer
from octavo.server.tokenizer_files import load_tokenizer
from octavo.server.wire import GuardedProtocol

NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Spares each request the reading of all certificates of the world."""

STORY_ENGINE = Path(__file__).parent / "story_engine.py"


@dataclass
class Live:
    """A running server, its service, and the loop that both live on."""

    url: str
    service: Service
    loop: asyncio.AbstractEventLoop

    @property
    def tokenizer(self) -> Tokenizer:
        return self.service.tokenizer

    def post(self, path: str, **fields: object) -> httpx.Response:
        return httpx.post(self.url + path, json={"model": "smollm2", **fields}, timeout=120, verify=NO_TLS)

    def completion(self, **fields: object) -> dict:
        response = self.post("/v1/completions", **fields)
        assert response.status_code == 200, response.text
        return response.json()

    def chat(self, **fields: object) -> dict:
        response = self.post("/v1/chat/completions", **fields)
        assert response.status_code == 200, response.text
        return response.json()

    def stream(self, path: str, **fields: object) -> list[dict]:
        """The chunks of a stream, after checking its framing."""
        body = {"model": "smollm2", "stream": True, **fields}
        with httpx.stream("POST", self.url + path, json=body, timeout=120, verify=NO_TLS) as response:
            text = response.read().decode()
            assert response.status_code == 200, text
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        events = [event for event in text.split("\n\n") if not event.startswith(":")]
        assert events.pop() == ""
        assert events.pop() == "data: [DONE]"
        return [json.loads(event.removeprefix("data: ")) for event in events]

    def stream_lines(self, path: str, **fields: object) -> list[dict]:
        """Whatever a stream says, up to its end, which may be an error."""
        body = {"model": "smollm2", "stream": True, **fields}
        text = httpx.post(self.url + path, json=body, timeout=120).text
        lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]

    def metric(self, name: str) -> float:
        """The value of one sample of /metrics, named with its labels."""
        for line in httpx.get(self.url + "/metrics", verify=NO_TLS).text.splitlines():
            if line.rpartition(" ")[0] == name:
                return float(line.rpartition(" ")[2])
        raise AssertionError(f"no sample {name}")


def engine_pid(client: EngineClient) -> int:
    """The number of the engine's process."""
    return client._process._process.pid


def answer(live: Live, request: dict[str, object], *, stream: bool) -> object:
    """Text, tokens, log-probabilities, finish and usage of every choice."""
    if not stream:
        body = live.completion(**request)
        choices = {choice["index"]: choice for choice in body["choices"]}
        logprobs = {index: choice["logprobs"] for index, choice in choices.items()}
        texts = {index: (choice["text"], choice["finish_reason"]) for index, choice in choices.items()}
        return texts, logprobs, body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]
    chunks = live.stream("/v1/completions", **request, stream_options={"include_usage": True})
    texts, logprobs = {}, {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        index, found = choice["index"], choice["logprobs"]
        texts[index] = (texts.get(index, ("", None))[0] + choice["text"], choice["finish_reason"])
        if found is not None:
            known = logprobs.setdefault(index, {name: [] for name in found})
            for name, values in found.items():
                known[name] += values
        else:
            logprobs.setdefault(index, None)
    usage = chunks[-1]["usage"]
    return texts, logprobs, usage["prompt_tokens"], usage["completion_tokens"]


def story_command(directory: Path, stories: Mapping[int, Sequence[int | None]]) -> tuple[str, ...]:
    """The command of an engine that tells these stories, and fails where one holds None."""
    path = directory / "stories.json"
    path.write_text(json.dumps({str(marker): list(story) for marker, story in stories.items()}))
    return (sys.executable, str(STORY_ENGINE), str(path))


@contextlib.contextmanager
def live_server(
    config: EngineConfig | None = None,
    *,
    command: Sequence[str] = ENGINE_COMMAND,
    model: str = "smollm2",
    tokenizer: Tokenizer | None = None,
    rules: AccessRules | None = None,
    origins: Sequence[str] = (),
    policy: RestartPolicy | None = None,
    **settings: object,
) -> Iterator[Live]:
    """Serve until the block ends, with these settings of the server; the engine must be gone then."""
    started: threading.Event = threading.Event()
    box: dict[str, object] = {}
    path = locate(model)
    tokenizer = tokenizer or load_tokenizer(path)
    source = tokenizer.chat_template
    template = None if source is None else ChatTemplate(source, tokenizer.bos_token, tokenizer.eos_token)

    async def serve() -> None:
        client = await EngineClient.start(config or EngineConfig(model=model), command=command, policy=policy)
        service = Service(
            client,
            tokenizer,
            template,
            ("smollm2", "alias/with-slash"),
            read_config(path),
            resolve({name: str(value) for name, value in settings.items()}, {}).server,
        )
        service.open()
        listener = bind("127.0.0.1", 0)
        app = create_app(service, rules, origins)
        server = uvicorn.Server(
            uvicorn.Config(
                app,
                http=partial(GuardedProtocol, settings=service.settings, sight=app.state.sight),
                ws="none",
                log_level="warning",
                timeout_graceful_shutdown=2,
                lifespan="off",
            )
        )
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        box.update(live=Live(url, service, asyncio.get_running_loop()), server=server)
        started.set()
        try:
            await server.serve(sockets=[listener])
        finally:
            await service.close()
            await client.close()
            listener.close()

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            box["error"] = error
            started.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert started.wait(120)
        if "error" in box:
            raise box["error"]  # type: ignore[misc]
        live = box["live"]
        assert isinstance(live, Live)
        for _ in range(500):
            with contextlib.suppress(httpx.TransportError):
                httpx.get(live.url + "/version")
                break
        yield live
    finally:
        if "server" in box:
            box["server"].should_exit = True  # type: ignore[attr-defined]
        thread.join(30)
        assert not thread.is_alive()
    if "error" in box:
        raise box["error"]  # type: ignore[misc]
