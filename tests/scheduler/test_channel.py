import contextlib
import socket
import threading
import zlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.model.step import SamplingParams, TokenLogprobs
from octavo.scheduler.channel import MAX_FRAME_BYTES, Channel, FrameDecoder, FrameEncoder, ProtocolError
from octavo.scheduler.messages import (
    Abort,
    EngineConfig,
    EngineStats,
    Fatal,
    FromEngine,
    MemoryLine,
    Ready,
    Shutdown,
    StepReport,
    Submission,
    ToEngine,
    TokenEvent,
)

READY = Ready(
    architecture="LlamaForCausalLM",
    parameters=70_553_706_496,
    vocabulary=128_256,
    max_model_len=8192,
    max_num_seqs=256,
    max_num_batched_tokens=8192,
    block_size=16,
    blocks=1000,
    kv_bytes_per_token=327_680,
    eos_ids=(1, 2),
    device="cpu",
    dtype="bfloat16",
    weights_digest="00ff",
    kernels="torch",
    process=77,
    memory=(MemoryLine(bucket="weights", planned=1, allocated=2),),
    memory_budget=10,
    batch_invariant=True,
    batch_invariance_reason="",
    load_seconds=0.5,
)


def frames_of(*messages: ToEngine | FromEngine) -> bytes:
    encoder = FrameEncoder()
    return b"".join(map(encoder.encode, messages))


def framed(payload: bytes) -> bytes:
    """The first frame of a stream, whatever it holds."""
    return len(payload).to_bytes(4, "little") + zlib.crc32(payload).to_bytes(4, "little") + payload


PARAMS = SamplingParams(
    temperature=0.5, seed=2**64 - 1, logit_bias=((3, -100.0), (4, 1.5)), stop_token_ids=(7,), logprobs=5
)
TO_ENGINE: list[ToEngine] = [
    EngineConfig(model="m", memory=2**40, prefix_caching=False),
    Submission(request=2**53, prompt=(1, 2, 3), params=PARAMS, max_tokens=5, salt=b"\x00\xff"),
    Abort(request=1, reason="stop"),
    Shutdown(),
]
LOGPROBS = TokenLogprobs(token=5, logprob=float("-inf"), rank=3, top=((5, -0.5), (6, -1.25)))
FROM_ENGINE: list[FromEngine] = [
    READY,
    StepReport(
        events=(TokenEvent(request=1, token=5, logprobs=LOGPROBS, prompt_logprobs=(LOGPROBS,), finish="length"),),
        stats=EngineStats(running=1, schedule_seconds=0.25),
    ),
    StepReport(events=(), stats=EngineStats()),
    Fatal(message="no", exit_code=65),
]


@pytest.fixture
def pair() -> tuple[Channel, socket.socket]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.settimeout(10)
        yield Channel(ours), theirs


@settings(deadline=None)
@given(st.data())
def test_messages_survive_any_cut_of_the_stream(data: st.DataObject) -> None:
    for union, messages in ((ToEngine, TO_ENGINE), (FromEngine, FROM_ENGINE)):
        sent = data.draw(st.lists(st.sampled_from(messages), max_size=6))
        stream = frames_of(*sent)
        cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
        decoder: FrameDecoder[ToEngine | FromEngine] = FrameDecoder(union)
        received = []
        for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
            received += decoder.feed(stream[start:end])
        assert received == sent


def test_every_field_is_back_with_its_own_type() -> None:
    decoder: FrameDecoder[ToEngine] = FrameDecoder(ToEngine)
    [submission] = decoder.feed(frames_of(TO_ENGINE[1]))
    assert isinstance(submission, Submission)
    assert submission.params == PARAMS
    assert isinstance(submission.prompt, tuple)
    assert isinstance(submission.params, SamplingParams)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_bytes_that_are_no_message_raise_a_protocol_error_or_wait_for_more(payload: bytes) -> None:
    decoder: FrameDecoder[ToEngine] = FrameDecoder(ToEngine)
    frame = framed(payload)
    assert decoder.feed(frame[:-1]) == [] or not payload
    with pytest.raises(ProtocolError):
        FrameDecoder(ToEngine).feed(frame)


