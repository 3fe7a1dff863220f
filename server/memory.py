"""What became of the memory plan while the server runs: planned, allocated, used and the most that was used.

The engine tells what it has allocated for the buckets and what its steps use of them. What else a process holds is
looked up when somebody asks: all of its anonymous memory that is in no bucket.
"""

import os
from pathlib import Path

from octavo.kvcache.ledger import BUCKETS
from octavo.scheduler.messages import EngineStats, MemoryLine, Ready

ACCOUNTS = (*BUCKETS, "runtime", "host")


class MemoryAccounts:
    """The ledger of a running server."""

    def __init__(self) -> None:
        self._ready: Ready | None = None
        self._measured_peak = dict.fromkeys(("runtime", "host"), 0)

    def engine_ready(self, ready: Ready) -> None:
        """The engine has allocated its buckets."""
        self._ready = ready

    def lines(self, stats: EngineStats) -> list[MemoryLine]:
        """Return one line for each of ACCOUNTS; all of them 0 until the engine is ready."""
        ready = self._ready
        if ready is None:
            return [MemoryLine(bucket=bucket, planned=0, allocated=0) for bucket in ACCOUNTS]
        lines = {line.bucket: line for line in ready.memory}
        block_bytes = ready.kv_bytes_per_token * ready.block_size
        in_buckets = sum(line.allocated for line in lines.values())
        runtime = max(0, anonymous_bytes(ready.process) - in_buckets)
        weights = lines["weights"].allocated
        return [
            _used(lines["weights"], weights, weights),
            _used(lines["cache"], stats.blocks_referenced * block_bytes, stats.blocks_peak * block_bytes),
            _used(lines["activations"], stats.activations_used, stats.activations_peak),
            self._measured(lines["runtime"], runtime),
            self._measured(lines["host"], anonymous_bytes(os.getpid())),
        ]

    def _measured(self, line: MemoryLine, held: int) -> MemoryLine:
        """What is held is allocated and used; the peak is that of all measurements."""
        self._measured_peak[line.bucket] = peak = max(held, self._measured_peak[line.bucket])
        return MemoryLine(bucket=line.bucket, planned=line.planned, allocated=held, used=held, peak=peak)


def _used(line: MemoryLine, used: int, peak: int) -> MemoryLine:
    return MemoryLine(bucket=line.bucket, planned=line.planned, allocated=line.allocated, used=used, peak=peak)


def anonymous_bytes(process: int, root: Path = Path("/proc")) -> int:
    """Bytes of RAM that a process holds and that are no file's; 0 where there is no such process."""
    try:
        lines = (root / str(process) / "status").read_text().splitlines()
    except OSError:
        return 0
    # A process that has ended but whose parent does not know yet has no such line.
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:")), 0)
