import pytest
import torch
from support.attention import Shape, make_backend, shared_library

from octavo.model.attention import AttentionBatch
from octavo.model.attention.cpu import CpuAttention
from octavo.model.attention.fallback import TorchAttention
from octavo.model.attention.load import load_attention
from octavo.model.kernels.fallback import TorchKernels
from octavo.model.kernels.load import available_paths
from octavo.model.kernels.native import NativeKernels


def one_row(blocks: list[int], slots: range) -> AttentionBatch:
    """A prompt whose tokens go to `slots`."""

    def int32(*numbers: int) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32)

    count = len(slots)
    return AttentionBatch(
        int32(0, count), int32(count), int32(0, len(blocks)), int32(*blocks), int32(count), int32(*slots)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_code_path_of_the_kernels_has_an_attention(dtype: torch.dtype) -> None:
    shape = Shape(dtype=dtype)
    for path in available_paths(dtype):
        kernels = NativeKernels(shared_library(), path, dtype)
        assert isinstance(load_attention(shape.config(), shape.store(4), kernels), CpuAttention)


def test_kernels_in_torch_get_an_attention_in_torch() -> None:
    shape = Shape()
    assert isinstance(load_attention(shape.config(), shape.store(4), TorchKernels(shape.dtype)), TorchAttention)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (Shape(block_size=24), "block size 24: CPU attention needs a multiple of 16"),
        (Shape(head_dim=33), "head_dim 33: CPU attention needs an even number from 16 to 256"),
        (Shape(head_dim=258), "head_dim 258"),
        (Shape(head_dim=8), "head_dim 8"),
        (Shape(dtype=torch.float16), "bfloat16 or float32, not torch.float16"),
    ],
    ids=str,
)
def test_what_the_kernel_cannot_do_is_refused_at_the_start(shape: Shape, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_backend("plain", shape.config(), shape.store(4))


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensor: tensor.double(), "expected torch.float32"),
        (lambda tensor: tensor[:, 1:], "expected torch.float32"),
        (lambda tensor: tensor[:4], "5 or more"),
        (lambda tensor: tensor.to("meta"), "on the CPU"),
        (lambda tensor: tensor.transpose(1, 2).contiguous().transpose(1, 2), "must be contiguous"),
    ],
    ids=["dtype", "heads", "tokens", "device", "strides"],
)
def test_a_tensor_that_the_kernel_would_misread_is_refused(name: str, change: object, message: str) -> None:
    assert callable(change)
    shape = Shape()
    store = shape.store(4)
    backend = make_backend("plain", shape.config(), store)
    backend.plan(one_row([2], range(32, 37)))
    tensors = {"q": torch.zeros(5, 6, 64), "k": torch.zeros(5, 2, 64), "v": torch.zeros(5, 2, 64)}
    tensors["out"] = torch.zeros(5, 6, 64)
    tensors[name] = change(tensors[name])
    with pytest.raises(ValueError, match=message):
        backend.forward(0, **tensors)


@pytest.mark.parametrize(("block", "slot"), [(4, 0), (-1, 0), (0, 64), (0, -1)])
def test_a_block_that_the_store_lacks_is_refused(block: int, slot: int) -> None:
    shape = Shape()
    backend = make_backend("plain", shape.config(), shape.store(4))
    with pytest.raises(ValueError, match=r"outside the store's 0 \.\. 3"):
        backend.plan(one_row([block], range(slot, slot + 1)))
