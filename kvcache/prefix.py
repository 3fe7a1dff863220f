"""Names of block contents.

K and V of a token depend on every token before it, so the name of a block covers its own tokens and, through the name
of the block before, all earlier ones. Names are keyed BLAKE2b digests (RFC 7693): without the secret nobody can make
two prefixes collide or test a guess, and a salt keeps the prefixes of one tenant from being found by another.
"""

import secrets
import struct
from collections.abc import Sequence
from hashlib import blake2b

_NAME_BYTES = 32


class PrefixHasher:
    """Makes the chain of names for one cache. Names are worthless outside the process that made the secret."""

    def __init__(self, block_size: int, secret: bytes | None = None) -> None:
        """`secret`: at most 64 bytes; 32 random ones if not given."""
        self.block_size = block_size
        self._secret = secrets.token_bytes(32) if secret is None else secret
        self._pack = struct.Struct(f"={block_size}I").pack

    def root(self, salt: bytes) -> bytes:
        """Where the chain of every request with this salt begins. It names no block."""
        return blake2b(salt, digest_size=_NAME_BYTES, key=self._secret, person=b"octavo salt").digest()

    def name(self, parent: bytes, tokens: Sequence[int]) -> bytes:
        """Name of a full block of `block_size` tokens that follows the block named `parent` (or the root)."""
        content = parent + self._pack(*tokens)
        return blake2b(content, digest_size=_NAME_BYTES, key=self._secret, person=b"octavo block").digest()
