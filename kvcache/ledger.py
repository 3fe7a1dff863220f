"""The three memory buckets: what was planned, what was allocated, what is in use."""

from dataclasses import dataclass, field
from typing import Literal, get_args

Bucket = Literal["weights", "cache", "activations"]
BUCKETS: tuple[Bucket, ...] = get_args(Bucket)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Sizes in bytes, known from the model's shapes before anything is loaded."""

    weights: int
    activations: int
    block_bytes: int
    blocks: int
    budget: int

    @property
    def cache(self) -> int:
        """The whole pool of blocks."""
        return self.blocks * self.block_bytes

    @property
    def fixed(self) -> int:
        """What does not depend on the number of blocks."""
        return self.weights + self.activations

    @property
    def total(self) -> int:
        """All three buckets together."""
        return self.fixed + self.cache

    def planned(self, bucket: Bucket) -> int:
        """Planned size of one bucket."""
        return {"weights": self.weights, "cache": self.cache, "activations": self.activations}[bucket]


@dataclass(slots=True)
class _Account:
    planned: int
    allocated: int = 0
    used: int = 0


@dataclass(slots=True)
class MemoryLedger:
    """The plan beside what really happened. Allocations happen at start-up only, and never beyond the plan."""

    plan: MemoryPlan
    _accounts: dict[Bucket, _Account] = field(init=False)

    def __post_init__(self) -> None:
        self._accounts = {bucket: _Account(self.plan.planned(bucket)) for bucket in BUCKETS}

    def allocate(self, bucket: Bucket, nbytes: int) -> None:
        """Enter an allocation. MemoryError if the bucket would outgrow its plan."""
        account = self._accounts[bucket]
        if account.allocated + nbytes > account.planned:
            raise MemoryError(
                f"{bucket}: {nbytes} bytes on top of {account.allocated} allocated exceed the {account.planned} planned"
            )
        account.allocated += nbytes

    def use(self, bucket: Bucket, nbytes: int) -> None:
        """Set how many bytes of a bucket hold something now. ValueError beyond what is allocated."""
        account = self._accounts[bucket]
        if not 0 <= nbytes <= account.allocated:
            raise ValueError(f"{bucket}: {nbytes} bytes in use of {account.allocated} allocated")
        account.used = nbytes

    def planned(self, bucket: Bucket) -> int:
        """Bytes the plan gives the bucket."""
        return self._accounts[bucket].planned

    def allocated(self, bucket: Bucket) -> int:
        """Bytes allocated."""
        return self._accounts[bucket].allocated

    def used(self, bucket: Bucket) -> int:
        """Bytes last reported in use."""
        return self._accounts[bucket].used
