"""Who owns which block of the KV cache, and which contents can be found again.

Every block is in exactly one of three states:

- free: no request uses it and nothing in it can be found by name;
- referenced: one or more requests have it in their tables;
- cached: no request uses it, but its content has a name, so that a later request with the same prefix can share it.

Blocks are numbers; the tensors behind them live elsewhere.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence


class InvariantError(Exception):
    """The books of a pool or a scheduler contradict each other: a fault of Octavo itself."""


class BlockPool:
    """A fixed number of blocks, shared by reference count, with an index of named contents.

    Misuse (releasing what is not held, naming a block twice) raises ValueError: it is a fault of the caller.
    """

    def __init__(self, blocks: int) -> None:
        self._references = [0] * blocks
        self._names: list[bytes | None] = [None] * blocks
        self._index: dict[bytes, int] = {}
        self._free = list(reversed(range(blocks)))
        """A stack: the block freed last is the likeliest to be warm in a processor's cache."""
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Least recently used first."""
        self.peak = 0
        """The most blocks that were referenced at one time."""

    @property
    def total(self) -> int:
        """Blocks in the pool: always free + cached + referenced."""
        return len(self._references)

    @property
    def free(self) -> int:
        """Blocks that hold nothing of use."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Blocks that nobody uses, but that can be found by name."""
        return len(self._cached)

    @property
    def referenced(self) -> int:
        """Blocks in use by at least one request."""
        return self.total - self.available

    @property
    def available(self) -> int:
        """Blocks that `allocate` can hand out now."""
        return len(self._free) + len(self._cached)

    def lookup(self, names: Sequence[bytes]) -> list[int]:
        """Blocks of the longest run of names, from the first on, whose contents are in the pool."""
        blocks = []
        for name in names:
            block = self._index.get(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Add one reference to each of these blocks, as `lookup` has just returned them."""
        for block in blocks:
            if self._references[block] == 0:
                if block not in self._cached:
                    raise ValueError(f"block {block} is free: it holds nothing to share")
                del self._cached[block]
            self._references[block] += 1
        self.peak = max(self.peak, self.referenced)

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` blocks with one reference each, or None and no change if there are not so many.

        Free blocks go first; only then are cached contents forgotten, least recently used first.
        """
        if count > self.available:
            return None
        taken = [self._take() for _ in range(count)]
        self.peak = max(self.peak, self.referenced)
        return taken

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
        self._references[block] = 1
        return block

    def publish(self, block: int, name: bytes) -> None:
        """Let the content of a block in use be found by name.

        If another block already bears the name, that one stays the one to be found and this one gets no name.
        """
        if self._references[block] == 0:
            raise ValueError(f"block {block} is not in use: it has no content to publish")
        if self._names[block] is not None:
            raise ValueError(f"block {block} has a name already")
        if self._index.setdefault(name, block) == block:
            self._names[block] = name

    def withdraw(self, blocks: Sequence[int]) -> None:
        """Forget the names of these blocks, because their contents are not what the names promise."""
        for block in blocks:
            self._forget(block)
            if block in self._cached:
                del self._cached[block]
                self._free.append(block)

    def _forget(self, block: int) -> None:
        name = self._names[block]
        if name is not None:
            del self._index[name]
            self._names[block] = None

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one reference to each block of a table, in the table's order.

        The last blocks go first: eviction then takes the end of a prefix before its beginning, without which the rest
        could not be found.
        """
        for block in reversed(blocks):
            if self._references[block] == 0:
                raise ValueError(f"block {block} is not in use: it cannot be released")
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._names[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None

    def audit(self, held: Iterable[int]) -> None:
        """Raise InvariantError unless the books agree with the blocks `held`, of which each mention is a reference.

        Takes a time proportional to the number of blocks: meant for tests and for OCTAVO_STRICT.
        """
        counted = Counter(held)
        if counted != {block: references for block, references in enumerate(self._references) if references}:
            raise InvariantError("reference counts differ from the tables of the requests")
        if sorted([*self._free, *self._cached, *counted]) != list(range(self.total)):
            raise InvariantError("some block is not in exactly one of the states free, cached and referenced")
        names = {name: block for block, name in enumerate(self._names) if name is not None}
        if names != self._index:
            raise InvariantError("the index of names differs from the names of the blocks")
        named = set(names.values())
        if not named.issuperset(self._cached) or not named.isdisjoint(self._free):
            raise InvariantError("cached blocks have names, and free ones none")
