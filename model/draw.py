"""Drawing a token from one row of processed logits: temperature, top_k, top_p, min_p and the inversion of what is left.

What is kept is a prefix of the tokens ranked by logit, equal logits by id, lower first:
top_k keeps the first k; top_p the shortest prefix whose share of what top_k kept reaches p, at least one token; min_p
the tokens at least min_p times as likely as the first. The token drawn is then the first, in the order of ids, at which
the running sum over the kept tokens exceeds noise times their whole sum.

Probabilities and sums are float64. Rows are taken one at a time, through the scratch of one row that the arena holds:
so nothing is allocated, what is computed stays in a processor's cache, and a row's bits depend on nothing but the row.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor

from octavo.model.arena import ActivationArena
from octavo.model.slots import Record

Highest = Callable[[Tensor], tuple[Tensor, Tensor]]
"""What `highest` is."""

CANDIDATES = 1024
"""How many of the most likely tokens are ranked where that settles a row; else it is the whole vocabulary."""
ID_BITS = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class RowScratch:
    """The arena's areas for what is computed of one row; each [vocabulary] and overwritten by every function here."""

    probabilities: Tensor
    """float64; also counts of tokens."""
    ranked: Tensor
    """float64: probabilities by rank, or the parts of a key."""
    keys: Tensor
    """int64: what tokens are ranked by."""
    flags: Tensor
    """bool"""
    logprobs: Tensor
    """float32: raw log-probabilities, kept until the row's token is chosen."""

    @classmethod
    def of(cls, arena: ActivationArena, vocabulary: int) -> Self:
        """Name the areas, which of a divided vocabulary are a little wider."""
        return cls(*(arena.view(area.name, 1)[0, :vocabulary] for area in fields(cls)))

    @property
    def half_ranked(self) -> Tensor:
        """The bytes of `ranked` as float32 [vocabulary]."""
        return self.ranked.view(torch.float32)[: len(self.ranked)]


def draw(logits: Tensor, record: Record, noise: float, scratch: RowScratch) -> Tensor:
    """Draw one token by temperature and min_p alone: int64 [1].

    logits: float32 [vocabulary], minus infinity where a token is forbidden; record: the row's sampling parameters with
    a temperature above 0; noise: within (0, 1).
    """
    weights, min_p = probabilities(logits, record, scratch), float(record["min_p"])
    if min_p > 0:
        torch.lt(weights, min_p * weights.max(), out=scratch.flags)
        weights.masked_fill_(scratch.flags, 0)
    return _invert(weights, noise)


def draw_truncated(logits: Tensor, record: Record, noise: float, scratch: RowScratch) -> Tensor:
    """Draw as `draw` does, but also by top_k and top_p. Both are exact, however many tokens they keep."""
    vocabulary, top_k = len(logits), int(record["top_k"])
    for count in (min(CANDIDATES, vocabulary), vocabulary):
        weights = probabilities(logits, record, scratch)
        ids = most_likely(logits, count, scratch)
        ranked = torch.gather(weights, 0, ids, out=scratch.ranked[:count])
        kept = _kept(ranked, record, scratch)
        if kept < count and (top_k <= count or top_k == vocabulary):
            break
    return _invert(weights.zero_().scatter_(0, ids[:kept], ranked[:kept]), noise)


def largest(logits: Tensor) -> Tensor:
    """Return the id of each row's largest logit, the lowest among equals: int64 [rows]. logits: [rows, vocabulary]."""
    if not logits.is_cpu:
        return logits.argmax(dim=1)
    # numpy's vectorised search takes a tenth of the time of torch's.
    return torch.from_numpy(logits.numpy().argmax(axis=1))


def not_finite(logits: Tensor, largest: Tensor) -> Tensor:
    """Which rows hold a NaN or an infinity: bool [rows]. Both extremes of a row that holds a NaN are NaN.

    largest: [rows], the largest logit of each row.
    """
    return ~(largest.isfinite() & logits.amin(dim=1).isfinite())


