"""The three memory buckets: what was planned and what was allocated."""

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
class MemoryLedger:
    """The plan beside what really happened. Allocations happen at start-up only, and never beyond the plan."""

    plan: MemoryPlan
    allocated: dict[Bucket, int] = field(init=False, default_factory=lambda: dict.fromkeys(BUCKETS, 0))
    """Bytes."""

    def allocate(self, bucket: Bucket, nbytes: int) -> None:
        """Enter an allocation. MemoryError if the bucket would outgrow its plan."""
        allocated, planned = self.allocated[bucket], self.plan.planned(bucket)
        if allocated + nbytes > planned:
            raise MemoryError(f"{bucket}: {nbytes} bytes on top of {allocated} allocated exceed the {planned} planned")
        self.allocated[bucket] = allocated + nbytes
