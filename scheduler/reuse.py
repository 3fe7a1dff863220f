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
        if self._hasher is None:
            return []
        return self._pool.lookup(_names(request, self._hasher, request.reusable // self._hasher.block_size))

    def publish(self, request: Request, positions: int) -> list[int]:
        """Name the full blocks among the first `positions`, and return those not named before.

        The caller vouches that whoever finds a block from now on reads it after the step that fills it.
        """
        if self._hasher is None:
            return []
        first, full = request.published, positions // self._hasher.block_size
        if full <= first:
            return []
        fresh = request.blocks[first:full]
        for block, name in zip(fresh, _names(request, self._hasher, full)[first:], strict=True):
            self._pool.publish(block, name)
        request.published = full
        return fresh


def _names(request: Request, hasher: PrefixHasher, blocks: int) -> list[bytes]:
    """Names of the first blocks of a request. Each is computed once in the request's life."""
    size = hasher.block_size
    for block in range(len(request.names), blocks):
        parent = request.names[-1] if request.names else hasher.root(request.salt)
        request.names.append(hasher.name(parent, request.tokens(block * size, (block + 1) * size)))
    return request.names[:blocks]
