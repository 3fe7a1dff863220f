"""Which attention serves beside which kernels."""

from functools import partial

from torch import Tensor

from octavo.kvcache.layout import SCALES
from octavo.kvcache.store import KVStore
from octavo.model.attention import AttentionBackend
from octavo.model.attention.cpu import CpuAttention
from octavo.model.attention.fallback import TorchAttention
from octavo.model.attention.flashinfer import FlashInferAttention
from octavo.model.config import ModelConfig
from octavo.model.kernels import Kernels
from octavo.model.kernels.fp8 import FP8
from octavo.model.kernels.native import NativeKernels
from octavo.model.stacked import unwanted
from octavo.model.weights.destination import Destination
from octavo.model.weights.errors import CheckpointError
from octavo.model.workspaces import Workspaces


def load_attention(
    config: ModelConfig, store: KVStore, kernels: Kernels, workspaces: Workspaces | None = None
) -> AttentionBackend:
    """Make the attention of a GPU, where its `workspaces` are given, or of a CPU.

    That of a CPU comes from the compiled library where `kernels` have one, else from torch.

    Raises:
        ValueError: a block size, head_dim or dtype that the compiled attention does not know.
    """
    if workspaces is not None:
        return FlashInferAttention(config, store, workspaces, kernels.dtype)
    if not isinstance(kernels, NativeKernels):
        return TorchAttention(config, store)
    variant = attention_variant(kernels.name, config.head_dim)
    return CpuAttention(config, store, kernels.library, variant)


def scale_destinations(config: ModelConfig, store: KVStore) -> dict[str, Destination]:
    """Where a checkpoint's scales of the cache go: to the store, if that holds 8-bit floats."""
    if not config.cache_scales:
        return {}
    found, scaled = {}, store.data.dtype == FP8
    for layer, scales in enumerate(store.scales):
        for name in SCALES:
            tensor = f"model.layers.{layer}.self_attn.{name}"
            found[tensor] = Destination((1,), partial(_keep, scales, tensor) if scaled else unwanted)
    return found


def _keep(scales: dict[str, float], tensor: str, _first: int, values: Tensor) -> None:
    if (scale := float(values)) <= 0:
        raise CheckpointError(f"tensor {tensor!r} is {scale:g}; expected a positive number")
    scales[tensor.rpartition(".")[2]] = scale


def attention_variant(path: str, head_dim: int) -> str:
    """The copy of the attention kernel that belongs to a code path of the kernels.

    Tiles take 64 dimensions at a time. Where head_dim is no multiple of that, a CPU with AMX widens to float32: it
    issues vdpbf16ps at a quarter of the rate of a float32 FMA (measured on Sapphire Rapids: 0.76 ns against 0.19).
    """
    return "avx512" if path == "amx_bf16" and head_dim % 64 else path
