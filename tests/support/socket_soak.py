"""Many requests over real sockets, to a server whose engine is broken in every way there is while it serves them."""

import contextlib
import json
import logging
import random
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Lock

import httpx
import pytest
from support.history import Checker, Surroundings
from support.live import NO_TLS, Live, answer

from octavo.scheduler.messages import TokenEvent
from octavo.server.client import EngineClient, Generation

log = logging.getLogger("soak")

CLIENTS = 16
COMPARED = 20
"""One request in so many is compared with what it gets alone: 5 %."""
BREAKS_SUBMIT, BREAKS_WAIT, BREAKS_ROW = 40_001, 40_002, 40_003
CULPRITS = (
    f"step-raises:token={BREAKS_SUBMIT}",
    f"wait-raises:token={BREAKS_WAIT}",
    f"row-fails:token={BREAKS_ROW}",
)
DEATHS = (
    *("engine-killed", "report-corrupted", "report-truncated", "report-doubled"),
    *("report-swapped", "engine-exits", "step-hangs"),
)


def faults(deaths: int, steps: int) -> tuple[str, ...]:
    """Three requests that cannot be computed, and so many engines that die, each after some steps more than `steps`.

    The deaths come first: of the faults of one step, one that raises is the last to happen.
    """
    kinds = (DEATHS[life % len(DEATHS)] for life in range(deaths))
    return (*(f"{kind}:step={steps + 7 * life % 50}:life={life}" for life, kind in enumerate(kinds)), *CULPRITS)


def request(number: int) -> dict[str, object]:
    """What the request of this number asks for."""
    rng = random.Random(number)
    settings: list[dict[str, object]] = [
        {"temperature": 0},
        {"temperature": 1.0, "top_p": 0.9, "logprobs": 2},
        {"temperature": 1.2, "frequency_penalty": 0.5, "n": 2},
        {"temperature": 0.8, "logprobs": 0, "echo": True},
    ]
    shared = [random.Random(number % 5).randrange(3, 40_000) for _ in range(rng.choice([0, 20, 40]))]
    prompt = [*shared, *(rng.randrange(3, 40_000) for _ in range(rng.choice([1, 5, 30])))]
    fields = {"prompt": prompt, "max_tokens": rng.choice([1, 2, 4, 6, 24]), "seed": rng.randrange(2**62)}
    return {**fields, **rng.choice(settings)}


class Clients:
    """So many requests at a time as there are clients; every `period`-th of them makes trouble."""

    def __init__(self, live: Live, alone: Live, period: int) -> None:
        self.live = live
        self.alone = alone
        self.period = period
        self.checker = Checker(None)
        self.did: Counter[str] = Counter()
        self._lock = Lock()

    def run(self, count: int) -> None:
        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(self.ask, range(1, count + 1)))

    def ask(self, number: int) -> None:
        if number % 1000 == 0:
            restarts = self.live.service.client.metrics.engine_restarts
            log.info("%d requests, %d engines lost, %d violations", number, restarts, self.checker.found.total())
        kinds = (self.leave, self.read_slowly, *map(partial(partial, self.fail), (40_001, 40_002, 40_003)))
        if number % self.period == 0:
            kinds[number // self.period % len(kinds)](number)
        elif number % COMPARED == 1:
            self.compare(number)
        else:
            self.count("answered")
            answer(self.live, request(number), stream=number % 2 == 0)

    def count(self, what: str) -> None:
        with self._lock:
            self.did[what] += 1

    def compare(self, number: int) -> None:
        self.count("compared")
        expected = answer(self.alone, request(number), stream=False)
        for stream in (False, True):
            found = answer(self.live, request(number), stream=stream)
            with self._lock:
                self.checker.require("I5" if stream else "I7", found == expected, (number, found, expected))

    def leave(self, number: int) -> None:
        self.count("left")
        with self.stream(number) as response:
            for _ in zip(range(number % 4), response.iter_raw(), strict=False):
                pass

    def read_slowly(self, number: int) -> None:
        self.count("read slowly")
        with self.stream(number) as response:
            text = b""
            for piece in response.iter_raw():
                text += piece
                time.sleep(0.05)
        with self._lock:
            self.checker.require("I4", text.endswith(b"data: [DONE]\n\n"), text)

    @contextlib.contextmanager
    def stream(self, number: int) -> Iterator[httpx.Response]:
        body = {"model": "smollm2", "stream": True, **request(number), "max_tokens": 40}
        url = f"{self.live.url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=120, verify=NO_TLS) as response:
            assert response.status_code == 200
            yield response

    def fail(self, token: int, number: int) -> None:
        self.count("could not be computed")
        response = self.live.post("/v1/completions", **{**request(number), "prompt": [5, token, 7]})
        with self._lock:
            self.checker.require("I4", response.status_code == 500, response.text)
            self.checker.require("I4", "error" in json.loads(response.text), response.text)


@contextlib.contextmanager
def recorded(client: EngineClient, checker: Checker) -> Iterator[None]:
    """Tell the checker of everything that is submitted to this client, and that its readers get."""
    with pytest.MonkeyPatch.context() as patch:
        submit, deliver = client.submit, Generation.deliver
        own = set[Generation]()

        def submit_and_tell(*args: object, **kwargs: object) -> Generation:
            generation = submit(*args, **kwargs)  # type: ignore[arg-type]
            own.add(generation)
            checker.submitted(generation._submission)
            return generation

        def deliver_and_tell(generation: Generation, event: TokenEvent) -> None:
            if generation in own:
                checker.reported(event)
            deliver(generation, event)

        patch.setattr(client, "submit", submit_and_tell)
        patch.setattr(Generation, "deliver", deliver_and_tell)
        client.metrics.observers.append(checker.lived)
        yield
        client.metrics.observers.remove(checker.lived)


def at_rest() -> Surroundings:
    """What there is once nothing changes any more: sockets close a little later than their clients leave."""
    before = None
    while (now := Surroundings.now()) != before:
        before = now
        time.sleep(0.5)
    return now
