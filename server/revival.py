"""What to make of an engine's death: start another one, how soon, and who may have killed it."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Request = TypeVar("Request")

PROOFS = 2
"""So many engines must die during a trial to show who is to blame."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When to replace an engine. Times in seconds."""

    deaths: int = 5
    """So many deaths ..."""
    within: float = 60.0
    """... within this time are hopeless. One that shows which request causes them does not count."""
    delays: tuple[float, ...] = (0.1, 0.5, 2.0, 10.0)
    """Before the first start, the second, and so on."""
    stall_seconds: float = 300.0
    """An engine that has work and finishes no step for so long is killed; 0: never."""


class Obituary(Generic[Request]):
    """The deaths of engines, and the requests that may have caused them.

    A request that was computed at two deaths in a row and got on with nothing between them is a suspect. Suspects are
    tried one after the other, nobody new beside them; one that gets on is acquitted, and one during whose trial an
    engine dies twice is the culprit. Whoever kills engines from outside would have to be that quick four times.
    """

    def __init__(self, policy: RestartPolicy, clock: Callable[[], float] = time.monotonic) -> None:
        self._policy = policy
        self._clock = clock
        self._deaths: deque[float] = deque()
        self._computed: set[Request] = set()
        """Those who were computed at the last death."""
        self._suspects: deque[Request] = deque()
        self._proofs = 0
        """Engines that have died during the trial of the first of them."""

    @property
    def repeated(self) -> bool:
        """Whether engines have died more than once lately."""
        return len(self._deaths) > 1

    @property
    def suspect(self) -> Request | None:
        """The only one whom an engine should be given now; None: everybody."""
        return self._suspects[0] if self._suspects else None

    def died(self, known: Sequence[Request], progressed: Sequence[bool], at_once: int) -> Request | None:
        """An engine died. Return the culprit if it is clear.

        known: the requests it knew of, in order of arrival, of which it computed the first `at_once` at most;
        progressed: which of them have got on since it was given them.
        """
        idle = [request for request, moved in zip(known, progressed, strict=True) if not moved]
        computed = set(known[:at_once])
        if not self._suspects:
            self._suspects.extend(request for request in idle if request in computed & self._computed)
            self._proofs = 0
        elif self._suspects[0] in idle:
            self._proofs += 1
        self._computed = computed
        if self._proofs == PROOFS:
            culprit = self._suspects[0]
            self.acquit(culprit)
            return culprit
        self._deaths.append(self._clock())
        return None

    def failed_to_start(self) -> None:
        """An engine died before it was given any request."""
        self._deaths.append(self._clock())

    def acquit(self, request: Request) -> bool:
        """It got on, or is gone. Returns whether it was the one being tried."""
        tried = self.suspect == request
        if request in self._suspects:
            self._suspects.remove(request)
        if tried:
            self._proofs = 0
        return tried

    def delay(self) -> float | None:
        """How long to wait before the next start, in seconds; None if it is hopeless."""
        while self._deaths and self._deaths[0] < self._clock() - self._policy.within:
            self._deaths.popleft()
        if len(self._deaths) >= self._policy.deaths:
            return None
        return self._policy.delays[min(max(len(self._deaths), 1), len(self._policy.delays)) - 1]


class StallWatch:
    """Notices that an engine with work reports nothing.

    It counts its own looks, not the clock: while the server itself stands still, reports wait to be read, and nobody is
    to blame for their absence.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.interval = min(1.0, limit / 10) if limit else 1.0
        """Seconds between two looks."""
        self._looks = 0

    def reported(self) -> None:
        """Something came from the engine."""
        self._looks = 0

    def stalled(self, *, working: bool) -> bool:
        """Look, and say whether to give the engine up. Called once in every interval."""
        self._looks = self._looks + 1 if working else 0
        if not self.limit or self._looks * self.interval < self.limit:
            return False
        self._looks = 0
        return True
