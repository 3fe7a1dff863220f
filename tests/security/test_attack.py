"""Everything at once, on the default model: whoever asks for nothing wrong gets what it gets from a server in peace."""

import contextlib
import os
import random
import signal
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
from support.live import NO_TLS, Live, answer, live_server
from support.socket_soak import BREAKS_ROW, BREAKS_SUBMIT, BREAKS_WAIT, CULPRITS, at_rest

from octavo.scheduler.messages import EngineConfig
from octavo.server.revival import RestartPolicy

NEIGHBOURS = 5
MALFORMED = [
    b"{",
    b"\xff" * 500,
    b'{"model": "smollm2", "prompt": [1e999]}',
    b"[" * 90_000,
    b'{"prompt": "\\ud800"}',
    b"",
]


def asked(number: int) -> dict[str, object]:
    rng = random.Random(number)
    prompt = [rng.randrange(3, 40_000) for _ in range(rng.choice([2, 9, 30]))]
    settings = [{"temperature": 0}, {"temperature": 1.0, "top_p": 0.9, "logprobs": 2}, {"temperature": 1.2, "n": 2}]
    return {"prompt": prompt, "max_tokens": 16, "seed": number, **settings[number % 3]}


def poison(live: Live) -> None:
    for token in (BREAKS_SUBMIT, BREAKS_WAIT, BREAKS_ROW):
        assert live.post("/v1/completions", prompt=[5, token, 7], max_tokens=4).status_code == 500


def leave(live: Live) -> None:
    for number in range(8):
        body = {"model": "smollm2", "stream": True, "prompt": [number + 5] * 20, "max_tokens": 60}
        with httpx.stream("POST", f"{live.url}/v1/completions", json=body, timeout=60, verify=NO_TLS) as response:
            for _ in zip(range(number % 3), response.iter_raw(), strict=False):
                pass


def malform(live: Live) -> None:
    kind = {"content-type": "application/json"}
    for body in MALFORMED:
        assert httpx.post(f"{live.url}/v1/completions", content=body, headers=kind, verify=NO_TLS).status_code == 400
    host, port = live.url.removeprefix("http://").split(":")
    for bytes_ in (b"\0" * 3000, b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n\r\n{"):
        with contextlib.suppress(ConnectionError), socket.create_connection((host, int(port))) as client:
            client.sendall(bytes_)


def kill(live: Live) -> None:
    """Once it computes something."""
    client = live.service.client
    while not client.metrics.stats.running:
        pass
    os.kill(client.ready.process, signal.SIGKILL)


def test_attacks_of_every_kind_at_once_cost_nobody_else_a_token() -> None:
    attacks: list[Callable[[Live], None]] = [poison, leave, malform, kill]
    config = EngineConfig(model="smollm2", max_model_len=512, max_num_seqs=8, fault=CULPRITS)
    policy = RestartPolicy(deaths=5, delays=(0.05,))
    with live_server(config, policy=policy) as live, ThreadPoolExecutor(NEIGHBOURS + len(attacks)) as pool:
        neighbours = [asked(number) for number in range(NEIGHBOURS)]
        expected = [answer(live, request, stream=False) for request in neighbours]
        base = at_rest()
        stormed = [pool.submit(attack, live) for attack in attacks]
        found = [pool.submit(answer, live, request, stream=True) for request in neighbours]
        assert [one.result() for one in found] == expected
        for attack in stormed:
            attack.result()
        metrics = live.service.client.metrics
        assert metrics.engine_restarts == 1
        assert metrics._total("failed_steps_total") > 0
        assert answer(live, neighbours[0], stream=False) == expected[0]
        assert at_rest() == base
        assert live.metric('octavo_kv_blocks{state="used"}') == 0
