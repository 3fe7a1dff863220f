"""Reuse of K and V between requests with the same prefix: what a request lets others find, and what it finds."""

from octavo.kvcache.pool import BlockPool
from octavo.kvcache.prefix import PrefixHasher
from octavo.scheduler.request import Request


class PrefixReuse:
    """Publishes full blocks of requests in the pool and finds them for others. Without a hasher it does neither."""

    def __init__(self, pool: BlockPool, hasher: PrefixHasher | None) -> None:
        self._pool = pool
        self._hasher = hasher

    def find(self, request: Request) -> list[int]:
        """Blocks in the pool that hold the beginning of this request, as far as it may skip computing it."""
        return self._pool.lookup(self._names(request, 0, request.reusable))

    def publish(self, request: Request, positions: int) -> list[int]:
        """Name the full blocks among the first `positions`, and return those not named before.

        The caller vouches that whoever finds a block from now on reads it after the step that fills it.
        """
        names = self._names(request, request.published, positions)
        fresh = request.blocks[request.published : request.published + len(names)]
        for block, name in zip(fresh, names, strict=True):
            self._pool.publish(block, name)
        request.published += len(fresh)
        return fresh

    def _names(self, request: Request, first: int, positions: int) -> list[bytes]:
        """Names of the full blocks among the first `positions`, from `first` on. Each is computed once in a life."""
        if self._hasher is None:
            return []
        size = self._hasher.block_size
        for block in range(len(request.names), positions // size):
            parent = request.names[-1] if request.names else self._hasher.root(request.salt)
            request.names.append(self._hasher.name(parent, request.tokens(block * size, (block + 1) * size)))
        return request.names[first : positions // size]
