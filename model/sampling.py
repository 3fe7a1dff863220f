"""From logits to tokens and log-probabilities.

Logits are processed in this order: logit_bias, penalties, masks, temperature, top_k, top_p, min_p. The noise of a draw
depends on the request's seed and the token's position alone. Equal logits rank by token id, lower first.
Log-probabilities come from the raw logits. A row's result has the same bits whatever other rows are sampled with it,
and a row that needs little does not pay for one that needs more.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.model.draw import draw, draw_truncated, largest, most_likely, take_rows
from octavo.model.philox import uniforms
from octavo.model.slots import IntArray, Records, SlotTable
from octavo.model.step import RowResult, TokenLogprobs

Flags = NDArray[np.bool_]

_ELEMENTS_AT_ONCE = 1 << 20
"""Rows are taken in parts of about this many logits, which bounds the temporaries: at most about 40 bytes a logit."""
_LARGEST_LOGIT = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens of a batch of rows with their log-probabilities, where the device has them."""

    tokens: Tensor
    """int32 [rows]. Always ids of the vocabulary; 0 for a failed row."""
    failed: Tensor
    """bool [rows]: the row's logits held a value that is not finite, or no token was left to choose."""
    alternatives: IntArray
    """[rows], on the host: how many alternatives to report; -1 reports no log-probabilities."""
    logprobs: Tensor
    """float32 [rows]: of each token; undefined for rows that did not ask."""
    top_ids: Tensor
    """int32 [rows, largest number of alternatives], most likely first."""
    top_logprobs: Tensor
    """float32, shaped as top_ids."""

    @property
    def asked(self) -> list[int]:
        """The rows whose log-probabilities are to be reported."""
        rows: list[int] = np.flatnonzero(self.alternatives >= 0).tolist()
        return rows

    def part(self, rows: slice) -> "Sampled":
        """Return views of some rows."""
        return Sampled(
            tokens=self.tokens[rows],
            failed=self.failed[rows],
            alternatives=self.alternatives[rows],
            logprobs=self.logprobs[rows],
            top_ids=self.top_ids[rows],
            top_logprobs=self.top_logprobs[rows],
        )

    def to_host(self) -> "Sampled":
        """Queue copies to the CPU. Complete once the device has reached this point of its stream."""
        return replace(
            self,
            tokens=self.tokens.to("cpu", non_blocking=True),
            failed=self.failed.to("cpu", non_blocking=True),
            logprobs=self.logprobs.to("cpu", non_blocking=True),
            top_ids=self.top_ids.to("cpu", non_blocking=True),
            top_logprobs=self.top_logprobs.to("cpu", non_blocking=True),
        )

    def results(self) -> list[RowResult]:
        """Return one result per row. Waits for the device unless called on the completed `to_host`."""
        failed = self.failed.tolist()
        results = [
            RowResult(failed=True) if bad else RowResult(token=token)
            for token, bad in zip(self.tokens.tolist(), failed, strict=True)
        ]
        for row in self.asked:
            if not failed[row]:
                results[row] = replace(results[row], logprobs=self._token_logprobs(row))
        return results

    def _token_logprobs(self, row: int) -> TokenLogprobs:
        count = int(self.alternatives[row])
        ids, logprobs = self.top_ids[row, :count].tolist(), self.top_logprobs[row, :count].tolist()
        return TokenLogprobs(
            token=int(self.tokens[row]),
            logprob=float(self.logprobs[row]),
            top=tuple(zip(ids, logprobs, strict=True)),
        )


