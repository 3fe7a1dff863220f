"""Penalties on tokens that a request has seen or generated, applied to one row of logits in place."""

import torch
from torch import Tensor

from octavo.model.draw import RowScratch

_IDS_AT_ONCE = 512
"""A history is taken in parts, so that no temporary tensor is larger than 4 KiB."""
_LARGEST_LOGIT = torch.finfo(torch.float32).max


def penalise_repetition(logits: Tensor, history: Tensor, penalty: float, scratch: RowScratch) -> None:
    """Divide the positive logits of seen tokens by the penalty and multiply the others (Keskar et al., 2019).

    logits: float32 [vocabulary]; history: int32 [tokens], prompt and output.
    """
    before = _before(logits, history, scratch)
    for part in torch.split(history, _IDS_AT_ONCE):
        ids = part.long()
        seen = before[ids].double()
        seen = torch.where(seen > 0, seen / penalty, seen * penalty).clamp_(max=_LARGEST_LOGIT)
        # A token that occurs twice is written twice, with the same value.
        logits.scatter_(0, ids, seen.float())


def penalise_occurrence(logits: Tensor, output: Tensor, presence: float, frequency: float, scratch: RowScratch) -> None:
    """Subtract `presence` and the number of occurrences times `frequency` from the logits of generated tokens.

    logits: float32 [vocabulary]; output: int32 [tokens], without the prompt.
    """
    one = torch.ones(1, dtype=torch.float64, device=output.device)
    occurrences = scratch.probabilities.zero_().index_add_(0, output, one.expand(len(output)))
    before = _before(logits, output, scratch)
    for part in torch.split(output, _IDS_AT_ONCE):
        ids = part.long()
        penalties = occurrences[ids] * frequency + presence
        # A token that occurs twice is written twice, with the same value.
        logits.scatter_(0, ids, (before[ids].double() - penalties).float())


def _before(logits: Tensor, tokens: Tensor, scratch: RowScratch) -> Tensor:
    """Return what a token's penalised logit is computed from, even where an earlier part has penalised it already."""
    return logits if len(tokens) <= _IDS_AT_ONCE else scratch.half_ranked.copy_(logits)
