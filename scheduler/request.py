"""The life of one request inside the engine."""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Self

import msgspec

from octavo.model.step import Row, RowResult, SamplingParams, TokenLogprobs
from octavo.scheduler.grammar import GrammarState
from octavo.scheduler.messages import FinishReason, Submission, TokenEvent
from octavo.scheduler.restrictions import next_mask, without


@dataclass(frozen=True, slots=True)
class Limits:
    """What one step and one request may take."""

    max_rows: int
    """Requests that run at a time: the number of slots."""
    max_tokens: int
    """Tokens that one step computes."""
    max_model_len: int
    """Prompt and output of one request together."""
    block_size: int
    """Positions in a block."""
    reserve: bool = False
    """Whether a request is admitted only with the blocks of its whole life, and so never preempted."""
    mixed_tokens: int | None = None
    """Tokens that a step computes in which some request generates, at least max_rows; None: max_tokens."""

    def blocks_for(self, positions: int) -> int:
        """Blocks that hold so many positions."""
        return -(-positions // self.block_size)


@dataclass(eq=False, slots=True)
class Request:
    """One prompt and what has become of it. Two requests are the same only if they are the same object.

    Three lengths tell where it stands: `known` tokens have a value on the host, `pending` more are being sampled by
    steps in flight, and K and V of `computed` positions are in the cache, or will be once those steps have run.
    """

    id: int
    prompt: tuple[int, ...]
    params: SamplingParams
    limit: int
    """Tokens to generate at most: max_tokens, or less where the model's context ends before."""
    salt: bytes
    eos_ids: frozenset[int]
    """Empty if it ignores the end of sequence."""
    arrival: float
    """Seconds on the scheduler's clock."""
    priority: int = 0
    """Lower ones go first."""

    grammar: GrammarState | None = None
    """Where it stands in the grammar that its output follows."""
    output: list[int] = field(default_factory=list)
    slot: int | None = None
    """Its place on the device; None while it waits and after its end."""
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    pending: int = 0
    in_flight: int = 0
    """Rows in steps that are scheduled and not yet committed."""
    finish: FinishReason | None = None
    paused: bool = False
    """Whether it is left alone until its client has read more."""

    names: list[bytes] = field(default_factory=list)
    """Names of its full blocks from the first on, as far as they were needed. Tokens never change, nor do names."""
    published: int = 0
    """How many of `blocks`, from the first on, are published or were found in the cache."""
    wanted: int = 0
    """Available blocks that its last try at admission would have needed: below this, trying again is useless."""

    scored: int = 0
    """Prompt log-probabilities reported so far."""
    queue_seconds: float | None = None
    """Time from arrival to the first admission; None before it."""
    cached_tokens: int = 0
    """Prompt tokens found in the cache at the first admission."""
    announced: bool = False
    """Whether the event that follows its admission has been made."""
    suspect_until: int = 0
    """After a failed step: the position up to which it must be computed to show that it was not to blame."""

    @classmethod
    def of(cls, submission: Submission, limits: Limits, eos_ids: frozenset[int], arrival: float) -> Self:
        """Make the request that a submission asks for."""
        return cls(
            id=submission.request,
            prompt=submission.prompt,
            params=submission.params,
            limit=min(submission.max_tokens, limits.max_model_len - len(submission.prompt)),
            salt=submission.salt,
            eos_ids=frozenset() if submission.params.ignore_eos else eos_ids,
            arrival=arrival,
            priority=submission.priority,
            output=list(submission.emitted),
            scored=submission.scored,
            announced=submission.announced,
            paused=submission.paused,
        )

    @property
    def order(self) -> tuple[int, float, int]:
        """Who goes first: by priority, then by arrival."""
        return self.priority, self.arrival, self.id

    def reason_to_refuse(self, max_tokens: int, limits: Limits, total_blocks: int) -> str | None:
        """Why this request could never be computed; None if it could. max_tokens: as the client asked."""
        prompt, context = len(self.prompt), limits.max_model_len
        if prompt == 0:
            return "the prompt is empty: at least one token is needed"
        if prompt > context:
            return f"the prompt has {prompt} tokens, but the context holds only {context}: shorten it"
        if max_tokens > 0 and prompt == context:
            return f"the prompt has {prompt} tokens and fills the context: no room is left to generate, shorten it"
        blocks = limits.blocks_for(self.span)
        if blocks > total_blocks:
            return (
                f"{prompt} prompt tokens and up to {self.limit} generated ones need {blocks} KV blocks of "
                f"{limits.block_size}, but the cache has only {total_blocks}: shorten the prompt or max_tokens"
            )
        return None

    @property
    def ending_ids(self) -> tuple[int, ...]:
        """Sampling one of these ends the request, once more than min_tokens are there."""
        return tuple(sorted(self.eos_ids.union(self.params.stop_token_ids)))

    @property
    def known(self) -> int:
        """Tokens whose value the host knows: prompt and output so far."""
        return len(self.prompt) + len(self.output)

    @property
    def span(self) -> int:
        """Positions that its whole life computes at most: the last token is sampled, but never computed."""
        return len(self.prompt) + max(self.limit - 1, 0)

    @property
    def remaining(self) -> int:
        """Tokens that could be computed now. 0 if its last token is in flight."""
        return min(self.known + self.pending, self.span) - self.computed

    def samples(self, count: int) -> bool:
        """Whether `count` more tokens reach the end of the known ones, so that the next one is sampled."""
        return self.computed + count == self.known + self.pending and self.limit > 0

    def held(self, count: int) -> bool:
        """Whether a row of `count` tokens must wait for a token in flight, or for a mask that is being made."""
        if self.pending > 0 and (self.params.bad_words or self.grammar is not None):
            return True
        return self.grammar is not None and self.samples(count) and not self.grammar.job.done()

    def next_mask(self) -> bytes | None:
        """Which tokens it may sample next; None: all of them."""
        if self.grammar is None:
            return next_mask(self.params, self.output, self.pending, self.ending_ids)
        early = len(self.output) < self.params.min_tokens
        return without(self.grammar.mask(), self.ending_ids) if early else self.grammar.mask()

    @property
    def scores(self) -> int:
        """Prompt log-probabilities that it asks for: one for each prompt token but the first."""
        return 0 if self.params.prompt_logprobs is None else len(self.prompt) - 1

    @property
    def reusable(self) -> int:
        """Positions that may be skipped if their K and V are cached.

        Not those that predict prompt tokens still to be scored, and never the last, which yields the next token.
        """
        return self.scored if self.scored < self.scores else self.known - 1

    def tokens(self, start: int, stop: int) -> tuple[int, ...]:
        """Known tokens at positions start .. stop-1."""
        prompt = len(self.prompt)
        return self.prompt[start:stop] + tuple(self.output[max(start - prompt, 0) : max(stop - prompt, 0)])

    def take(self, token: int | None) -> tuple[FinishReason | None, int | None]:
        """Append a sampled token. Returns whether it ends the request, and the stop id if that is why."""
        if token is None:
            raise ValueError(f"the runner sampled no token for request {self.id}")
        self.pending -= 1
        self.output.append(token)
        if len(self.output) > self.params.min_tokens or self.grammar is not None:
            if token in self.eos_ids:
                return "stop", None
            if token in self.params.stop_token_ids:
                return "stop", token
        if len(self.output) >= self.limit:
            return "length", None
        if self.grammar is not None:
            self.grammar.take(token)
        return None, None

    def new_scores(self, row: Row, outcome: RowResult) -> tuple[TokenLogprobs, ...]:
        """Prompt log-probabilities of a row, without those that were reported before a preemption."""
        if not row.score:
            return ()
        scores = outcome.prompt_logprobs[max(self.scored - row.start, 0) :]
        self.scored = min(row.start + row.count, self.scores)
        return scores

    def announce(self, event: TokenEvent) -> TokenEvent:
        """Mark the first event after the admission with what is known since then; return later ones as they are."""
        if self.announced or self.queue_seconds is None:
            return event
        self.announced = True
        return msgspec.structs.replace(
            event, first=True, queue_seconds=self.queue_seconds, cached_tokens=self.cached_tokens
        )


def line_up(queue: OrderedDict[int, Request], request: Request) -> None:
    """Put a request into its place in a queue by id that is in order. Most places are at an end."""
    first, last = next(iter(queue.values()), request), next(reversed(queue.values()), request)
    queue[request.id] = request
    if request.order < first.order:
        queue.move_to_end(request.id, last=False)
    elif request.order < last.order:
        for other in sorted(queue.values(), key=lambda other: other.order):
            queue.move_to_end(other.id)
