"""Where a model runs and with what: decided before anything is allocated."""

from dataclasses import dataclass

import torch

from octavo.model.attention.flashinfer import validate
from octavo.model.config import ModelConfig
from octavo.model.device import CPU
from octavo.model.graphs import Capture, CudaCapture
from octavo.model.kernels import Kernels
from octavo.model.kernels.cores import available_cores
from octavo.model.kernels.cuda import CudaKernels
from octavo.model.kernels.fp8 import MULTIPLE
from octavo.model.kernels.load import load_kernels
from octavo.model.matrices import BlockMatrices
from octavo.model.memory import Formats, rank_shape
from octavo.model.workspaces import Workspaces

HOPPER = (9, 0)
FIRST_WITH_FP8 = (8, 9)


@dataclass(frozen=True, slots=True)
class Placement:
    """A device, a type of number, and the kernels that compute with it."""

    device: torch.device
    dtype: torch.dtype
    kernels: Kernels
    workspaces: Workspaces | None
    """None on a CPU."""
    ranks: int = 1
    """Degree of tensor parallelism."""
    share: int = 1
    """How many of the ranks share this machine's RAM."""

    @property
    def on_gpu(self) -> bool:
        """Whether the device is one that queues its work."""
        return self.workspaces is not None

    @property
    def formats(self) -> Formats:
        """How it keeps numbers."""
        size = self.dtype.itemsize
        return Formats(
            activations=size,
            matrices=size if self.kernels.fp8 is None else 1,
            cache=1 if self.workspaces is not None and self.workspaces.fp8_cache else size,
            panels=self.kernels.panels,
            threads=self.kernels.threads,
            ranks=self.ranks,
            gate_in_place=self.kernels.gate_in_place,
            workspaces=self.workspaces,
        )

    def capture(self, *, eager: bool) -> Capture | None:
        """What captures steps; none on a CPU, or if a GPU is to be given each step kernel by kernel (`eager`)."""
        return CudaCapture(self.device) if self.on_gpu and not eager else None


def place_on_cpu(dtype: torch.dtype, workspaces: Workspaces, ranks: int, share: int, *, fp8: bool) -> Placement:
    """Choose the CPU's kernels. share: how many ranks share this machine's cores and memory.

    Raises ValueError where a GPU's are asked for, or like load_kernels.
    """
    if fp8:
        raise ValueError("--quantization fp8 needs the products of a GPU: use --device cuda, or a GGUF file on a CPU")
    if workspaces != Workspaces():
        flags = "--attention-prefill, --attention-decode and --kv-cache-dtype"
        raise ValueError(f"{flags} choose kernels of a GPU: use --device cuda, or leave them at their defaults")
    threads = None if share == 1 else max(1, available_cores() // share)
    return Placement(CPU, dtype, load_kernels(dtype, threads), None, ranks, share)


def place_on_gpu(
    device: torch.device,
    dtype: torch.dtype,
    config: ModelConfig,
    block_size: int,
    workspaces: Workspaces,
    ranks: int = 1,
    *,
    fp8: bool,
) -> Placement:
    """Check that there are kernels for the model. Raises ValueError, or DeviceError without FlashInfer.

    fp8: keep the matrices of the blocks in 8-bit floats.
    """
    validate(config.head_dim, block_size, dtype, workspaces)
    capability = torch.cuda.get_device_capability(device)
    if workspaces.prefill == "fa3" and capability != HOPPER:
        raise ValueError("--attention-prefill fa3 needs a Hopper GPU: use fa2")
    if workspaces.decode == "xqa" and capability < HOPPER:
        raise ValueError("--attention-decode xqa needs a Hopper GPU or a newer one: use fa2")
    if fp8:
        _validate_fp8(dtype, rank_shape(config, ranks), capability)
    return Placement(device, dtype, CudaKernels(dtype, device, fp8=fp8), workspaces, ranks)


def _validate_fp8(dtype: torch.dtype, config: ModelConfig, capability: tuple[int, int]) -> None:
    """Raise ValueError for what torch's products of 8-bit floats do not know."""
    what = "matrices in 8-bit floats (--quantization fp8, or a checkpoint of such)"
    if dtype != torch.bfloat16:
        raise ValueError(f"{what} are multiplied in bfloat16, not in {dtype}: leave --dtype at auto")
    if capability < FIRST_WITH_FP8:
        raise ValueError(f"{what} need a GPU of compute capability 8.9 or higher")
    for matrix in BlockMatrices.of(config, 0).all():
        rows, columns = matrix.out_features, matrix.in_features
        if rows % MULTIPLE or columns % MULTIPLE:
            raise ValueError(f"{what}: {MULTIPLE} does not divide the sides of a {rows} x {columns} matrix")
