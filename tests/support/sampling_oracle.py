"""The definition of sampling, one row at a time in plain float64 numpy, and a way to run the sampler on many rows."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.model.draw import RowScratch
from octavo.model.sampling import Sampled, Sampler
from octavo.model.slots import SlotTable
from octavo.model.step import Admission, Row, SamplingParams, Step

ROUNDING = 1e-11
"""Bound on the error of a share of the distribution: 5,000 float64 additions and exponents of up to 745, with room."""

Logits = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Case:
    """One row: the request and its tokens so far."""

    params: SamplingParams
    tokens: tuple[int, ...] = (0,)
    prompt_length: int = 1
    ending_ids: tuple[int, ...] = ()
    allowed: tuple[int, ...] | None = None
    """Tokens that the row's mask allows; None: it has no mask."""

    def mask(self, vocabulary: int) -> bytes | None:
        if self.allowed is None:
            return None
        bits = sum(1 << token for token in set(self.allowed))
        return bits.to_bytes(-(-vocabulary // 32) * 4, "little")


def run(logits: Logits, cases: list[Case]) -> Sampled:
    """Sample every row of logits [len(cases), vocabulary], each in a slot of its own."""
    return run_in(table_of(cases, logits.shape[1]), logits, cases, range(len(cases)))


def table_of(cases: list[Case], vocabulary: int) -> SlotTable:
    """Admit case i to slot i."""
    longest = max(len(case.tokens) for case in cases)
    table = SlotTable(len(cases), longest, longest, 1, vocabulary, torch.device("cpu"))
    admitted = tuple(
        Admission(slot, case.tokens, case.prompt_length, (slot,), case.params, case.ending_ids)
        for slot, case in enumerate(cases)
    )
    rows = tuple(Row(slot, 0, 1, sample=True, mask=case.mask(vocabulary)) for slot, case in enumerate(cases))
    table.apply(Step(retired=(), admitted=admitted, grown=(), rows=rows))
    return table


def run_in(table: SlotTable, logits: Logits, cases: list[Case], chosen: range | list[int]) -> Sampled:
    """Sample some cases of a table, in the given order."""
    slots = np.array(chosen, dtype=np.int64)
    positions = np.array([len(cases[slot].tokens) for slot in chosen], dtype=np.int64)
    return sampler_of(table).sample(torch.from_numpy(logits[slots]), slots, positions)


def sampler_of(table: SlotTable) -> Sampler:
    return Sampler(table, row_scratch(table.vocabulary))


def row_scratch(vocabulary: int) -> RowScratch:
    """Scratch full of NaN (and of other things that nobody should believe), as an earlier step may have left it."""
    types = (torch.float64, torch.float64, torch.int64, torch.uint8, torch.float32)
    areas = [torch.full((vocabulary * dtype.itemsize,), 255, dtype=torch.uint8).view(dtype) for dtype in types]
    areas[3] = torch.ones(vocabulary, dtype=torch.bool)
    return RowScratch(*areas)


def processed(logits: Logits, case: Case) -> Logits:
    """Apply bias, penalties and mask to one row; every stage rounds to float32."""
    params, output = case.params, case.tokens[case.prompt_length :]
    row = logits.copy()
    for token, bias in params.logit_bias:
        row[token] = -np.inf if bias <= -100 else row[token] + np.float32(bias)
    for token in set(case.tokens):
        value, penalty = float(row[token]), params.repetition_penalty
        row[token] = value / penalty if value > 0 else value * penalty
    for token in set(output):
        row[token] = float(row[token]) - (params.frequency_penalty * output.count(token) + params.presence_penalty)
    if case.allowed is not None:
        row[[token for token in range(len(row)) if token not in case.allowed]] = -np.inf
    elif len(output) < params.min_tokens:
        for token in case.ending_ids:
            row[token] = -np.inf
    return row


def uniform(seed: int, position: int) -> float:
    """Philox4x32-10 with Python integers, keyed by the seed's 64 bits and counting positions."""
    mask = 0xFFFFFFFF
    c0, c1, c2, c3 = position, 0, 0, 0
    k0, k1 = seed & mask, (seed >> 32) & mask
    for _ in range(10):
        left, right = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (right >> 32) ^ c1 ^ k0, right & mask, (left >> 32) ^ c3 ^ k1, left & mask
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return (c0 + 0.5) / 2**32


def expected(logits: Logits, case: Case) -> tuple[int, float]:
    """Return the token the definition chooses, and the distance to the nearest decision that rounding could turn."""
    params, row = case.params, processed(logits, case).astype(np.float64)
    ranking = sorted(range(len(row)), key=lambda token: (-row[token], token))
    if params.temperature == 0:
        return ranking[0], 1.0
    ratios = np.exp((row - row.max()) / params.temperature)
    kept = ranking[: params.top_k] if params.top_k else ranking
    margin = 1.0
    if params.top_p < 1:
        shares = np.cumsum(ratios[kept]) / ratios[kept].sum()
        margin = min(margin, float(np.abs(shares - params.top_p).min()))
        kept = kept[: int(np.argmax(shares >= params.top_p)) + 1]
    lesser = ratios[row < row.max()]
    margin = min([margin, *np.abs(lesser - params.min_p)]) if params.min_p > 0 else margin
    kept = sorted(token for token in kept if ratios[token] >= params.min_p)
    shares = np.cumsum(ratios[kept]) / ratios[kept].sum()
    noise = uniform(params.seed, len(case.tokens))
    margin = min(margin, float(np.abs(shares - noise).min()))
    return kept[int(np.argmax(shares > noise))], margin
