"""Drawing a token from processed logits: temperature, top_k, top_p, min_p and the inversion of the distribution.

What is kept is a prefix of the tokens ranked by logit, equal logits by id, lower first:
top_k keeps the first k; top_p the shortest prefix whose share of what top_k kept reaches p, at least one token; min_p
the tokens at least min_p times as likely as the first. The token drawn is then the first, in the order of ids, at which
the running sum over the kept tokens exceeds noise times their whole sum.

Probabilities and sums are float64. A row's bits depend on nothing but the row: exponentials are left to softmax, which
works row by row, because an elementwise `exp` rounds an element differently when the rows around it move it between
the vectorised part of the loop and its tail; and nothing is summed in an order that depends on the number of rows.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.model.slots import Records

_CANDIDATES = 1024
"""How many of the most likely tokens are ranked first; the whole vocabulary only where they do not settle a row."""
_ID_BITS = 0xFFFFFFFF


def draw(logits: Tensor, records: Records, noise: NDArray[np.float64]) -> Tensor:
    """Draw one token for each row by temperature and min_p alone: int64 [rows].

    logits: float32 [rows, vocabulary], minus infinity where a token is forbidden; records: [rows], the rows' sampling
    parameters with temperatures above 0; noise: [rows], each within (0, 1).
    """
    weights = _probabilities(logits, records)
    if records["min_p"].any():
        floor = _column(records["min_p"], weights) * weights.amax(dim=1, keepdim=True)
        weights.masked_fill_(weights < floor, 0)
    return _invert(weights, noise)


def draw_truncated(logits: Tensor, records: Records, noise: NDArray[np.float64]) -> Tensor:
    """Draw as `draw` does, but also by top_k and top_p. Both are exact, however many tokens they keep."""
    chosen = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    waiting = np.arange(len(logits))
    for count in (_CANDIDATES, logits.shape[1]):
        rows = waiting.tolist()
        weights, settled = _truncate(take_rows(logits, rows), records[waiting], count)
        chosen[rows] = _invert(weights, noise[waiting])
        waiting = waiting[~settled]
        if not len(waiting):
            break
    return chosen


def take_rows(values: Tensor, rows: Sequence[int]) -> Tensor:
    """Return some rows of values, in ascending order: values itself where these are all."""
    return values if len(rows) == len(values) else values[rows]


def largest(logits: Tensor) -> Tensor:
    """Return the id of each row's largest logit, the lowest among equals: int64 [rows]. logits: [rows, vocabulary]."""
    if not logits.is_cpu:
        return logits.argmax(dim=1)
    # numpy's vectorised search takes a tenth of the time of torch's.
    return torch.from_numpy(logits.numpy().argmax(axis=1))


def most_likely(values: Tensor, count: int) -> Tensor:
    """Return the ids of the `count` largest values of each row, equal values by id: int64 [rows, count].

    values: float32 [rows, vocabulary].
    """
    keys = _ranking_keys(values)
    if not keys.is_cpu:
        return keys.topk(count, dim=1, largest=False).values & _ID_BITS
    # So do its selection and its sort.
    smallest = keys.numpy()
    if count < len(smallest[0]):
        smallest = np.partition(smallest, count, axis=1)[:, :count]
    return torch.from_numpy(np.sort(smallest, axis=1)) & _ID_BITS


def _ranking_keys(values: Tensor) -> Tensor:
    """Return distinct integers that ascend where values descend and, among equals, where ids ascend: int64."""
    # Adding 0 turns -0.0 into 0.0. The bits of a float32 ascend with its value, those of a negative one descend.
    bits = (values + 0.0).view(torch.int32)
    descending = bits.bitwise_xor_((bits >> 31).bitwise_and_(0x7FFFFFFF)).bitwise_not_()
    return descending.long().bitwise_left_shift_(32).add_(torch.arange(values.shape[1], device=values.device))


def _probabilities(logits: Tensor, records: Records) -> Tensor:
    """Return softmax(logits / temperature): float64 [rows, vocabulary]."""
    # With the largest logit subtracted first, a tiny temperature overflows to minus infinity only.
    scaled = logits.double().sub_(logits.amax(dim=1, keepdim=True))
    return scaled.div_(_column(records["temperature"], logits)).softmax(dim=1)


def _truncate(logits: Tensor, records: Records, count: int) -> tuple[Tensor, NDArray[np.bool_]]:
    """Return each row's probabilities [rows, vocabulary], 0 where a token is not kept, looking at `count` tokens only.

    Also tells which rows these tokens settle; all of them do where count reaches the vocabulary.
    """
    vocabulary, top_k = logits.shape[1], records["top_k"]
    count = min(count, vocabulary)
    probabilities = _probabilities(logits, records)
    ids = most_likely(logits, count)
    ranked = probabilities.gather(1, ids)
    kept = _kept(ranked, records, vocabulary)
    settled = (kept < count).cpu().numpy() & ((top_k <= count) | (top_k == vocabulary))
    ranked.masked_fill_(torch.arange(count, device=logits.device) >= kept[:, None], 0)
    return probabilities.zero_().scatter_(1, ids, ranked), settled | (count == vocabulary)


def _kept(ranked: Tensor, records: Records, vocabulary: int) -> Tensor:
    """Return how many of the most likely tokens each row keeps: [rows].

    ranked: [rows, count], the largest probabilities first. The result is true where it is below count, and top_k is
    off or not above count; otherwise more tokens might be kept.
    """
    top_k, top_p, min_p = (_column(records[name], ranked) for name in ("top_k", "top_p", "min_p"))
    cumulative = ranked.cumsum(dim=1)
    of_top_k = cumulative.gather(1, (top_k - 1).clamp(max=ranked.shape[1] - 1))
    whole = torch.where(top_k < vocabulary, of_top_k, 1.0)
    # A top_p of 1 keeps all, even where rounding lets the sum reach 1 before the last token.
    nucleus = torch.where(top_p < 1, (cumulative < top_p * whole).sum(dim=1, keepdim=True) + 1, vocabulary)
    likely = (ranked >= min_p * ranked[:, :1]).sum(dim=1, keepdim=True)
    return torch.minimum(torch.minimum(top_k, nucleus), likely)[:, 0]


def _invert(weights: Tensor, noise: NDArray[np.float64]) -> Tensor:
    """Return the first token at which the running sum exceeds noise times the sum; overwrites weights."""
    running = weights.cumsum_(dim=1)
    target = running[:, -1:] * _column(noise, weights)
    # A row that is not finite finds no token; it is reported as failed, but its id must stay within the vocabulary.
    return torch.searchsorted(running, target, right=True)[:, 0].clamp_(max=weights.shape[1] - 1)


def _column(values: NDArray[np.generic], like: Tensor) -> Tensor:
    """Return host values [rows] as a tensor [rows, 1] on the device of `like`."""
    return torch.from_numpy(values.copy()).to(like.device, non_blocking=True)[:, None]
