"""Each injection point does what its name says, and the engine makes of it what it should."""

import socket
import threading
from collections.abc import Sequence

import pytest
from support.scripted_engine import build, scripted_token

from octavo.model.step import SamplingParams
from octavo.scheduler.channel import Channel, FrameDecoder, FrameEncoder, ProtocolError
from octavo.scheduler.faults import NAMES, Fault, faults_in, parse_fault
from octavo.scheduler.messages import EngineConfig, FromEngine, Shutdown, StepReport, Submission, TokenEvent
from octavo.scheduler.process import serve

POISON = 77
TOKENS = 6


def submission(request: int, *prompt: int) -> Submission:
    return Submission(request=request, prompt=prompt, params=SamplingParams(temperature=0.0), max_tokens=TOKENS)


def run(faults: Sequence[str], *submissions: Submission) -> tuple[dict[int, list[TokenEvent]], int]:
    """Serve these requests with these faults; the events of each, and how many steps failed."""
    ours, theirs = socket.socketpair()
    ours.settimeout(20)
    config = EngineConfig(model="scripted", fault=tuple(faults))
    engine = threading.Thread(target=lambda: serve(Channel(theirs), lambda config, _: build(config)))
    engine.start()
    encoder, decoder = FrameEncoder(), FrameDecoder[FromEngine](FromEngine)
    events: dict[int, list[TokenEvent]] = {request.request: [] for request in submissions}
    failed = 0
    try:
        ours.sendall(encoder.encode(config))
        decoder.feed(ours.recv(1 << 16))
        ours.sendall(b"".join(map(encoder.encode, submissions)))
        while not all(found and found[-1].finish for found in events.values()):
            for message in decoder.feed(ours.recv(1 << 16)):
                if isinstance(message, StepReport):
                    failed = message.stats.failed_steps_total
                    for event in message.events:
                        events[event.request].append(event)
        ours.sendall(encoder.encode(Shutdown()))
    finally:
        ours.close()
        engine.join(20)
        theirs.close()
    return events, failed


def tokens(events: Sequence[TokenEvent]) -> list[int]:
    return [event.token for event in events if event.token is not None]


@pytest.mark.parametrize("name", ["step-raises", "wait-raises", "row-fails"])
def test_f2_f3_a_poisoned_request_fails_alone(name: str) -> None:
    events, failed = run([f"{name}:token={POISON}"], submission(1, 4, 5), submission(2, 4, POISON), submission(3, 4))
    assert [event.finish for event in events[2]] == ["error"]
    for request, length in ((1, 2), (3, 1)):
        assert tokens(events[request]) == [scripted_token(length + number) for number in range(TOKENS)]
    assert (failed == 0) == (name == "row-fails")


def test_a_token_that_was_generated_poisons_nobody() -> None:
    """A request is admitted with its output after a step was undone."""
    generated = scripted_token(2)
    events, failed = run([f"step-raises:token={generated}", "step-raises:step=3"], submission(1, 4, 5))
    assert tokens(events[1]) == [scripted_token(2 + number) for number in range(TOKENS)]
    assert failed == 1


def test_a_fault_in_one_step_ends_nobody() -> None:
    events, failed = run(["step-raises:step=3"], submission(1, 4, 5), submission(2, 4))
    assert [found[-1].finish for found in events.values()] == ["length", "length"]
    assert failed == 1


def test_a_fault_in_every_nth_step_lets_requests_go_on_between() -> None:
    events, failed = run(["step-raises:every=3"], submission(1, 4, 5), submission(2, 4))
    assert [tokens(found) for found in events.values()] == [
        [scripted_token(length + number) for number in range(TOKENS)] for length in (2, 1)
    ]
    assert failed >= 3


def test_f4_a_step_can_take_longer() -> None:
    events, failed = run(["step-hangs:seconds=0:step=2"], submission(1, 4, 5))
    assert (events[1][-1].finish, failed) == ("length", 0)


@pytest.mark.parametrize("name", ["report-corrupted", "report-truncated", "report-doubled", "report-swapped"])
def test_f19_a_report_that_suffers_on_its_way_is_noticed(name: str) -> None:
    with pytest.raises(ProtocolError, match=r"damaged or out of order|limit"):
        run([f"{name}:step=3"], submission(1, 4, 5))


def test_faults_are_read_as_they_are_written() -> None:
    assert parse_fault("step-raises") == Fault("step-raises")
    assert parse_fault("step-hangs:token=7:step=2:every=3:life=0:seconds=5") == Fault("step-hangs", 7, 2, 3, 0, 5)
    assert all(parse_fault(name).name == name for name in NAMES)
    for text in ("", "meteor", "step-raises:", "step-raises:token", "step-raises:token=-1", "step-raises:name=1"):
        with pytest.raises(ValueError, match=r"there is no fault|write "):
            parse_fault(text)


def test_a_fault_can_be_confined_to_one_life_of_the_engine() -> None:
    written = ("step-raises", "step-hangs:life=0", "engine-killed:life=1")
    assert faults_in(written, 0) == ("step-raises", "step-hangs:life=0")
    assert faults_in(written, 1) == ("step-raises", "engine-killed:life=1")
