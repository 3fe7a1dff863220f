"""What must be true of anything that Octavo has done: thirteen invariants, checked while the history is told.

Whoever runs an engine tells a `Checker` what happens, one record after another. It keeps what is alive and no more, so
that a history may be as long as one likes.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from octavo.kvcache.pool import BlockPool
from octavo.model.step import TokenLogprobs
from octavo.scheduler.messages import EngineStats, FinishReason, Submission, TokenEvent
from octavo.server.life import Life

INVARIANTS = {
    "I1": "every block is free, cached or referenced, and only one of these",
    "I2": "an idle engine references no block, and nothing is left over around it",
    "I3": "a block has as many references as there are tables that contain it",
    "I4": "an accepted request ends exactly once, a refused one yields nothing",
    "I5": "the pieces of a stream are the whole: nothing is lost, doubled or split within a character",
    "I6": "what is reported of blocks and bytes is what the pool and the memory have",
    "I7": "a request yields what it does alone, to the bit",
    "I8": "no request is passed over for long by later ones, and something gets on in any window of steps",
    "I9": "the metrics count the tokens that the requests had",
    "I10": "queue, prefill and decode together take the time of the request",
    "I11": "no request's marker appears in the output of another",
    "I12": "after a fault the listener is the same, and no process, file or shared memory is left over",
    "I13": "a request that is paused is not computed",
}
MOST_PASSED_OVER = 500
"""Steps."""
CLOCK_TOLERANCE = 0.001
"""Seconds."""
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108

Yield = tuple[int, TokenLogprobs | None]
Alone = Callable[[Submission], tuple[Sequence[Yield], FinishReason]]


@dataclass(frozen=True, slots=True)
class Books:
    """What a pool says of itself, the tables of those that hold blocks, and what was reported of both."""

    free: tuple[int, ...]
    cached: tuple[int, ...]
    references: tuple[int, ...]
    tables: tuple[tuple[int, ...], ...]
    reported: tuple[int, int, int]
    """Free, cached and referenced blocks."""
    bytes_planned: int = 0
    bytes_allocated: int = 0

    @classmethod
    def of(cls, pool: BlockPool, tables: Sequence[Sequence[int]], stats: EngineStats) -> "Books":
        reported = (stats.blocks_free, stats.blocks_cached, stats.blocks_referenced)
        held = tuple(map(tuple, tables))
        return cls(tuple(pool._free), tuple(pool._cached), tuple(pool._references), held, reported)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a process leaves behind if it is careless."""

    listeners: tuple[str, ...] = ()
    """Inodes."""
    descriptors: int = 0
    children: int = 0
    shared_memory: tuple[str, ...] = ()

    @classmethod
    def now(cls, descriptors: bool = True) -> "Surroundings":
        """Of this process. Its descriptors are counted only where nobody else opens any."""
        sockets = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
        own = [path.readlink().name for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        listening = {f"socket:[{fields[9]}]" for fields in sockets if fields[3] == "0A"}
        return cls(
            tuple(sorted(listening.intersection(own))),
            len(own) if descriptors else 0,
            sum(len(path.read_text().split()) for path in Path("/proc/self/task").glob("*/children")),
            tuple(sorted(path.name for path in SHARED_MEMORY.iterdir() if "octavo" in path.name)),
        )


@dataclass(slots=True)
class _Told:
    submission: Submission
    yielded: list[Yield] = field(default_factory=list)
    passed_over: int = 0
    paused: bool = False


class Checker:
    """Takes in a history. `found` counts what contradicts each invariant; `examples` has the first of each in words."""

    def __init__(self, alone: Alone | None, marker: Callable[[Submission], int] | None = None, shift: int = 4) -> None:
        """`alone`: what a request yields by itself; None: somebody else compares.

        `marker`: what its tokens show above their `shift` lowest bits.
        """
        self.found: Counter[str] = Counter()
        self.examples: dict[str, str] = {}
        self.finished: Counter[str] = Counter()
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self._alone = alone
        self._marker = marker
        self._shift = shift
        self._live: dict[int, _Told] = {}
        self._last = 0
        self._without_progress = 0

    @property
    def live(self) -> int:
        return len(self._live)

    def require(self, invariant: str, holds: bool, *example: Any) -> None:
        """`example`: what contradicts it, spelled out only if it does."""
        assert invariant in INVARIANTS
        if not holds:
            self.found[invariant] += 1
            self.examples.setdefault(invariant, " ".join(map(str, (f"{INVARIANTS[invariant]}:", *example))))

    def submitted(self, submission: Submission) -> None:
        self.require("I4", submission.request > self._last, submission.request, "is not new")
        self._last = max(self._last, submission.request)
        self._live[submission.request] = _Told(submission)
        self.prompt_tokens += len(submission.prompt)

    def reported(self, event: TokenEvent) -> None:
        told = self._live.get(event.request)
        self.require("I4", told is not None, event.request, "goes on after its end, or never began")
        self._without_progress = 0
        if told is None:
            return
        if event.token is not None:
            self.generated_tokens += 1
            told.yielded.append((event.token, event.logprobs))
            if self._marker is not None:
                marker = self._marker(told.submission)
                self.require("I11", event.token >> self._shift == marker, event.request, "has", event.token)
        if event.finish is not None:
            self.finished[event.finish] += 1
            del self._live[event.request]
            if self._alone is not None:
                self._compare(told, event.finish, self._alone)

    def _compare(self, told: _Told, finish: FinishReason, alone: Alone) -> None:
        expected, end = alone(told.submission)
        cut = finish in ("abort", "timeout")
        same = list(told.yielded) == list(expected[: len(told.yielded)] if cut else expected)
        self.require("I7", same and (cut or finish == end), (told, expected, finish, end))

    def streamed(self, pieces: Sequence[Any], whole: Any) -> None:
        """`whole` is made of the pieces: lists of tokens, texts, or bytes of which each piece is whole characters."""
        joined = pieces[0][:0] if pieces else whole[:0]
        for piece in pieces:
            joined = joined + piece
        split = False
        for piece in pieces:
            if isinstance(piece, bytes):
                split |= piece.decode(errors="replace").encode() != piece
            if isinstance(piece, str):
                split |= "\ufffd" in piece and "\ufffd" not in whole
        self.require("I5", joined == whole and not split, (pieces, whole))

    def books(self, books: Books) -> None:
        total = len(books.references)
        referenced = [block for block, count in enumerate(books.references) if count]
        states = [*books.free, *books.cached, *referenced]
        self.require("I1", len(states) == total and len(set(states)) == total, books)
        held = Counter(chain.from_iterable(books.tables))
        self.require("I3", held == {block: books.references[block] for block in referenced}, books)
        counted = (len(books.free), len(books.cached), total - len(books.free) - len(books.cached))
        same = books.reported == counted and books.bytes_planned == books.bytes_allocated
        self.require("I6", same, books)

    def paused(self, request: int, paused: bool) -> None:
        """The engine has heard that it should leave a request alone, or go on with it."""
        if request in self._live:
            self._live[request].paused = paused

    def stepped(self, computed: Sequence[int]) -> None:
        """A step computes these requests."""
        self._without_progress += 1
        self.require("I8", self._without_progress <= MOST_PASSED_OVER, "nothing gets on")
        youngest = max(computed, default=0)
        for request, told in self._live.items():
            if request > youngest:
                break
            if told.paused and request in computed:
                self.require("I13", False, request)
            told.passed_over = 0 if told.paused or request in computed else told.passed_over + 1
            if told.passed_over > MOST_PASSED_OVER:
                self.require("I8", False, request, "is passed over")

    def idle(self, books: Books, base: Surroundings, now: Surroundings) -> None:
        """Nothing is alive, they say."""
        self.require("I4", not self._live, self._live.keys(), "never ended")
        self.require("I2", not any(books.references), books)
        self.require("I2", len(books.free) + len(books.cached) == len(books.references), books)
        self.require("I2", base.descriptors == now.descriptors, (base, now))

    def totals(self, prompt_tokens: int, generated_tokens: int) -> None:
        """What the metrics say."""
        told = (self.prompt_tokens, self.generated_tokens)
        self.require("I9", told == (prompt_tokens, generated_tokens), (told, prompt_tokens, generated_tokens))

    def lived(self, life: Life) -> None:
        """A request is over, say the metrics."""
        if life.finish in ("stop", "length") and life.first_token is not None and life.admitted is not None:
            parts = (
                life.admitted - life.submitted,
                life.first_token - life.admitted,
                life.last_token - life.first_token,
            )
            self.lasted(parts, life.ended - life.submitted)

    def lasted(self, parts: Sequence[float], whole: float) -> None:
        """Seconds: of queue, prefill and decode, and of the request that ended of itself."""
        together = abs(sum(parts) - whole) <= CLOCK_TOLERANCE
        self.require("I10", together and min(parts) >= -CLOCK_TOLERANCE, (parts, whole))

    def recovered(self, before: Surroundings, after: Surroundings) -> None:
        """There was a fault, and it is over."""
        self.require("I12", before == after, (before, after))