@settings(deadline=None)
@given(st.sampled_from(TO_ENGINE), st.data())
def test_a_damaged_frame_is_never_a_message(message: ToEngine, data: st.DataObject) -> None:
    frame = bytearray(frames_of(message))
    frame[data.draw(st.integers(0, len(frame) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(ProtocolError):
        assert FrameDecoder(ToEngine).feed(bytes(frame)) == []  # it waits for more, where it seems to be longer


@pytest.mark.parametrize("order", [(1,), (0, 0), (0, 2), (1, 0), (0, 1, 1)])
def test_a_frame_that_is_lost_doubled_or_out_of_order_is_refused(order: tuple[int, ...]) -> None:
    encoder = FrameEncoder()
    frames = [encoder.encode(message) for message in TO_ENGINE[:3]]
    with pytest.raises(ProtocolError, match="out of order"):
        FrameDecoder(ToEngine).feed(b"".join(frames[number] for number in order))


def test_a_message_for_the_other_direction_is_refused() -> None:
    with pytest.raises(ProtocolError, match="Fatal"):
        FrameDecoder(ToEngine).feed(frames_of(Fatal(message="no", exit_code=1)))


def test_wrong_types_are_refused() -> None:
    payload = msgspec.msgpack.encode(
        {"type": "Submission", "request": 1, "prompt": ["a"], "params": {}, "max_tokens": 1}
    )
    with pytest.raises(ProtocolError, match=r"prompt\[0\]"):
        FrameDecoder(ToEngine).feed(framed(payload))


def test_a_frame_above_the_limit_is_refused_from_its_header_alone() -> None:
    with pytest.raises(ProtocolError, match="limit"):
        FrameDecoder(ToEngine).feed((MAX_FRAME_BYTES + 1).to_bytes(4, "little") + bytes(4))


def test_a_message_above_the_limit_is_not_sent() -> None:
    with pytest.raises(ProtocolError, match="limit"):
        frames_of(Submission(request=1, prompt=(), params=PARAMS, max_tokens=1, salt=bytes(MAX_FRAME_BYTES)))


def test_nothing_arrived_is_an_empty_list_without_waiting(pair: tuple[Channel, socket.socket]) -> None:
    channel, peer = pair
    assert channel.receive(block=False) == []
    peer.sendall(frames_of(Shutdown())[:-1])
    assert channel.receive(block=False) == []


def test_blocking_waits_for_a_whole_message_and_takes_all_that_are_there(pair: tuple[Channel, socket.socket]) -> None:
    channel, peer = pair
    frames = frames_of(*TO_ENGINE)
    peer.sendall(frames[:3])
    timer = threading.Timer(0.05, peer.sendall, [frames[3:]])
    timer.start()
    received: list[ToEngine] = []
    while len(received) < len(TO_ENGINE):
        messages = channel.receive(block=True)
        assert messages
        received += messages
    assert received == TO_ENGINE
    timer.join()


def test_a_server_that_is_gone_reads_as_shutdown_after_what_it_sent(pair: tuple[Channel, socket.socket]) -> None:
    channel, peer = pair
    peer.sendall(frames_of(TO_ENGINE[2]) + b"\x05")
    peer.close()
    assert channel.receive(block=True) == [TO_ENGINE[2], Shutdown()]
    assert channel.receive(block=True) == [Shutdown()]


def test_sending_to_a_server_that_is_gone_is_no_error_but_the_next_receive_tells(
    pair: tuple[Channel, socket.socket],
) -> None:
    channel, peer = pair
    peer.close()
    channel.send(FROM_ENGINE[0])
    channel.send(FROM_ENGINE[0])
    assert channel.receive(block=True) == [Shutdown()]


def test_a_slow_server_holds_the_engine_up_and_loses_nothing(pair: tuple[Channel, socket.socket]) -> None:
    channel, peer = pair
    report = StepReport(
        events=tuple(TokenEvent(request=number, token=number) for number in range(2000)), stats=EngineStats()
    )
    thread = threading.Thread(target=lambda: [channel.send(report) for _ in range(50)])
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()  # 50 reports exceed the socket's buffer
    decoder: FrameDecoder[FromEngine] = FrameDecoder(FromEngine)
    received: list[FromEngine] = []
    while len(received) < 50:
        received += decoder.feed(peer.recv(1 << 16))
    thread.join()
    assert received == [report] * 50
