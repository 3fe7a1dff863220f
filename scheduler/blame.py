"""Who is to blame for a failure that several may have caused."""

from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

Suspect = TypeVar("Suspect")


class Suspects(Generic[Suspect]):
    """Those who were at work when something failed, in groups that are tried one after the other.

    True while there are any. A group that fails again is divided, until the one to blame is alone; a suspect that gets
    past its point of failure is cleared. With one culprit among n suspects this takes about log2(n) failures more.
    """

    def __init__(self) -> None:
        self._groups: deque[list[Suspect]] = deque()

    def __bool__(self) -> bool:
        return bool(self._groups)

    @property
    def group(self) -> Sequence[Suspect]:
        """Those who may be at work now, and nobody else; empty if there are no suspects."""
        return self._groups[0] if self._groups else ()

    def fail(self, involved: Sequence[Suspect]) -> Suspect | None:
        """Something failed with these at work. Return the culprit if it can only be that one; it is no suspect then.

        A first failure never names a culprit: what does not happen again was nobody's fault.
        """
        if not self._groups:
            self._groups.extend(_halves(involved))
            return None
        group = self._groups.popleft()
        others = [suspect for suspect in group if suspect not in involved]
        if others:
            self._groups.appendleft(others)
        if len(involved) == 1:
            return involved[0]
        self._groups.extendleft(reversed(_halves(involved)))
        return None

    def clear(self, suspect: Suspect) -> None:
        """It was not this one, or it is gone. Nothing happens if it is no suspect."""
        for group in self._groups:
            if suspect in group:
                group.remove(suspect)
        self._groups = deque(group for group in self._groups if group)


def _halves(suspects: Sequence[Suspect]) -> list[list[Suspect]]:
    middle = (len(suspects) + 1) // 2
    return [list(half) for half in (suspects[:middle], suspects[middle:]) if half]
