import pytest

from octavo.kvcache.ledger import BUCKETS, MemoryLedger, MemoryPlan

PLAN = MemoryPlan(weights=1000, activations=300, block_bytes=50, blocks=4, budget=1520)


def test_a_plan_adds_up_its_buckets() -> None:
    assert [PLAN.planned(bucket) for bucket in BUCKETS] == [1000, 200, 300]
    assert PLAN.total == 1500


def test_allocations_of_a_bucket_add_up_and_leave_the_others_alone() -> None:
    ledger = MemoryLedger(PLAN)
    ledger.allocate("activations", 100)
    ledger.allocate("activations", 200)
    assert [ledger.allocated[bucket] for bucket in BUCKETS] == [0, 0, 300]
    assert [ledger.plan.planned(bucket) for bucket in BUCKETS] == [1000, 200, 300]


def test_an_allocation_beyond_the_plan_is_refused_and_not_entered() -> None:
    ledger = MemoryLedger(PLAN)
    ledger.allocate("cache", 150)
    with pytest.raises(MemoryError, match="cache"):
        ledger.allocate("cache", 51)
    assert ledger.allocated["cache"] == 150
