"""From logits to tokens and log-probabilities.

Logits are processed in this order: logit_bias, penalties, masks, temperature, top_k, top_p, min_p. The noise of a draw
depends on the request's seed and the token's position alone. Equal logits rank by token id, lower first.
Log-probabilities come from the raw logits. A row's result has the same bits whatever other rows are sampled with it,
and a row that needs little does not pay for one that needs more. Rows that need more than their largest logit go one
at a time through the arena's scratch of one row, so the sampler allocates nothing but its results.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.model.device import Fence, Lander
from octavo.model.draw import Highest, RowScratch, draw, draw_truncated, highest, most_likely, not_finite, rank_of
from octavo.model.penalties import penalise_occurrence, penalise_repetition
from octavo.model.philox import uniforms
from octavo.model.slots import IntArray, Record, Records, SlotTable
from octavo.model.step import RowResult, TokenLogprobs

Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Report:
    """Log-probabilities of one row, where the device has them."""

    row: int
    logprob: Tensor
    """float32 [1]: of the row's token."""
    rank: Tensor
    """int64 [1]: one more than there are likelier tokens, or equally likely ones with lower ids."""
    top_ids: Tensor
    """int32 [alternatives], most likely first."""
    top_logprobs: Tensor
    """float32, shaped as top_ids."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens of a batch of rows with their log-probabilities, where the device has them."""

    tokens: Tensor
    """int32 [rows]. Always ids of the vocabulary; 0 for a failed row that is sampled."""
    failed: Tensor
    """bool [rows]: the row's logits held a value that is not finite, or no token was left to choose."""
    reports: tuple[Report, ...]
    """Of the rows that asked for log-probabilities, in order."""

    def to_host(self, lander: Lander) -> tuple["Sampled", Fence]:
        """Queue copies to the host. They are complete once the fence is passed."""
        parts = [(report.logprob, report.rank, report.top_ids, report.top_logprobs) for report in self.reports]
        tensors = (self.tokens, self.failed, *(tensor for part in parts for tensor in part))
        (tokens, failed, *rest), fence = lander.land(tensors)
        reports = (Report(report.row, *rest[4 * number : 4 * number + 4]) for number, report in enumerate(self.reports))
        return Sampled(tokens, failed, tuple(reports)), fence

    def results(self) -> list[RowResult]:
        """Return one result per row. Waits for the device unless called on the completed `to_host`."""
        failed = self.failed.tolist()
        results = [
            RowResult(failed=True) if bad else RowResult(token=token)
            for token, bad in zip(self.tokens.tolist(), failed, strict=True)
        ]
        for report in self.reports:
            if not failed[report.row]:
                results[report.row] = replace(results[report.row], logprobs=self._token_logprobs(report))
        return results

    def _token_logprobs(self, report: Report) -> TokenLogprobs:
        return TokenLogprobs(
            token=int(self.tokens[report.row]),
            logprob=float(report.logprob),
            rank=int(report.rank),
            top=tuple(zip(report.top_ids.tolist(), report.top_logprobs.tolist(), strict=True)),
        )


