"""A plain batching loop over a runner, independent of the scheduler: whole requests in, tokens out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from octavo.model.step import Admission, Growth, Row, RowResult, Runner, SamplingParams, Step, TokenLogprobs

GREEDY = SamplingParams(temperature=0.0, logprobs=0)


@dataclass(slots=True)
class Request:
    prompt: tuple[int, ...]
    max_tokens: int
    params: SamplingParams = GREEDY
    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    computed: int = 0
    blocks: int = 0
    failed: bool = False

    @property
    def known(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def done(self) -> bool:
        return self.failed or (len(self.output) >= self.max_tokens and self.computed >= len(self.prompt))


@dataclass(slots=True)
class Driver:
    """Admits every request at once or after a delay, one slot each, and never frees a block."""

    runner: Runner
    block_size: int
    max_tokens: int
    chunk: Callable[[int, int], int] = lambda turn, wanted: wanted
    """(turn, tokens a row could compute) -> tokens it does compute, at least 1."""
    next_block: int = 0

    def run(self, requests: Sequence[Request], delays: Sequence[int] = ()) -> Sequence[Request]:
        turn = 0
        delays = delays or [0] * len(requests)
        while not all(request.done for request in requests):
            live = [slot for slot, request in enumerate(requests) if turn >= delays[slot] and not request.done]
            if live:
                self._turn(turn, {slot: requests[slot] for slot in live})
            turn += 1
        self.runner.submit(Step(tuple(range(len(requests))), (), (), ())).wait()
        return requests

    def _turn(self, turn: int, live: dict[int, Request]) -> None:
        rows, admitted, grown, left = [], [], [], self.max_tokens
        for slot, request in live.items():
            count = min(self.chunk(turn, request.known - request.computed), left)
            if count < 1:
                continue
            left -= count
            end = request.computed + count
            blocks = self._blocks(request, end)
            if request.computed == 0:
                admitted.append(Admission(slot, request.prompt, len(request.prompt), blocks, request.params))
            elif blocks:
                grown.append(Growth(slot, blocks))
            scored = request.params.prompt_logprobs is not None and request.computed < len(request.prompt)
            sample = end == request.known and len(request.output) < request.max_tokens
            rows.append(Row(slot, request.computed, count, sample=sample, score=scored))
        rows.sort(key=lambda row: row.count > 1)
        results = self.runner.submit(Step((), tuple(admitted), tuple(grown), tuple(rows))).wait()
        for row, result in zip(rows, results.rows, strict=True):
            _commit(live[row.slot], row, result)

    def _blocks(self, request: Request, end: int) -> tuple[int, ...]:
        needed = -(-end // self.block_size) - request.blocks
        first = self.next_block
        self.next_block += needed
        request.blocks += needed
        return tuple(range(first, first + needed))


def _commit(request: Request, row: Row, result: RowResult) -> None:
    request.computed += row.count
    request.failed = result.failed
    request.prompt_logprobs += result.prompt_logprobs
    if result.token is not None:
        request.output.append(result.token)
    if result.logprobs is not None:
        request.logprobs.append(result.logprobs)


def fresh(requests: Sequence[Request]) -> list[Request]:
    """The same requests, not begun."""
    return [Request(request.prompt, request.max_tokens, request.params) for request in requests]


def alone(request: Request) -> list[Request]:
    return [replace(fresh([request])[0])]
