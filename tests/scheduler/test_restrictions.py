"""Tokens that a request allows and words that it forbids, without a scheduler and with one that looks ahead."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.scheduling import VOCABULARY, Driver, make_scheduler, mask_of, submission

from octavo.model.step import SamplingParams
from octavo.scheduler.restrictions import next_mask

tokens = st.integers(0, 4)


def bits(mask: bytes) -> set[int]:
    return {token for token in range(8 * len(mask)) if mask[token // 8] >> token % 8 & 1}


@given(
    st.sets(tokens),
    st.lists(st.lists(tokens, min_size=1, max_size=3).map(tuple), max_size=4),
    st.lists(tokens, max_size=6),
    st.integers(0, 4),
)
def test_a_mask_forbids_what_would_complete_a_word_or_end_too_early(
    allowed: set[int], words: list[tuple[int, ...]], output: list[int], minimum: int
) -> None:
    params = SamplingParams(allowed=mask_of(allowed), bad_words=tuple(words), min_tokens=minimum)
    mask = next_mask(params, output, 0, (1, 9_999))
    assert mask is not None
    for token in range(VOCABULARY):
        completes = any(tuple([*output, token][-len(word) :]) == word for word in words)
        early = token == 1 and len(output) < minimum
        assert (token in bits(mask)) is (token in allowed and not completes and not early)


def test_without_restrictions_there_is_no_mask() -> None:
    assert next_mask(SamplingParams(min_tokens=3, stop_token_ids=(5,)), [], 0, (5,)) is None


def test_tokens_in_flight_count_towards_min_tokens() -> None:
    params = SamplingParams(allowed=mask_of([1, 2]), min_tokens=2)
    assert [bits(next_mask(params, [7], pending, (1,)) or b"") for pending in (0, 1)] == [{2}, {1, 2}]


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_words_that_would_be_written_are_not_however_far_the_host_looks_ahead(ahead: int) -> None:
    plain = SamplingParams(temperature=0.0, ignore_eos=True)
    free = Driver(make_scheduler())
    free.add(submission(0, [1, 2, 3], max_tokens=12, params=plain))
    free.finish()
    written = free.transcripts[0].tokens
    words = (tuple(written[2:4]), tuple(written[8:11]))
    bound = SamplingParams(temperature=0.0, ignore_eos=True, allowed=mask_of(range(VOCABULARY)), bad_words=words)
    requests = [
        submission(number, [1, 2, 3 + number], 12, params=params) for number, params in enumerate((bound, plain))
    ]
    driver = Driver(make_scheduler())
    for request in requests:
        driver.add(request)
    while driver.scheduler.busy:
        while len(driver.flights) <= ahead and driver.launch() is not None:
            pass
        driver.land()
    for request in requests:
        driver.transcripts[request.request].check(request, 64)
    found = driver.transcripts[0].tokens
    assert found[:3] == written[:3]
    assert found != written
    for word in words:
        assert not any(tuple(found[start : start + len(word)]) == word for start in range(len(found)))
