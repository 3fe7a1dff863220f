"""F1: the engine is killed again and again while it serves, and every answer is the one it would have been anyway."""

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.checkpoints import tiny_model
from support.live import Live, answer, engine_pid, live_server

from octavo.scheduler.messages import EngineConfig
from octavo.server.revival import RestartPolicy

OFTEN = RestartPolicy(deaths=1000, delays=(0.05,))
SETTINGS: list[dict[str, object]] = [
    {"temperature": 0},
    {"temperature": 1.0, "top_p": 0.9, "logprobs": 3},
    {"temperature": 1.3, "frequency_penalty": 0.7, "repetition_penalty": 1.2, "n": 2},
    {"temperature": 0.8, "min_tokens": 20, "logprobs": 0, "echo": True},
    {"temperature": 1.0, "min_p": 0.02, "presence_penalty": 1.0, "n": 3, "logprobs": 1},
]


def requests(count: int, max_tokens: int) -> list[dict[str, object]]:
    rng = random.Random(5)
    return [
        {
            "prompt": [rng.randrange(3, 40_000) for _ in range(rng.choice([1, 5, 40]))],
            "max_tokens": rng.randrange(max_tokens // 2, max_tokens),
            "seed": rng.randrange(2**62),
            **SETTINGS[number % len(SETTINGS)],
        }
        for number in range(count)
    ]


class Killer(threading.Thread):
    """Kills the engine so often, each time a random while after a new one has begun to compute."""

    def __init__(self, live: Live, kills: int) -> None:
        super().__init__()
        self.live, self.kills, self.done = live, kills, 0
        self.stop = threading.Event()

    def run(self) -> None:
        rng = random.Random(7)
        client = self.live.service.client
        while self.done < self.kills and not self.stop.is_set():
            if client.restarting or not client.metrics.stats.running:
                time.sleep(0.001)
                continue
            time.sleep(rng.random() * 0.5)
            if not client.restarting:
                os.kill(engine_pid(client), signal.SIGKILL)
                self.done += 1
                while not client.restarting:
                    time.sleep(0.001)


def survive(live: Live, kills: int, count: int, max_tokens: int) -> None:
    """Ask undisturbed first, then again and again while the engine is killed: not one answer may differ."""
    asked = requests(count, max_tokens)
    with ThreadPoolExecutor(count) as pool:
        expected = list(pool.map(lambda request: answer(live, request, stream=False), asked))
        killer = Killer(live, kills)
        killer.start()
        try:
            rounds = 0
            while killer.is_alive() or not rounds:
                stream = [number % 2 == rounds % 2 for number in range(count)]
                found = pool.map(lambda pair: answer(live, pair[0], stream=pair[1]), zip(asked, stream, strict=True))
                assert list(found) == expected
                rounds += 1
        finally:
            killer.stop.set()
            killer.join(60)
    assert live.metric("octavo_engine_restarts_total") == killer.done >= kills
    assert live.metric("octavo_requests_resumed_total") >= kills
    assert live.metric('octavo_request_success_total{finished_reason="error"}') == 0
    assert live.metric('octavo_kv_blocks{state="used"}') == 0


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Live]:
    tiny_model(tmp_path, "llama", vocabulary=49_152, max_context=512)
    config = EngineConfig(model=str(tmp_path), dtype="float32", max_num_seqs=8, kv_blocks=96)
    with live_server(config, policy=OFTEN) as live:
        yield live


def test_f1_a_tiny_model_killed_three_times_under_load_answers_as_if_nothing_had_happened(tiny: Live) -> None:
    survive(tiny, kills=3, count=8, max_tokens=100)


@pytest.mark.endurance
def test_f1_a_tiny_model_killed_twenty_times_under_load_answers_as_if_nothing_had_happened(tiny: Live) -> None:
    survive(tiny, kills=20, count=12, max_tokens=200)


@pytest.mark.endurance
def test_f1_smollm2_killed_three_times_under_load_answers_as_if_nothing_had_happened() -> None:
    with live_server(EngineConfig(model="smollm2", max_model_len=1024), policy=OFTEN) as live:
        survive(live, kills=3, count=8, max_tokens=60)
