"""What is queued on which stream of a GPU, and in what order: noted where there is none, by torch's own signatures."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from octavo.model.device import DeviceError, Fence, Lander, use_gpu
from octavo.model.graphs import CudaCapture

GPU = torch.device("cuda", 0)
GRAPH, STREAM = torch.cuda.graph, torch.cuda.Stream


class NotedCuda:
    """Takes the place of torch.cuda's streams, events and graphs, and notes what each stream is given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.streams = ["main"]
        """The current one last."""
        self.made = 0
        for name in ("Stream", "Event", "CUDAGraph", "current_stream", "stream", "graph", "graph_pool_handle"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def note(self, what: str) -> None:
        self.log.append(f"{self.streams[-1]}: {what}")

    def Stream(self, *arguments: Any) -> "NotedStream":  # noqa: N802
        inspect.signature(STREAM.__new__).bind(STREAM, *arguments)
        return NotedStream(self, "side")

    def Event(self) -> "NotedEvent":  # noqa: N802
        return NotedEvent(self)

    def CUDAGraph(self) -> "NotedGraph":  # noqa: N802
        self.made += 1
        return NotedGraph(self, self.made)

    def graph_pool_handle(self) -> str:
        self.note("pool")
        return "the pool"

    def current_stream(self, _device: torch.device) -> "NotedStream":
        return NotedStream(self, self.streams[-1])

    @contextmanager
    def stream(self, stream: "NotedStream") -> Iterator[None]:
        self.streams.append(stream.name)
        yield
        self.streams.pop()

    @contextmanager
    def graph(self, graph: "NotedGraph", **options: Any) -> Iterator[None]:
        inspect.signature(GRAPH.__init__).bind(None, graph, **options)
        with self.stream(options["stream"]):
            self.note(f"begin graph {graph.number} in {options['pool']}")
            yield
            self.note(f"end graph {graph.number}")


class NotedStream:
    def __init__(self, cuda: NotedCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_stream(self, other: "NotedStream") -> None:
        self.cuda.log.append(f"{self.name}: wait for {other.name}")


class NotedEvent:
    def __init__(self, cuda: NotedCuda) -> None:
        self.cuda = cuda

    def record(self) -> None:
        self.cuda.note("event")

    def synchronize(self) -> None:
        self.cuda.log.append("host: wait for event")


class NotedGraph:
    def __init__(self, cuda: NotedCuda, number: int) -> None:
        self.cuda, self.number = cuda, number

    def replay(self) -> None:
        self.cuda.note(f"replay graph {self.number}")


class DeviceTensor:
    """A tensor that is on the device."""

    def __init__(self, cuda: NotedCuda) -> None:
        self.cuda = cuda

    def to(self, device: str, *, non_blocking: bool) -> str:
        assert (device, non_blocking) == ("cpu", True)
        self.cuda.note("copy")
        return "copied"

    def record_stream(self, stream: NotedStream) -> None:
        self.cuda.log.append(f"kept for {stream.name}")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> NotedCuda:
    return NotedCuda(monkeypatch)


def test_a_step_is_warmed_up_and_captured_on_a_stream_of_its_own_in_one_pool(cuda: NotedCuda) -> None:
    capture = CudaCapture(GPU)
    replays = [capture(lambda name=name: cuda.note(name)) for name in ("large", "small")]
    replays[0]()
    expected = ["main: pool"]
    for number, name in ((1, "large"), (2, "small")):
        expected += ["side: wait for main", f"side: {name}", "main: wait for side"]
        expected += [f"side: begin graph {number} in the pool", f"side: {name}", f"side: end graph {number}"]
    assert cuda.log == [*expected, "main: replay graph 1"]


def test_results_are_copied_beside_the_next_step_and_only_their_event_is_waited_for(cuda: NotedCuda) -> None:
    landed, fence = Lander(GPU).land((DeviceTensor(cuda), DeviceTensor(cuda)))  # type: ignore[arg-type]
    assert landed == ("copied", "copied")
    queued = ["side: wait for main", "side: copy", "side: copy", "side: event", "kept for side", "kept for side"]
    assert cuda.log == queued
    fence.wait()
    assert cuda.log == [*queued, "host: wait for event"]


def test_a_fence_is_set_on_the_stream_that_has_planned(cuda: NotedCuda) -> None:
    fence = Fence(GPU)
    fence.set()
    fence.wait()
    assert cuda.log == ["main: event", "host: wait for event"]


def test_a_rank_takes_the_gpu_of_its_number_or_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    use_gpu(1)
    assert chosen == [1]
    with pytest.raises(DeviceError, match="rank 2 of this machine needs a GPU of its own, and this process can use 2"):
        use_gpu(2)
