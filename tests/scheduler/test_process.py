import os
import signal
import socket
import subprocess
import sys
import threading

import pytest
from support import scripted_engine
from support.scripted_engine import CRASH, MissingModelError, build, scripted_token

from octavo.model.step import SamplingParams
from octavo.scheduler.channel import Channel, FrameDecoder, FrameEncoder
from octavo.scheduler.messages import (
    Abort,
    EngineConfig,
    Fatal,
    FromEngine,
    Loading,
    Ready,
    Shutdown,
    StepReport,
    Submission,
    ToEngine,
    TokenEvent,
)
from octavo.scheduler.process import serve

CONFIG = EngineConfig(model="scripted")


def submission(request: int, prompt: tuple[int, ...] = (4, 5), max_tokens: int = 3) -> Submission:
    return Submission(request=request, prompt=prompt, params=SamplingParams(temperature=0.0), max_tokens=max_tokens)


class Peer:
    """The server's end, over a blocking socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        connection.settimeout(30)
        self._decoder: FrameDecoder[FromEngine] = FrameDecoder(FromEngine)
        self._encoder = FrameEncoder()
        self._messages: list[FromEngine] = []

    def send(self, *messages: ToEngine) -> None:
        self.connection.sendall(b"".join(map(self._encoder.encode, messages)))

    def receive(self) -> FromEngine:
        while not self._messages:
            data = self.connection.recv(1 << 16)
            assert data, "the engine closed the connection"
            self._messages += self._decoder.feed(data)
        return self._messages.pop(0)

    def events_until_finished(self, request: int) -> list[TokenEvent]:
        events: list[TokenEvent] = []
        while not any(event.request == request and event.finish for event in events):
            report = self.receive()
            assert isinstance(report, StepReport)
            events += report.events
        return [event for event in events if event.request == request]


class Engine(threading.Thread):
    """An engine in a thread of this process."""

    def __init__(self) -> None:
        super().__init__()
        ours, self._theirs = socket.socketpair()
        self.peer = Peer(ours)
        self.exit_code: int | None = None
        self.start()

    def run(self) -> None:
        with self._theirs:
            self.exit_code = serve(Channel(self._theirs), lambda config, _: build(config))

    def finish(self) -> int | None:
        self.join(30)
        self.peer.connection.close()
        assert not self.is_alive()
        return self.exit_code


def test_an_engine_says_it_is_ready_serves_and_ends_when_told_to() -> None:
    engine = Engine()
    engine.peer.send(CONFIG)
    assert isinstance(engine.peer.receive(), Ready)
    engine.peer.send(submission(7))
    events = engine.peer.events_until_finished(7)
    assert [event.token for event in events] == [scripted_token(2 + n) for n in range(3)]
    engine.peer.send(submission(8, max_tokens=1000), Shutdown())
    assert engine.finish() == 0


def test_an_abort_is_answered_with_its_reason() -> None:
    engine = Engine()
    engine.peer.send(CONFIG)
    engine.peer.receive()
    engine.peer.send(submission(1, max_tokens=1500), Abort(request=1, reason="stop"), Abort(request=5))
    assert engine.peer.events_until_finished(1)[-1].finish == "stop"
    engine.peer.send(Shutdown())
    assert engine.finish() == 0


def test_an_engine_whose_server_is_gone_ends() -> None:
    engine = Engine()
    engine.peer.send(CONFIG)
    engine.peer.receive()
    engine.peer.connection.close()
    assert engine.finish() == 0


@pytest.mark.parametrize("messages", [(), (Shutdown(),), (CONFIG, Shutdown())])
def test_a_server_that_changes_its_mind_gets_no_engine(messages: tuple[ToEngine, ...]) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        with ours:
            Peer(ours).send(*messages)
        assert serve(Channel(theirs), lambda *_: pytest.fail("nothing should be loaded")) == 0


def test_errors_of_loading_carry_their_exit_code() -> None:
    engine = Engine()
    engine.peer.send(EngineConfig(model="missing"))
    assert engine.peer.receive() == Fatal(
        message="there is no model called missing", exit_code=MissingModelError.exit_code
    )
    assert engine.finish() == 65


def test_a_request_that_breaks_the_device_ends_with_an_error_and_the_engine_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = Engine()
    engine.peer.send(CONFIG)
    engine.peer.receive()
    engine.peer.send(submission(1, prompt=(CRASH,)))
    [event] = engine.peer.events_until_finished(1)
    assert (event.finish, event.error) == ("error", "the model cannot compute this request: RuntimeError")
    engine.peer.send(submission(2))
    assert engine.peer.events_until_finished(2)[-1].finish == "length"
    engine.peer.send(Shutdown())
    assert engine.finish() == 0
    assert "Traceback" in caplog.text


def test_anything_but_a_configuration_first_is_a_fault() -> None:
    engine = Engine()
    engine.peer.send(Abort(request=1))
    fatal = engine.peer.receive()
    assert isinstance(fatal, Fatal)
    assert "the first message is a Abort" in fatal.message
    assert engine.finish() == 70


def test_bytes_that_are_no_message_end_the_engine() -> None:
    engine = Engine()
    engine.peer.send(CONFIG)
    engine.peer.receive()
    engine.peer.connection.sendall(b"\x02\x00\x00\x00??????")
    fatal = engine.peer.receive()
    assert isinstance(fatal, Fatal)
    assert "frame 1 is damaged" in fatal.message
    assert engine.finish() == 70


def spawn() -> tuple[subprocess.Popen[bytes], Peer]:
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, scripted_engine.__file__, str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    peer = Peer(ours)
    peer.send(CONFIG)
    assert peer.receive() == Loading(phase="loading weights", progress=0.5)
    assert isinstance(peer.receive(), Ready)
    return process, peer


def test_ctrl_c_is_for_the_server_and_sigterm_ends_an_engine() -> None:
    process, peer = spawn()
    process.send_signal(signal.SIGINT)
    peer.send(submission(1))
    assert peer.events_until_finished(1)[-1].finish == "length"
    process.terminate()
    assert process.wait(30) == -signal.SIGTERM
    peer.connection.close()


def test_a_scripted_engine_imports_no_torch() -> None:
    program = "import sys; import support.scripted_engine; raise SystemExit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    assert subprocess.run([sys.executable, "-c", program], env=environment, check=False).returncode == 0
