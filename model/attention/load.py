"""Which attention serves beside which kernels."""

from octavo.kvcache.store import KVStore
from octavo.model.attention import AttentionBackend
from octavo.model.attention.cpu import CpuAttention
from octavo.model.attention.fallback import TorchAttention
from octavo.model.attention.flashinfer import FlashInferAttention
from octavo.model.config import ModelConfig
from octavo.model.kernels import Kernels
from octavo.model.kernels.native import NativeKernels
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


def attention_variant(path: str, head_dim: int) -> str:
    """The copy of the attention kernel that belongs to a code path of the kernels.

    Tiles take 64 dimensions at a time. Where head_dim is no multiple of that, a CPU with AMX widens to float32: it
    issues vdpbf16ps at a quarter of the rate of a float32 FMA (measured on Sapphire Rapids: 0.76 ns against 0.19).
    """
    return "avx512" if path == "amx_bf16" and head_dim % 64 else path
