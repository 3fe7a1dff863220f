"""How fast this machine reads memory, which bounds every step."""

import time

import torch

from octavo.model.kernels.cores import available_cores


def read_bandwidth() -> float:
    """Bytes per second at which all cores together read 512 MiB that no cache holds: the best of three."""
    threads = torch.get_num_threads()
    torch.set_num_threads(available_cores())  # an engine in this process leaves torch only one
    data = torch.ones(1 << 27, dtype=torch.float32)
    best = 0.0
    for _ in range(3):
        started = time.perf_counter()
        data.sum()
        best = max(best, data.nbytes / (time.perf_counter() - started))
    torch.set_num_threads(threads)
    return best