class Sampler:
    """Samples the next token of each row, by the parameters of the row's slot."""

    def __init__(self, vocabulary: int, slots: SlotTable, max_rows: int) -> None:
        self._vocabulary = vocabulary
        self._slots = slots
        self._rows_at_once = min(max_rows, max(1, _ELEMENTS_AT_ONCE // vocabulary))
        self._occurrences = torch.zeros(vocabulary, dtype=torch.float64, device=slots.device)
        """How often each token occurs in one row's output; all zeros between uses."""

    def reset(self) -> None:
        """Forget what an interrupted use has left behind."""
        self._occurrences.zero_()

    def sample(self, logits: Tensor, slots: IntArray, positions: IntArray) -> Sampled:
        """Choose a token for each row.

        logits: float32 [rows, vocabulary], overwritten. slots and positions: [rows], on the host; a position is the
        index of the new token in prompt and output together, and all tokens before it must be in the slot table.
        """
        records = self._slots.sampling[slots]
        result = self._empty(records["logprobs"])
        if _greedy(records).all() and not self._edited(slots, positions).any() and not result.asked:
            result.failed.copy_(_not_finite(logits))
            result.tokens.copy_(largest(logits))
        else:
            for part in self._parts(len(slots)):
                self._sample_part(logits[part], slots[part], positions[part], result.part(part))
        result.tokens.masked_fill_(result.failed, 0)
        return result

    def score(self, logits: Tensor, slots: IntArray, positions: IntArray) -> Sampled:
        """Report prompt tokens as if each had been sampled, with as many alternatives as its slot's prompt_logprobs.

        logits: float32 [rows, vocabulary]; slots and positions: [rows], on the host; a position is the index of the
        token that the row's logits predict. A slot may occur in any number of rows.
        """
        result = self._empty(self._slots.sampling[slots]["prompt_logprobs"])
        result.tokens.copy_(self._slots.read(slots, positions))
        for rows in self._parts(len(slots)):
            part = result.part(rows)
            part.failed.copy_(_not_finite(logits[rows]))
            _report(take_rows(logits[rows], part.asked).log_softmax(dim=1), part.asked, part)
        return result

    def _empty(self, alternatives: IntArray) -> Sampled:
        rows, device = len(alternatives), self._slots.device
        alternatives = np.minimum(alternatives, self._vocabulary)
        width = max(0, int(alternatives.max(initial=0)))
        return Sampled(
            tokens=torch.zeros(rows, dtype=torch.int32, device=device),
            failed=torch.zeros(rows, dtype=torch.bool, device=device),
            alternatives=alternatives,
            logprobs=torch.zeros(rows, dtype=torch.float32, device=device),
            top_ids=torch.zeros(rows, width, dtype=torch.int32, device=device),
            top_logprobs=torch.zeros(rows, width, dtype=torch.float32, device=device),
        )

    def _parts(self, rows: int) -> Iterator[slice]:
        for start in range(0, rows, self._rows_at_once):
            yield slice(start, start + self._rows_at_once)

    def _sample_part(self, logits: Tensor, slots: IntArray, positions: IntArray, result: Sampled) -> None:
        records = self._slots.sampling[slots]
        result.failed.copy_(_not_finite(logits))
        raw_logprobs = take_rows(logits, result.asked).log_softmax(dim=1)
        for row in np.flatnonzero(self._edited(slots, positions)).tolist():
            self._edit(logits[row], int(slots[row]), int(positions[row]))
        chosen = largest(logits)
        # Biases and masks can forbid every token; then the largest logit is minus infinity.
        result.failed.logical_or_(~logits.gather(1, chosen[:, None])[:, 0].isfinite())
        drawn, truncated, floored = ~_greedy(records), _truncated(records, self._vocabulary), records["min_p"] > 0
        whole = drawn & ~truncated
        for group, function in ((whole & ~floored, draw), (whole & floored, draw), (drawn & truncated, draw_truncated)):
            rows = np.flatnonzero(group).tolist()
            if rows:
                noise = uniforms(records["seed"][rows], positions[rows])
                chosen[rows] = function(take_rows(logits, rows), records[rows], noise)
        result.tokens.copy_(chosen)
        _report(raw_logprobs, result.asked, result)

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
            history = self._slots.tokens[slot, :position].long()
            _penalise_repetition(logits, history, float(record["repetition_penalty"]))
        presence, frequency = float(record["presence_penalty"]), float(record["frequency_penalty"])
        if presence != 0 or frequency != 0:
            output = self._slots.tokens[slot, prompt_length:position].long()
            self._penalise_occurrence(logits, output, presence, frequency)
        if self._slots.masks.active[slot]:
            self._slots.masks.apply(slot, logits)
        elif position - prompt_length < record["min_tokens"]:
            logits.index_fill_(0, lists.ending_ids, -torch.inf)

    def _penalise_occurrence(self, logits: Tensor, output: Tensor, presence: float, frequency: float) -> None:
        """Subtract `presence` and the number of occurrences times `frequency` from the logits of generated tokens."""
        ones = torch.ones(1, dtype=torch.float64, device=output.device).expand(len(output))
        self._occurrences.scatter_add_(0, output, ones)
        penalties = self._occurrences[output] * frequency + presence
        # A token that occurs twice is written twice, with the same value.
        logits.scatter_(0, output, (logits[output].double() - penalties).float())
        self._occurrences.index_fill_(0, output, 0)


def _greedy(records: Records) -> Flags:
    """Which rows take the largest logit, be it by temperature or because nothing else is kept."""
    flags: Flags = (records["temperature"] == 0) | (records["top_k"] == 1) | (records["top_p"] <= 0)
    return flags


def _truncated(records: Records, vocabulary: int) -> Flags:
    """Which rows need their tokens ranked. min_p alone does not."""
    flags: Flags = (records["top_k"] < vocabulary) | (records["top_p"] < 1)
    return flags


def _not_finite(logits: Tensor) -> Tensor:
    """Which rows hold a NaN or an infinity: bool [rows]. Both extremes of a row that holds a NaN are NaN."""
    return ~(logits.amax(dim=1).isfinite() & logits.amin(dim=1).isfinite())


def _penalise_repetition(logits: Tensor, history: Tensor, penalty: float) -> None:
    """Divide the positive logits of seen tokens by the penalty and multiply the others (Keskar et al., 2019)."""
    seen = logits[history].double()
    seen = torch.where(seen > 0, seen / penalty, seen * penalty).clamp_(max=_LARGEST_LOGIT)
    # A token that occurs twice is written twice, with the same value.
    logits.scatter_(0, history, seen.float())


def _report(logprobs: Tensor, rows: Sequence[int], result: Sampled) -> None:
    """Fill in the log-probabilities of some rows. logprobs: float32 [len(rows), vocabulary]."""
    if not rows:
        return
    result.logprobs[rows] = logprobs.gather(1, result.tokens[rows].long()[:, None])[:, 0]
    if width := max(int(result.alternatives[rows].max()), 0):
        ids = most_likely(logprobs, width)
        result.top_ids[rows, :width] = ids.int()
        result.top_logprobs[rows, :width] = logprobs.gather(1, ids)
