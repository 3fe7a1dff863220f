"""The device that computes: which it is, whether it can be used, and how numbers travel between it and the host.

A CPU computes what it is told at once. A GPU queues it: then a copy must not be waited for, and the memory it reads may
not be written again before it is done. Copies to the device go through pinned memory of torch's own cache, which gives
a buffer out again only after the copies that read it; copies to the host run beside the computation.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

CPU = torch.device("cpu")
LEAST_CAPABILITY = (8, 0)
"""NVIDIA Ampere: the first with bfloat16 in its matrix units."""

_log = logging.getLogger(__name__)


class DeviceError(Exception):
    """The device cannot be used."""

    exit_code = 69
    """EX_UNAVAILABLE of sysexits.h."""


def choose_device(name: str, problem: Callable[[], str | None]) -> torch.device:
    """Return the device of --device auto, cpu or cuda; of several GPUs the current one.

    `problem` says why this version cannot serve on the GPU that there is, if it cannot. Raises DeviceError for `cuda`
    where there is a reason; for `auto` the reason is logged and the CPU computes.
    """
    if name == "cpu":
        return CPU
    reason = gpu_problem() or problem()
    if reason is None:
        return torch.device("cuda", torch.cuda.current_device())
    if name == "cuda":
        raise DeviceError(f"--device cuda: {reason}; or use --device cpu")
    if torch.cuda.is_available():
        _log.warning("computing on the CPU, not on the GPU: %s", reason)
    return CPU


def use_gpu(number: int) -> None:
    """Make one of several GPUs the current one of this process. Raises DeviceError where there are not so many."""
    if number >= (count := torch.cuda.device_count()):
        raise DeviceError(f"rank {number} of this machine needs a GPU of its own, and this process can use {count}")
    torch.cuda.set_device(number)


def gpu_problem() -> str | None:
    """Say in one line why there is no GPU to compute on, if there is none."""
    if not torch.cuda.is_available():
        build = "" if torch.version.cuda else f" (torch {torch.__version__} is built without CUDA)"
        return f"there is no usable GPU{build}"
    capability = torch.cuda.get_device_capability()
    if capability < LEAST_CAPABILITY:
        found, least = (".".join(map(str, version)) for version in (capability, LEAST_CAPABILITY))
        return f"{torch.cuda.get_device_name()} has compute capability {found}, and {least} is the least that serves"
    return None


def to_device(values: NDArray[Any], device: torch.device) -> Tensor:
    """Return host values as a tensor on the device, without waiting for it."""
    host = torch.from_numpy(values)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


class Fence:
    """A point in the device's queue that the host can wait for."""

    def __init__(self, device: torch.device) -> None:
        self._event: Any = None if device.type == "cpu" else torch.cuda.Event()  # type: ignore[no-untyped-call]

    def set(self) -> None:
        """Put the point behind everything that is queued on the current stream."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Wait until the device has passed the point; return at once if it was never set."""
        if self._event is not None:
            self._event.synchronize()


class Lander:
    """Copies results to the host on a stream of its own, so that the next step does not wait for them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def land(self, tensors: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Fence]:
        """Queue copies of tensors as they will be once the device has done what is queued now.

        Returns them on the host, and the fence before which their contents are not to be read.
        """
        fence = Fence(self._device)
        if self._stream is None:
            return tensors, fence
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            landed = tuple(tensor.to("cpu", non_blocking=True) for tensor in tensors)
            fence.set()
        for tensor in tensors:  # whoever frees one must not have its memory given out before it is copied
            tensor.record_stream(self._stream)
        return landed, fence
