import itertools
import math
from collections.abc import Collection, Sequence

import pytest

from octavo.scheduler.blame import Suspects


def culprits_among(everyone: Sequence[int], guilty: Collection[int], at_once: int) -> tuple[list[int], int]:
    """Run groups of at most `at_once` until there are no suspects; a run with a guilty one fails."""
    suspects: Suspects[int] = Suspects()
    found, failures = [], 1
    assert suspects.fail(everyone) is None
    while suspects:
        run = list(suspects.group)[:at_once]
        if any(member in guilty for member in run):
            failures += 1
            culprit = suspects.fail(run)
            if culprit is not None:
                found.append(culprit)
        else:
            for member in run:
                suspects.clear(member)
    return found, failures


@pytest.mark.parametrize("guilty", [guilty for n in range(4) for guilty in itertools.combinations(range(7), n)])
@pytest.mark.parametrize("at_once", [1, 2, 7])
def test_exactly_the_guilty_are_found(guilty: tuple[int, ...], at_once: int) -> None:
    found, _ = culprits_among(range(7), guilty, at_once)
    assert sorted(found) == list(guilty)


@pytest.mark.parametrize("number", [1, 2, 3, 8, 100, 256])
def test_one_culprit_costs_a_failure_for_each_halving(number: int) -> None:
    for culprit in {0, number // 3, number - 1}:
        _, failures = culprits_among(range(number), {culprit}, number)
        assert failures <= 2 + math.ceil(math.log2(number))


def test_what_happens_once_is_nobodys_fault() -> None:
    assert culprits_among(range(5), (), 5) == ([], 1)
    assert culprits_among([3], (), 1) == ([], 1)


def test_a_suspect_that_is_gone_is_tried_no_more() -> None:
    suspects: Suspects[str] = Suspects()
    suspects.fail(["a", "b", "c"])
    suspects.clear("c")
    suspects.clear("nobody")
    assert list(suspects.group) == ["a", "b"]
    suspects.clear("a")
    suspects.clear("b")
    assert not suspects
    assert list(suspects.group) == []


def test_a_failure_without_anybody_at_work_leaves_no_suspects() -> None:
    suspects: Suspects[str] = Suspects()
    assert suspects.fail([]) is None
    assert not suspects
