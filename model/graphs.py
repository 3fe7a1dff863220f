"""Decode steps that are captured once and replayed: one launch instead of about a thousand.

A captured step reads and writes fixed addresses: the arena, the cache, and the attention backend's tables. Before a
replay the host fills those; sizes between two captured ones are padded up.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

Replay = Callable[[], None]

Capture = Callable[[Callable[[], None]], Replay]
"""Runs a function, records what it does with the memory that it was given, and returns what does the same again."""


class CudaCapture:
    """CUDA graphs that share one pool of memory; they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, function: Callable[[], None]) -> Replay:
        """Warm up on a stream of its own, as capturing demands, then capture."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            function()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            function()
        return graph.replay


def captured_sizes(max_rows: int) -> tuple[int, ...]:
    """Rows of the steps that are captured: 1, 2, 4, then every eighth number, and the most there can be."""
    sizes = {1, 2, 4, *range(8, max_rows + 1, 8), max_rows}
    return tuple(sorted(size for size in sizes if size <= max_rows))


class DecodeGraphs:
    """Captured steps by their number of rows."""

    def __init__(
        self, capture: Capture, max_rows: int, prepare: Callable[[int], None], run: Callable[[int], None]
    ) -> None:
        """Capture all sizes, the largest first: the smaller ones then fit into the memory it took.

        prepare(rows) does what the host must do before a step; run(rows) queues it.
        """
        self._replays: dict[int, Replay] = {}
        for size in reversed(captured_sizes(max_rows)):
            prepare(size)
            self._replays[size] = capture(partial(run, size))

    def size_for(self, rows: int) -> int:
        """Return the smallest captured size that holds so many rows."""
        return min(size for size in self._replays if size >= rows)

    def replay(self, size: int) -> None:
        """Queue a captured step."""
        self._replays[size]()
