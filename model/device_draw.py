"""Drawing tokens for many rows at a time on a GPU, without asking it anything: the host must not wait for it.

The definitions are those of draw.py, and so are the tokens. Which of the two ways a row takes is decided by what the
host knows: where a small top_k says that few tokens are enough, few are ranked; for top_p alone all of them are.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.model.device import to_device
from octavo.model.draw import CANDIDATES, ID_BITS
from octavo.model.slots import IntArray, Records

Rows = Sequence[int] | IntArray


def draw_rows(logits: Tensor, records: Records, noise: NDArray[np.float64]) -> Tensor:
    """Draw one token for each row by temperature and min_p alone: int64 [rows].

    logits: float32 [rows, vocabulary], minus infinity where a token is forbidden; records: [rows], the rows' sampling
    parameters with temperatures above 0; noise: [rows], each within (0, 1).
    """
    weights = _probabilities(logits, records)
    if records["min_p"].any():
        floor = _column(records["min_p"], weights) * weights.amax(dim=1, keepdim=True)
        weights.masked_fill_(weights < floor, 0)
    return _invert(weights, noise)


def draw_truncated_rows(logits: Tensor, records: Records, noise: NDArray[np.float64]) -> Tensor:
    """Draw as `draw_rows` does, but also by top_k and top_p."""
    chosen = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    few = records["top_k"] <= CANDIDATES
    for group, count in ((few, CANDIDATES), (~few, logits.shape[1])):
        rows = np.flatnonzero(group)
        if len(rows):
            weights = _truncated(take_rows(logits, rows), records[rows], min(count, logits.shape[1]))
            put_rows(chosen, rows, _invert(weights, noise[rows]))
    return chosen


def take_rows(values: Tensor, rows: Rows) -> Tensor:
    """Return some rows of values, in ascending order: values itself where these are all."""
    return values if len(rows) == len(values) else values.index_select(0, _index(rows, values))


def put_rows(target: Tensor, rows: Rows, values: Tensor) -> None:
    """Write values to some rows of target."""
    target.index_copy_(0, _index(rows, target), values)


def most_likely_rows(values: Tensor, count: int) -> Tensor:
    """Return the ids of the `count` largest values of each row, equal values by id: int64 [rows, count].

    values: float32 [rows, vocabulary].
    """
    # Distinct integers that ascend where values descend and, among equals, where ids ascend: see draw.ranking_keys.
    bits = (values + 0.0).view(torch.int32)
    descending = bits.bitwise_xor_((bits >> 31).bitwise_and_(0x7FFFFFFF)).bitwise_not_()
    keys = descending.long().bitwise_left_shift_(32).add_(torch.arange(values.shape[1], device=values.device))
    ranked = keys.sort(dim=1) if count == values.shape[1] else keys.topk(count, dim=1, largest=False)
    return ranked.values & ID_BITS


def rank_rows(ids: Tensor, values: Tensor) -> Tensor:
    """Return the places of ids [rows] among all of their rows, as draw.rank_of counts them: int64 [rows, 1].

    values: float32 [rows, vocabulary].
    """
    ids = ids.long()[:, None]
    own = values.gather(1, ids)
    before = (values == own).logical_and_(torch.arange(values.shape[1], device=values.device) < ids)
    return before.logical_or_(values > own).sum(dim=1, keepdim=True).add_(1)


def _index(rows: Rows, like: Tensor) -> Tensor:
    return to_device(np.asarray(rows, dtype=np.int64), like.device)


def _column(values: NDArray[np.generic], like: Tensor) -> Tensor:
    """Return host values [rows] as a tensor [rows, 1] on the device of `like`."""
    return to_device(values.copy(), like.device)[:, None]


def _probabilities(logits: Tensor, records: Records) -> Tensor:
    """Return softmax(logits / temperature): float64 [rows, vocabulary]."""
    scaled = logits.double().sub_(logits.amax(dim=1, keepdim=True))
    return scaled.div_(_column(records["temperature"], logits)).softmax(dim=1)


def _truncated(logits: Tensor, records: Records, count: int) -> Tensor:
    """Return each row's probabilities [rows, vocabulary], 0 where a token is not kept; `count` of them are ranked."""
    probabilities = _probabilities(logits, records)
    ids = most_likely_rows(logits, count)
    ranked = probabilities.gather(1, ids)
    kept = _kept(ranked, records, logits.shape[1])
    ranked.masked_fill_(torch.arange(count, device=logits.device) >= kept, 0)
    return probabilities.zero_().scatter_(1, ids, ranked)


def _kept(ranked: Tensor, records: Records, vocabulary: int) -> Tensor:
    """Return how many of the most likely tokens each row keeps: [rows, 1].

    ranked: [rows, count], the largest probabilities first; count is at least top_k, or the vocabulary.
    """
    top_k, top_p, min_p = (_column(records[name], ranked) for name in ("top_k", "top_p", "min_p"))
    cumulative = ranked.cumsum(dim=1)
    of_top_k = cumulative.gather(1, (top_k - 1).clamp(max=ranked.shape[1] - 1))
    whole = torch.where(top_k < vocabulary, of_top_k, 1.0)
    # A top_p of 1 keeps all, even where rounding lets the sum reach 1 before the last token.
    nucleus = torch.where(top_p < 1, (cumulative < top_p * whole).sum(dim=1, keepdim=True) + 1, vocabulary)
    likely = (ranked >= min_p * ranked[:, :1]).sum(dim=1, keepdim=True)
    return torch.minimum(torch.minimum(top_k, nucleus), likely)


def _invert(weights: Tensor, noise: NDArray[np.float64]) -> Tensor:
    """Return the first token at which the running sum exceeds noise times the sum; overwrites weights."""
    running = weights.cumsum_(dim=1)
    target = running[:, -1:] * _column(noise, weights)
    # A row that is not finite finds no token; it is reported as failed, but its id must stay within the vocabulary.
    return torch.searchsorted(running, target, right=True)[:, 0].clamp_(max=weights.shape[1] - 1)