class Sampler:
    """Samples the next token of each row, by the parameters of the row's slot."""

    def __init__(self, slots: SlotTable, scratch: RowScratch, highest: Highest = highest) -> None:
        """`highest` finds what most rows need; see draw.highest."""
        self._slots = slots
        self._scratch = scratch
        self._highest = highest

    def sample(self, logits: Tensor, slots: IntArray, positions: IntArray) -> Sampled:
        """Choose a token for each row.

        logits: float32 [rows, vocabulary], overwritten. slots and positions: [rows], on the host; a position is the
        index of the new token in prompt and output together, and all tokens before it must be in the slot table.
        """
        records = self._slots.sampling[slots]
        tokens, failed = self._highest(logits)
        drawn, edited, asked = ~greedy(records), self._edited(slots, positions), records["logprobs"] >= 0
        noise = uniforms(records["seed"], positions) if drawn.any() else np.zeros(len(slots))
        best, reports = torch.zeros(len(slots), device=logits.device), []
        for row in np.flatnonzero(drawn | edited | asked).tolist():
            one = logits[row]
            if asked[row]:
                torch.log_softmax(one, 0, out=self._scratch.logprobs)
            if edited[row]:
                self._edit(one, int(slots[row]), int(positions[row]))
                tokens[row] = token = self._highest(one[None])[0][0]
                best[row] = one[token]
            if drawn[row]:
                tokens[row] = self._draw(one, records[row], float(noise[row]))[0]
            if asked[row]:
                reports.append(self._report(row, tokens, int(records["logprobs"][row])))
        # Biases and masks can forbid every token; then the largest logit is minus infinity.
        failed.logical_or_(~best.isfinite())
        return Sampled(tokens.masked_fill_(failed, 0), failed, tuple(reports))

    def score(self, logits: Tensor, slots: IntArray, positions: IntArray) -> Sampled:
        """Report prompt tokens as if each had been sampled, with as many alternatives as its slot's prompt_logprobs.

        logits: float32 [rows, vocabulary]; slots and positions: [rows], on the host; a position is the index of the
        token that the row's logits predict. A slot may occur in any number of rows.
        """
        alternatives = self._slots.sampling[slots]["prompt_logprobs"]
        tokens, reports = self._slots.read(slots, positions), []
        for row in np.flatnonzero(alternatives >= 0).tolist():
            torch.log_softmax(logits[row], 0, out=self._scratch.logprobs)
            reports.append(self._report(row, tokens, int(alternatives[row])))
        return Sampled(tokens, not_finite(logits, logits.amax(dim=1)), tuple(reports))

    def _report(self, row: int, tokens: Tensor, alternatives: int) -> Report:
        """Look up the row's token and its rivals in scratch.logprobs."""
        logprobs, count = self._scratch.logprobs, min(alternatives, len(self._scratch.logprobs))
        ids = most_likely(logprobs, count, self._scratch) if count else self._scratch.keys[:0]
        logprob = logprobs.gather(0, tokens[row : row + 1].long())
        rank = rank_of(int(tokens[row]), logprobs, self._scratch)
        return Report(row, logprob, rank, ids.int(), logprobs.gather(0, ids))

    def _draw(self, logits: Tensor, record: Record, noise: float) -> Tensor:
        """Draw a token from one row [vocabulary]: int64 [1]. min_p alone needs no ranking."""
        ranking = record["top_k"] < len(logits) or record["top_p"] < 1
        return (draw_truncated if ranking else draw)(logits, record, noise, self._scratch)

    def _edited(self, slots: IntArray, positions: IntArray) -> Flags:
        """Which rows have logits that change before the temperature."""
        records = self._slots.sampling[slots]
        flags = records["biased"] | self._slots.masks.active[slots]
        for name, neutral in (("repetition_penalty", 1), ("presence_penalty", 0), ("frequency_penalty", 0)):
            flags |= records[name] != neutral
        flags |= positions - records["prompt_length"] < records["min_tokens"]
        return flags

    def _edit(self, logits: Tensor, slot: int, position: int) -> None:
        """Apply biases, penalties and masks to one row [vocabulary], in place."""
        record, lists = self._slots.sampling[slot], self._slots.lists[slot]
        if lists is None:
            raise ValueError(f"slot {slot} is sampled but free")
        prompt_length = int(record["prompt_length"])
        logits.index_add_(0, lists.bias_ids, lists.bias_values)
        if record["repetition_penalty"] != 1:
            history = self._slots.tokens[slot, :position]
            penalise_repetition(logits, history, float(record["repetition_penalty"]), self._scratch)
        presence, frequency = float(record["presence_penalty"]), float(record["frequency_penalty"])
        if presence != 0 or frequency != 0:
            output = self._slots.tokens[slot, prompt_length:position]
            penalise_occurrence(logits, output, presence, frequency, self._scratch)
        if self._slots.masks.active[slot]:
            self._slots.masks.apply(slot, logits)
        elif position - prompt_length < record["min_tokens"]:
            logits.index_fill_(0, lists.ending_ids, -torch.inf)


def greedy(records: Records) -> Flags:
    """Which rows take the largest logit, be it by temperature or because nothing else is kept."""
    flags: Flags = (records["temperature"] == 0) | (records["top_k"] == 1) | (records["top_p"] <= 0)
    return flags
