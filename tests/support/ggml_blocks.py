"""Blocks of ggml's quantised types, decoded one number at a time from the layouts in ggml-common.h."""

import numpy as np

BLOCKS = {"Q8_0": (32, 34), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q4_K": (256, 144), "Q6_K": (256, 210)}
"""Elements and bytes of a block."""


def random_blocks(rows: int, columns: int, kind: str, seed: int) -> np.ndarray:
    """[rows, bytes of a row]: arbitrary bits, but for the float16 scales, which are small positive numbers."""
    elements, size = BLOCKS[kind]
    generator = np.random.default_rng(seed)
    data = generator.integers(0, 256, (rows, columns // elements, size), np.uint8)
    for place in {"Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q4_K": [0, 2], "Q6_K": [208]}[kind]:
        scales = generator.uniform(1e-3, 1e-2, data.shape[:2]).astype("<f2")
        data[:, :, place : place + 2] = scales[..., None].view(np.uint8)
    return data.reshape(rows, -1)


def decode(data: np.ndarray, kind: str) -> np.ndarray:
    """Float64 numbers of rows of blocks."""
    size = BLOCKS[kind][1]
    decoder = {"Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q4_K": _q4_k, "Q6_K": _q6_k}[kind]
    rows = [
        [value for start in range(0, len(row), size) for value in decoder(row[start : start + size].tobytes())]
        for row in data
    ]
    return np.array(rows)


def _half(data: bytes) -> float:
    return float(np.frombuffer(data, "<f2")[0])


def _nibbles(data: bytes) -> list[int]:
    return [byte & 15 for byte in data] + [byte >> 4 for byte in data]


def _q8_0(block: bytes) -> list[float]:
    scale = _half(block[:2])
    return [scale * (byte - 256 if byte > 127 else byte) for byte in block[2:]]


def _q4_0(block: bytes) -> list[float]:
    scale = _half(block[:2])
    return [scale * (nibble - 8) for nibble in _nibbles(block[2:])]


def _q4_1(block: bytes) -> list[float]:
    scale, minimum = _half(block[:2]), _half(block[2:4])
    return [scale * nibble + minimum for nibble in _nibbles(block[4:])]


def _q4_k(block: bytes) -> list[float]:
    scale, minimum = _half(block[:2]), _half(block[2:4])
    packed, quants = block[4:16], block[16:]
    values = []
    for group in range(8):
        if group < 4:
            group_scale, group_minimum = packed[group] & 63, packed[group + 4] & 63
        else:
            group_scale = (packed[group + 4] & 15) | (packed[group - 4] >> 6) << 4
            group_minimum = (packed[group + 4] >> 4) | (packed[group] >> 6) << 4
        pair = quants[group // 2 * 32 : group // 2 * 32 + 32]
        for byte in pair:
            nibble = byte >> 4 if group % 2 else byte & 15
            values.append(scale * group_scale * nibble - minimum * group_minimum)
    return values


def _q6_k(block: bytes) -> list[float]:
    scale = _half(block[208:])
    group_scales = np.frombuffer(block[192:208], np.int8).tolist()
    values = []
    for place in range(256):
        half, quarter, offset = place // 128, place // 32 % 4, place % 32
        low_byte = block[half * 64 + quarter % 2 * 32 + offset]
        low = low_byte >> 4 if quarter >= 2 else low_byte & 15
        high = block[128 + half * 32 + offset] >> 2 * quarter & 3
        values.append(scale * group_scales[place // 16] * ((low | high << 4) - 32))
    return values
