"""Noise that is a pure function of (seed, position).

Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011) is a counter-based
generator: it has no state that a preemption, a restart or another order of the batch could change. The key is the
request's 64-bit seed, the counter the position of the token that the number is for.
"""

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_KEY_STEPS = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)
_LOW_WORD = np.uint64(0xFFFFFFFF)
_WORD_BITS = np.uint64(32)
_CHOICE_STREAM = 1
"""Fourth counter word of `choice_seed`; the noise of tokens has 0 there, so the two never share a block."""


def philox4x32(counters: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return ten rounds of Philox: [4, n] 32-bit words from counters [4, n] and keys [2, n], all held in 64 bits."""
    even, odd = counters[0::2], counters[1::2]
    for _ in range(10):
        product = _MULTIPLIERS * even
        high, low = product >> _WORD_BITS, product & _LOW_WORD
        even, odd = high[::-1] ^ odd ^ keys, low[::-1]
        keys = (keys + _KEY_STEPS) & _LOW_WORD
    return np.stack([even[0], odd[0], even[1], odd[1]])


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return one number in (0, 1) for each seed and position (both [n]): a 32-bit word's centre, never 0 or 1.

    A position is an index into prompt and output together, at least 0 and below 2**32.
    """
    counters = np.zeros((4, len(positions)), dtype=np.uint64)
    counters[0] = positions
    words = philox4x32(counters, np.stack([seeds & _LOW_WORD, seeds >> _WORD_BITS]))
    centres: NDArray[np.float64] = (words[0].astype(np.float64) + 0.5) / 2.0**32
    return centres


def unsigned_seed(seed: int) -> int:
    """Map a signed 64-bit seed to the 64 bits of the key, by two's complement."""
    return seed & 0xFFFFFFFFFFFFFFFF


def choice_seed(seed: int, choice: int) -> int:
    """Return the seed of one of a request's n choices; choice 0 keeps the seed unchanged.

    The others have 53 bits, which survive a client whose JSON numbers are doubles and so can be sent back.
    """
    if choice == 0:
        return seed
    counters = np.array([[choice], [0], [0], [_CHOICE_STREAM]], dtype=np.uint64)
    key = unsigned_seed(seed)
    keys = np.array([[key & 0xFFFFFFFF], [key >> 32]], dtype=np.uint64)
    words = philox4x32(counters, keys)
    return (int(words[0, 0]) | int(words[1, 0]) << 32) >> 11
