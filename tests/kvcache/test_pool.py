import pytest
from support.scheduling import check_pool

from octavo.kvcache.pool import BlockPool


def allocate(pool: BlockPool, count: int) -> list[int]:
    blocks = pool.allocate(count)
    assert blocks is not None
    return blocks


def cache(pool: BlockPool, *names: bytes) -> list[int]:
    """Blocks with these names, in this order, that nobody uses."""
    blocks = allocate(pool, len(names))
    for block, name in zip(blocks, names, strict=True):
        pool.publish(block, name)
    pool.release(blocks)
    return blocks


def counts(pool: BlockPool) -> tuple[int, int, int]:
    return pool.free, pool.cached, pool.referenced


def test_a_new_pool_is_all_free() -> None:
    pool = BlockPool(3)
    assert (pool.total, pool.available, counts(pool)) == (3, 3, (3, 0, 0))


def test_allocated_blocks_are_distinct_and_referenced() -> None:
    pool = BlockPool(3)
    blocks = allocate(pool, 2)
    assert len(set(blocks)) == 2
    assert counts(pool) == (1, 0, 2)


def test_an_allocation_that_cannot_be_met_changes_nothing() -> None:
    pool = BlockPool(3)
    cache(pool, b"a", b"b")
    assert pool.allocate(4) is None
    assert counts(pool) == (1, 2, 0)
    assert len(pool.lookup([b"a", b"b"])) == 2


def test_allocating_nothing_from_an_exhausted_pool_succeeds() -> None:
    pool = BlockPool(1)
    allocate(pool, 1)
    assert pool.allocate(0) == []


def test_a_released_block_without_a_name_is_free_and_one_with_a_name_is_cached() -> None:
    pool = BlockPool(3)
    first, second = allocate(pool, 2)
    pool.publish(first, b"a")
    pool.release([first, second])
    assert counts(pool) == (2, 1, 0)


def test_lookup_returns_the_longest_prefix_and_stops_at_the_first_gap() -> None:
    pool = BlockPool(4)
    first, second, third = cache(pool, b"a", b"b", b"c")
    assert pool.lookup([b"a", b"b", b"c", b"d"]) == [first, second, third]
    assert pool.lookup([b"a", b"x", b"c"]) == [first]
    assert pool.lookup([b"x", b"b"]) == []
    assert pool.lookup([]) == []


def test_a_shared_block_stays_until_its_last_user_releases_it() -> None:
    pool = BlockPool(1)
    (block,) = cache(pool, b"a")
    pool.share([block])
    pool.share([block])
    pool.release([block])
    assert pool.allocate(1) is None
    pool.release([block])
    assert allocate(pool, 1) == [block]


def test_a_block_can_be_shared_while_the_one_who_fills_it_uses_it() -> None:
    pool = BlockPool(2)
    (block,) = allocate(pool, 1)
    pool.publish(block, b"a")
    pool.share(pool.lookup([b"a"]))
    pool.release([block])
    assert counts(pool) == (1, 0, 1)


def test_free_blocks_are_taken_before_cached_ones() -> None:
    pool = BlockPool(3)
    cached = cache(pool, b"a", b"b")
    (block,) = allocate(pool, 1)
    assert block not in cached
    pool.release([block])
    assert allocate(pool, 1) == [block]
    assert pool.lookup([b"a", b"b"]) == cached


def test_the_least_recently_used_content_is_evicted_first() -> None:
    pool = BlockPool(3)
    for name in (b"a", b"b", b"c"):
        cache(pool, name)
    used_again = pool.lookup([b"a"])
    pool.share(used_again)
    pool.release(used_again)
    allocate(pool, 1)
    assert [bool(pool.lookup([name])) for name in (b"a", b"b", b"c")] == [True, False, True]


def test_the_end_of_a_prefix_is_evicted_before_its_beginning() -> None:
    pool = BlockPool(3)
    prefix = cache(pool, b"a", b"b", b"c")
    for left in (2, 1, 0):
        allocate(pool, 1)
        assert pool.lookup([b"a", b"b", b"c"]) == prefix[:left]


def test_an_evicted_name_is_found_no_more() -> None:
    pool = BlockPool(1)
    cache(pool, b"a")
    (block,) = allocate(pool, 1)
    assert pool.lookup([b"a"]) == []
    pool.publish(block, b"b")
    assert pool.lookup([b"b"]) == [block]


def test_of_two_blocks_with_the_same_content_the_first_is_found_and_the_second_becomes_free() -> None:
    pool = BlockPool(2)
    first, second = allocate(pool, 2)
    pool.publish(first, b"a")
    pool.publish(second, b"a")
    assert pool.lookup([b"a"]) == [first]
    pool.release([second])
    assert counts(pool) == (1, 0, 1)
    pool.release([first])
    assert counts(pool) == (1, 1, 0)


def test_a_withdrawn_block_in_use_loses_its_name_and_is_free_after_its_release() -> None:
    pool = BlockPool(2)
    (block,) = allocate(pool, 1)
    pool.publish(block, b"a")
    pool.withdraw([block])
    assert pool.lookup([b"a"]) == []
    pool.release([block])
    assert counts(pool) == (2, 0, 0)


def test_a_withdrawn_cached_block_is_free_at_once() -> None:
    pool = BlockPool(2)
    pool.withdraw(cache(pool, b"a"))
    assert counts(pool) == (2, 0, 0)
    check_pool(pool, [])


def test_withdrawing_a_nameless_block_changes_nothing() -> None:
    pool = BlockPool(2)
    blocks = allocate(pool, 1)
    pool.withdraw([0, 1])
    check_pool(pool, blocks)


def test_misuse_is_refused() -> None:
    pool = BlockPool(2)
    (block,) = allocate(pool, 1)
    other = 1 - block
    with pytest.raises(ValueError, match="nothing to share"):
        pool.share([other])
    with pytest.raises(ValueError, match="no content to publish"):
        pool.publish(other, b"a")
    with pytest.raises(ValueError, match="cannot be released"):
        pool.release([other])
    pool.publish(block, b"a")
    with pytest.raises(ValueError, match="has a name already"):
        pool.publish(block, b"b")
