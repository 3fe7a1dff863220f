"""Which tokens a slot may sample next, where not all of them: one bit a token.

Whoever follows a grammar makes the mask on the host, one for each sampled token; the sampler forbids the rest on the
device. Both storages are made once and planned (`RunnerLimits.mask_bytes`), so a step allocates nothing for them.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.model.memory import mask_width


class TokenMasks:
    """The masks of all slots for the step that is being queued."""

    def __init__(self, max_slots: int, vocabulary: int, device: torch.device) -> None:
        self._vocabulary = vocabulary
        self._width = mask_width(vocabulary)
        self._host = torch.zeros(max_slots, self._width, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._device = self._host if device.type == "cpu" else torch.zeros_like(self._host, device=device)
        self._shifts = torch.arange(8, dtype=torch.uint8, device=device)
        self._scratch = torch.empty(self._width, 8, dtype=torch.uint8, device=device)
        self.active: NDArray[np.bool_] = np.zeros(max_slots, dtype=np.bool_)
        """bool [slots], on the host: whose next token is restricted."""

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self._device.nbytes + self._scratch.nbytes

    def clear(self) -> None:
        """Allow everything to every slot."""
        self.active.fill(False)

    def restrict(self, slot: int, mask: bytes) -> None:
        """Allow a slot the tokens whose bits are set: token i has bit i % 8 of byte i // 8. Raises ValueError.

        The host's copy is not written again before the device has read it: the next mask of a slot depends on the token
        that this one allows.
        """
        if len(mask) != self._width:
            raise ValueError(f"slot {slot} is given a mask of {len(mask)} bytes instead of {self._width}")
        self._host[slot].numpy()[:] = np.frombuffer(mask, dtype=np.uint8)
        if self._device is not self._host:
            self._device[slot].copy_(self._host[slot], non_blocking=True)
        self.active[slot] = True

    def apply(self, slot: int, logits: Tensor) -> None:
        """Set the logits [vocabulary] of forbidden tokens to minus infinity, in place."""
        torch.bitwise_right_shift(self._device[slot][:, None], self._shifts, out=self._scratch)
        self._scratch.bitwise_and_(1).eq_(0)
        logits.masked_fill_(self._scratch.view(torch.bool).view(-1)[: self._vocabulary], -math.inf)
