import pytest

from octavo.kvcache.prefix import PrefixHasher


def chain(hasher: PrefixHasher, tokens: list[int], salt: bytes = b"") -> list[bytes]:
    size = hasher.block_size
    names, parent = [], hasher.root(salt)
    for start in range(0, len(tokens) - size + 1, size):
        parent = hasher.name(parent, tokens[start : start + size])
        names.append(parent)
    return names


def test_equal_prefixes_have_equal_names_as_far_as_they_are_equal() -> None:
    hasher = PrefixHasher(2)
    first, second = chain(hasher, [1, 2, 3, 4, 5, 6]), chain(hasher, [1, 2, 3, 4, 9, 6])
    assert first[:2] == second[:2]
    assert first[2] != second[2]


def test_equal_tokens_after_different_ones_have_different_names() -> None:
    hasher = PrefixHasher(2)
    assert chain(hasher, [1, 2, 3, 4])[1] != chain(hasher, [9, 2, 3, 4])[1]
    assert chain(hasher, [3, 4, 3, 4])[0] != chain(hasher, [3, 4, 3, 4])[1]


def test_the_salt_changes_every_name() -> None:
    hasher = PrefixHasher(2)
    plain, salted = chain(hasher, [1, 2, 3, 4]), chain(hasher, [1, 2, 3, 4], b"tenant")
    assert not set(plain) & set(salted)


def test_a_salt_that_looks_like_a_block_does_not_lead_into_the_chain() -> None:
    hasher = PrefixHasher(2, secret=b"known to the test")
    parent = hasher.root(b"")
    forged = hasher.root(parent + b"\x01\0\0\0\x02\0\0\0")
    assert forged != hasher.name(parent, [1, 2])


def test_two_processes_make_different_names() -> None:
    assert chain(PrefixHasher(2), [1, 2]) != chain(PrefixHasher(2), [1, 2])
    assert chain(PrefixHasher(2, secret=b"s"), [1, 2]) == chain(PrefixHasher(2, secret=b"s"), [1, 2])


def test_token_boundaries_matter() -> None:
    hasher = PrefixHasher(2)
    parent = hasher.root(b"")
    names = {hasher.name(parent, tokens) for tokens in ([1, 0], [0, 1], [256, 0], [1, 1], [2**32 - 1, 0])}
    assert len(names) == 5


def test_names_are_long_enough_that_nobody_finds_two_alike() -> None:
    assert len(PrefixHasher(1).name(b"", [0])) == 32


def test_only_full_blocks_have_names() -> None:
    with pytest.raises(Exception, match="expected 2 items"):
        PrefixHasher(2).name(b"", [1])
