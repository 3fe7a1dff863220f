"""What a runner eats and what it returns.

A step is a list of rows. There is no prefill and no decode: a row says which tokens of which slot to compute, and a
decode is a row of one. This module imports no torch, so the scheduler's tests run in milliseconds.
"""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request's tokens are chosen. Every field is validated by the server; ranges are those of the API.

    Logits are processed in this order: logit_bias, penalties, masks, temperature, top_k, top_p, min_p.
    """

    temperature: float = 1.0
    """0 means greedy; the server rounds anything below 1e-5 down to 0."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    min_p: float = 0.0
    seed: int = 0
    """64-bit key of the request's noise; already mixed with the choice's index."""
    repetition_penalty: float = 1.0
    """Over prompt and output: a seen token's positive logit is divided by it, a negative one multiplied."""
    presence_penalty: float = 0.0
    """Over output tokens only."""
    frequency_penalty: float = 0.0
    """Over output tokens only, times the number of occurrences."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Added to the logits: pairs of token id and bias; -100 forbids a token, 100 forces it."""
    allowed: bytes | None = None
    """The only tokens that may be chosen, as a mask of the kind in `Row`; the scheduler narrows it for each row."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that the output must not contain; with them, `allowed` is set too."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    """Until this many tokens are generated, no token that would end the request can be chosen."""
    logprobs: int | None = None
    """How many alternatives to report beside each sampled token; None reports no log-probabilities at all."""
    prompt_logprobs: int | None = None
    """The same for each prompt token but the first."""


@dataclass(frozen=True, slots=True)
class Admission:
    """A request takes a slot: everything the runner must know about it, once."""

    slot: int
    tokens: tuple[int, ...]
    """Prompt, and after a preemption the output so far."""
    prompt_length: int
    """How many of `tokens` are prompt: penalties and min_tokens tell prompt from output."""
    blocks: tuple[int, ...]
    params: SamplingParams
    ending_ids: tuple[int, ...] = ()
    """Ids that end this request (EOS and stop ids): those that min_tokens masks."""


@dataclass(frozen=True, slots=True)
class Growth:
    """Blocks appended to the table of a slot that runs already."""

    slot: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """Compute `count` tokens of one slot, beginning at position `start`."""

    slot: int
    start: int
    count: int
    sample: bool
    """Whether the row reaches the end of the known tokens, so that its last position yields the next one."""
    score: bool = False
    """Whether to report log-probabilities of the prompt tokens that positions start .. start+count-1 predict."""
    mask: bytes | None = None
    """Which tokens may be sampled: token i has bit i % 8 of byte i // 8, in whole words of 32 bits. None allows all.

    Whoever makes the mask heeds min_tokens in it; the sampler then does not.
    """


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass. Retirements happen first, then admissions, then growth, then the rows.

    Rows of one token come before longer ones, so that an attention backend can treat them apart.
    """

    retired: tuple[int, ...]
    admitted: tuple[Admission, ...]
    grown: tuple[Growth, ...]
    rows: tuple[Row, ...]

    @property
    def tokens(self) -> int:
        """Number of tokens computed."""
        return sum(row.count for row in self.rows)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of one token and of its most likely rivals, from the raw logits before any processing."""

    token: int
    logprob: float
    rank: int
    """1 for the likeliest token of the vocabulary; of equal ones, the lower id is before the other."""
    top: tuple[tuple[int, float], ...] = ()
    """(token, log-probability), most likely first, ties by lower id."""


@dataclass(frozen=True, slots=True)
class RowResult:
    """What one row yielded."""

    token: int | None = None
    """The sampled token; None where the row does not sample."""
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """For a scored row: entries for prompt positions start+1 .. min(start+count, prompt_length-1)."""
    failed: bool = False
    """The row's logits held a value that is not finite: the request cannot go on, its neighbours can."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results in the order of the step's rows."""

    rows: tuple[RowResult, ...]
    activations: int = 0
    """Bytes of the activations' bucket that the step made use of."""


class Pending(Protocol):
    """A step that was queued on the device."""

    def wait(self) -> StepResult:
        """Block until the step has finished and return its results. Called once, in submission order."""
        ...


class Runner(Protocol):
    """One device. Steps execute strictly in the order they are submitted."""

    def submit(self, step: Step) -> Pending:
        """Queue a step. The runner keeps no reference to anything the caller may change.

        After an exception, from here or from `wait`, nothing but `reset` makes sense.
        """
        ...

    def reset(self) -> None:
        """Forget all slots, and whatever of a step that failed is left. Called when no step is awaited any more.

        Contents of blocks survive. Raises if the device does not work any more.
        """
        ...
