"""Requests that go on in a new engine, from what the old one has reported."""

from random import Random

import pytest
from support.scheduling import BLOCK_SIZE, FAULT, POISON, Driver, make_scheduler
from support.simulation import CONTEXT, Script

from octavo.scheduler.messages import Submission


def resumed(driver: Driver, request: Submission) -> Submission:
    """The request as a server submits it again."""
    transcript = driver.transcripts[request.request]
    return Submission(
        request=request.request,
        prompt=request.prompt,
        params=request.params,
        max_tokens=request.max_tokens,
        salt=request.salt,
        emitted=tuple(transcript.tokens),
        scored=len(transcript.prompt_logprobs),
        announced=bool(transcript.events),
    )


@pytest.mark.parametrize("seed", range(60))
def test_requests_yield_the_same_however_often_their_engine_is_replaced(seed: int) -> None:
    random, script = Random(seed), Script(seed)
    requests = [request for request in script.submissions if request.prompt[0] not in (POISON, FAULT)]

    def engine() -> Driver:
        blocks = max(script.blocks, -(-CONTEXT // BLOCK_SIZE))
        return Driver(make_scheduler(blocks, script.rows, script.tokens, CONTEXT, script.caching))

    driver = engine()
    for request in requests:
        driver.add(request)
    for _ in range(4):
        for _ in range(random.randrange(12)):
            driver.turn()
        transcripts, replacement = driver.transcripts, engine()
        for request in requests:
            if transcripts[request.request].finish is None:
                replacement.add(resumed(driver, request))
            replacement.transcripts[request.request] = transcripts[request.request]
        driver = replacement
    driver.finish()
    for request in requests:
        driver.transcripts[request.request].check(request, CONTEXT)