def highest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return `largest`, as int32, and which rows hold a NaN or an infinity, bool; both [rows]."""
    ids = largest(logits)
    return ids.int(), not_finite(logits, logits.gather(1, ids[:, None])[:, 0])


def most_likely(values: Tensor, count: int, scratch: RowScratch) -> Tensor:
    """Return the ids of the `count` largest values, equal values by id: int64 [count], in the scratch on a CPU.

    values: float32 [vocabulary]; count: at most as many.
    """
    keys = ranking_keys(values, scratch)
    if not keys.is_cpu:
        return keys.topk(count, largest=False).values & ID_BITS
    # numpy's vectorised selection and sort take a tenth of the time of torch's.
    array = keys.numpy()
    if count < len(array):
        array.partition(count)
    array[:count].sort()
    return keys[:count].bitwise_and_(ID_BITS)


def rank_of(token: int, values: Tensor, scratch: RowScratch) -> Tensor:
    """Return the place of a token among all, the largest value first and equal values by id, from 1: int64 [1].

    values: float32 [vocabulary], none of them in scratch.flags.
    """
    flags, own = scratch.flags, values[token]
    equal = torch.eq(values[:token], own, out=flags[:token]).count_nonzero()
    return torch.gt(values, own, out=flags).count_nonzero().add_(equal + 1)[None]


def ranking_keys(values: Tensor, scratch: RowScratch) -> Tensor:
    """Return distinct integers that ascend where values descend and, among equals, where ids ascend: int64."""
    vocabulary, words = len(values), scratch.ranked.view(torch.int32)
    bits, signs = words[:vocabulary], words[vocabulary:]
    # Adding 0 turns -0.0 into 0.0. The bits of a float32 ascend with its value, those of a negative one descend.
    torch.add(values, 0.0, out=scratch.half_ranked)
    torch.bitwise_right_shift(bits, 31, out=signs)
    bits.bitwise_xor_(signs.bitwise_and_(0x7FFFFFFF)).bitwise_not_()
    keys = scratch.keys.copy_(bits).bitwise_left_shift_(32)
    return keys.add_(torch.arange(vocabulary, out=scratch.ranked.view(torch.int64)))


def probabilities(logits: Tensor, record: Record, scratch: RowScratch) -> Tensor:
    """Return softmax(logits / temperature): float64 [vocabulary], in scratch.probabilities.

    Exponentials are left to softmax: an elementwise `exp` rounds an element differently where its neighbours move it
    between the vectorised part of the loop and its tail.
    """
    # With the largest logit subtracted first, a tiny temperature overflows to minus infinity only.
    scaled = scratch.probabilities.copy_(logits).sub_(logits.max()).div_(float(record["temperature"]))
    return torch.softmax(scaled, 0, out=scaled)


def _kept(ranked: Tensor, record: Record, scratch: RowScratch) -> int:
    """Return how many of the most likely tokens are kept; overwrites scratch.probabilities.

    ranked: [count], the largest probabilities first. The result is true where it is below count, and top_k is off or
    not above count; otherwise more tokens might be kept.
    """
    count, vocabulary, flags = len(ranked), len(scratch.probabilities), scratch.flags[: len(ranked)]
    top_k, top_p, min_p = int(record["top_k"]), float(record["top_p"]), float(record["min_p"])
    cumulative = torch.cumsum(ranked, 0, out=scratch.probabilities[:count])
    whole = float(cumulative[min(top_k, count) - 1]) if top_k < vocabulary else 1.0
    # A top_p of 1 keeps all, even where rounding lets the sum reach 1 before the last token.
    nucleus = int(torch.lt(cumulative, top_p * whole, out=flags).count_nonzero()) + 1 if top_p < 1 else vocabulary
    likely = int(torch.ge(ranked, min_p * ranked[0], out=flags).count_nonzero())
    return min(top_k, nucleus, likely)


def _invert(weights: Tensor, noise: float) -> Tensor:
    """Return the first token at which the running sum exceeds noise times the sum: int64 [1]; overwrites weights."""
    running = weights.cumsum_(0)
    # A row that is not finite finds no token; it is reported as failed, but its id must stay within the vocabulary.
    return torch.searchsorted(running, running[-1:] * noise, right=True).clamp_(max=len(weights) - 1)
