"""Sampling on a GPU: many rows at a time, and nothing that would make the host wait.

The tokens are those of sampling.py. Temporaries are of SAMPLER_LOGITS logits at most, and charged to the activations.
"""

import numpy as np
import torch
from torch import Tensor

from octavo.model.device_draw import draw_rows, draw_truncated_rows, most_likely_rows, put_rows, rank_rows, take_rows
from octavo.model.draw import largest, not_finite
from octavo.model.philox import uniforms
from octavo.model.sampling import Report, Sampled, Sampler, greedy
from octavo.model.slots import IntArray
from octavo.model.workspaces import SAMPLER_LOGITS


class DeviceSampler(Sampler):
    """Samples the next token of each row on the device."""

    def sample(self, logits: Tensor, slots: IntArray, positions: IntArray) -> Sampled:
        """Choose a token for each row; see Sampler."""
        records = self._slots.sampling[slots]
        failed, reports = not_finite(logits, logits.amax(dim=1)), []
        tokens = torch.empty(len(slots), dtype=torch.int32, device=logits.device)
        at_once = max(1, SAMPLER_LOGITS // logits.shape[1])
        for first in range(0, len(slots), at_once):
            part = slice(first, first + at_once)
            asked = np.flatnonzero(records["logprobs"][part] >= 0)
            raw = take_rows(logits[part], asked).log_softmax(dim=1) if len(asked) else logits[:0]
            tokens[part] = self._choose(logits[part], slots[part], positions[part])
            alternatives = records["logprobs"][part][asked]
            reports += _reports(raw, asked + first, take_rows(tokens[part], asked), alternatives)
        # Biases and masks can forbid every token; then the largest logit is minus infinity.
        failed.logical_or_(logits.amax(dim=1) == -torch.inf)
        return Sampled(tokens.masked_fill_(failed, 0), failed, tuple(reports))

    def score(self, logits: Tensor, slots: IntArray, positions: IntArray) -> Sampled:
        """Report prompt tokens as if each had been sampled; see Sampler."""
        alternatives, reports = self._slots.sampling[slots]["prompt_logprobs"], []
        tokens = self._slots.read(slots, positions)
        asked = np.flatnonzero(alternatives >= 0)
        at_once = max(1, SAMPLER_LOGITS // logits.shape[1])
        for first in range(0, len(asked), at_once):
            rows = asked[first : first + at_once]
            raw = take_rows(logits, rows).log_softmax(dim=1)
            reports += _reports(raw, rows, take_rows(tokens, rows), alternatives[rows])
        return Sampled(tokens, not_finite(logits, logits.amax(dim=1)), tuple(reports))

    def _choose(self, logits: Tensor, slots: IntArray, positions: IntArray) -> Tensor:
        """Edit some rows of logits, in place, and choose their tokens: int64 [rows]."""
        records = self._slots.sampling[slots]
        for row in np.flatnonzero(self._edited(slots, positions)).tolist():
            self._edit(logits[row], int(slots[row]), int(positions[row]))
        chosen = largest(logits)
        # Tokens are ranked for top_k and top_p; min_p does without.
        drawn, truncated = ~greedy(records), (records["top_k"] < logits.shape[1]) | (records["top_p"] < 1)
        for group, draw in ((drawn & ~truncated, draw_rows), (drawn & truncated, draw_truncated_rows)):
            rows = np.flatnonzero(group)
            if len(rows):
                noise = uniforms(records["seed"][rows], positions[rows])
                put_rows(chosen, rows, draw(take_rows(logits, rows), records[rows], noise))
        return chosen


def _reports(logprobs: Tensor, rows: IntArray, tokens: Tensor, alternatives: IntArray) -> list[Report]:
    """Look up tokens [rows] and their rivals in log-probabilities [rows, vocabulary]; `rows` numbers them."""
    if not len(rows):
        return []
    width = min(int(alternatives.max()), logprobs.shape[1])
    ids = most_likely_rows(logprobs, width) if width else logprobs[:, :0].long()
    chosen, top = logprobs.gather(1, tokens.long()[:, None]), logprobs.gather(1, ids)
    ranks, narrow = rank_rows(tokens, logprobs), ids.int()
    counts = np.minimum(alternatives, logprobs.shape[1]).tolist()
    return [
        Report(row, chosen[index], ranks[index], narrow[index, :count], top[index, :count])
        for index, (row, count) in enumerate(zip(rows.tolist(), counts, strict=True))
    ]
