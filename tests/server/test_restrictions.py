"""Allowed tokens and bad words, from what a client writes to what the engine reads."""

from support.vocabularies import smollm2

from octavo.server.protocol import CompletionRequest
from octavo.server.restrictions import restrictions

VOCABULARY = 49_152


def made(**fields: object) -> tuple[set[int] | None, tuple[tuple[int, ...], ...]]:
    request = CompletionRequest.model_validate({"model": "m", "prompt": "a", **fields})
    mask, words = restrictions(request, smollm2(), VOCABULARY)
    if mask is None:
        return None, words
    assert len(mask) == VOCABULARY // 8
    return {token for token in range(VOCABULARY) if mask[token // 8] >> token % 8 & 1}, words


def test_without_restrictions_nothing_is_sent() -> None:
    assert made() == (None, ())
    assert made(bad_words=[]) == (None, ())


def test_the_mask_holds_exactly_the_allowed_tokens() -> None:
    assert made(allowed_token_ids=[5, 0, VOCABULARY - 1, 5]) == ({0, 5, VOCABULARY - 1}, ())


def test_a_word_is_forbidden_with_and_without_a_space_before_it() -> None:
    bare = smollm2().encode("Paris", add_special_tokens=False)
    spaced = smollm2().encode(" Paris", add_special_tokens=False)
    for word in ("Paris", " Paris", "  Paris"):
        allowed, words = made(bad_words=[word])
        assert tuple(bare) in words
        assert (tuple(spaced) in words) is (len(spaced) == len(bare))
        single = {ids[0] for ids in words if len(ids) == 1}
        assert allowed == set(range(VOCABULARY)) - single


def test_the_spaced_spelling_counts_only_where_it_is_a_word_of_its_own() -> None:
    for word in ("the", "zyzzyva", "unbelievable", "7"):
        _, words = made(bad_words=[word])
        bare = smollm2().encode(word, add_special_tokens=False)
        spaced = smollm2().encode(" " + word, add_special_tokens=False)
        expected = [bare] + [spaced] * (len(spaced) == len(bare) and spaced[0] != bare[0])
        assert words == tuple(map(tuple, expected))
