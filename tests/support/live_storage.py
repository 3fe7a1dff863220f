"""Counts the bytes of tensors that live at one time, and a forward pass that frees each as soon as it can."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from octavo.model.config import ModelConfig

ALIGNMENT = 64


class LiveStorages(TorchDispatchMode):
    """Storages that operations make, until they are freed. Those that come from outside count nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            self._register(tensor, counted=False)
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            self._register(tensor, counted=True)
        self.peak = max(self.peak, self.live)
        return result

    def _register(self, tensor: Any, *, counted: bool) -> None:
        if not isinstance(tensor, Tensor):
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT if counted else 0
        self._known[key] = size
        self.live += size
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.live -= self._known.pop(key)


class LargeStorages(LiveStorages):
    """Remembers the sizes of what operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def _register(self, tensor: object, *, counted: bool) -> None:
        before = self.live
        super()._register(tensor, counted=counted)
        self.sizes.append(self.live - before)


def made_by_operations(run: Callable[[], object]) -> list[int]:
    with LargeStorages() as storages:
        run()
    return storages.sizes


def peak_of_forward(
    config: ModelConfig, tokens: int, rows: int, dtype: torch.dtype, device: str, *, in_place: bool = True
) -> int:
    """Peak of a whole step whose tensors are made when they are needed: what no arena can go below.

    After the forward pass come its logits, and what sampling needs to go through them row by row. Each fused operation
    is one that makes its result and nothing else; numbers do not matter here. With in_place off, SiLU(gate) * up is a
    tensor of its own.
    """

    def empty(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.zeros(shape, dtype=of, device=device)

    qkv_width, ffn_width = config.q_width + 2 * config.kv_width, config.ffn_width
    w_qkv, w_output = empty(config.width, qkv_width), empty(config.q_width, config.width)
    w_gate_up, w_down = empty(config.width, 2 * ffn_width), empty(ffn_width, config.width)
    norm, picks = empty(config.width), empty(rows, of=torch.int64)
    with LiveStorages() as storages:
        inputs = empty(2, tokens, of=torch.int32)
        spine = empty(tokens, config.width)
        normed = spine * norm
        for _ in range(config.layers):
            qkv = normed @ w_qkv
            del normed
            attended = empty(tokens, config.q_width)
            del qkv
            branch = attended @ w_output
            del attended
            spine.add_(branch)
            branch.mul_(norm)
            gate_up = branch @ w_gate_up
            del branch
            gate, up = gate_up[:, :ffn_width], gate_up[:, ffn_width:]
            product = gate.mul_(up) if in_place else gate * up
            del gate_up, gate, up
            normed = product @ w_down
            del product
            spine.add_(normed)
            normed.mul_(norm)
        del spine
        picked = normed.index_select(0, picks)
        logits = empty(rows, config.vocabulary, of=torch.float32)
        del picked
        row_types = (torch.float64, torch.float64, torch.int64, torch.bool, torch.float32)
        row_scratch = [empty(config.vocabulary, of=of) for of in row_types]
        del logits, row_scratch, normed, inputs
    if storages.live:
        raise RuntimeError(f"{storages.live} bytes are still alive after the pass")
    return storages.peak
