import mmap
import os
import subprocess
import sys
from pathlib import Path

from support.scripted_engine import ready as scripted_ready

from octavo.scheduler.messages import EngineConfig, EngineStats, MemoryLine
from octavo.server.memory import ACCOUNTS, MemoryAccounts, anonymous_bytes

READY = scripted_ready(EngineConfig(model="scripted"), blocks=100)
BLOCK = 1024
STATS = EngineStats(blocks_referenced=7, blocks_peak=9, activations_used=300, activations_peak=400)


def accounts_of_a_running_engine() -> MemoryAccounts:
    accounts = MemoryAccounts()
    accounts.engine_ready(READY)
    return accounts


def test_before_the_engine_is_ready_there_is_a_line_of_zeros_for_each_bucket() -> None:
    assert MemoryAccounts().lines(STATS) == [MemoryLine(bucket=bucket, planned=0, allocated=0) for bucket in ACCOUNTS]


def test_the_buckets_of_the_device_are_as_the_engine_reports_them() -> None:
    weights, cache, activations, *_ = accounts_of_a_running_engine().lines(STATS)
    assert weights == MemoryLine(bucket="weights", planned=3000, allocated=3000, used=3000, peak=3000)
    whole = 100 * BLOCK
    assert cache == MemoryLine(bucket="cache", planned=whole, allocated=whole, used=7 * BLOCK, peak=9 * BLOCK)
    assert activations == MemoryLine(bucket="activations", planned=5000, allocated=5000, used=300, peak=400)


def test_what_the_processes_hold_beside_the_buckets_is_measured_and_its_peak_kept() -> None:
    accounts = accounts_of_a_running_engine()
    size = 1 << 25
    # Memory that goes back to the system for certain: what malloc gave, a process may keep for itself.
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as ballast:
        ballast.write(bytes(size))
        *_, full_runtime, full_host = accounts.lines(STATS)
    *_, runtime, host = accounts.lines(STATS)
    # Here both processes are this one, which holds everything that the scripted engine only claims to hold.
    claimed = sum(line.allocated for line in READY.memory)
    for full, line, beside in ((full_runtime, runtime, claimed), (full_host, host, 0)):
        assert line.allocated == line.used <= full.used - size // 2
        assert line.peak == full.peak == full.used
        assert line.planned == 1 << 28
        assert abs(line.used + beside - anonymous_bytes(os.getpid())) < size // 4  # whatever else runs in this process


def test_memory_of_another_process_is_its_own_and_pages_of_files_do_not_count(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(1 << 25))
    program = (
        "import mmap, sys; ballast = b'x' * (1 << 26); file = open(sys.argv[1], 'rb')\n"
        "pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ); pages[:]; print(flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-S", "-c", program, str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        held = anonymous_bytes(process.pid)
        process.communicate()
    assert 1 << 26 <= held < (1 << 26) + (1 << 25)
    assert anonymous_bytes(process.pid) == 0
