"""Memory for packed weights."""

import torch

from octavo.kvcache.store import HUGE_PAGE_BYTES
from octavo.model.kernels.memory import ALIGNMENT, SLAB_BYTES, WeightMemory


def test_pieces_are_aligned_zero_and_do_not_overlap() -> None:
    memory = WeightMemory()
    sizes = (1, 33, 64, 1000, SLAB_BYTES // 2, 3 << 20, 3 << 20, 7, *[SLAB_BYTES // 10] * 12)
    pieces = [memory.take(size, torch.uint8) for size in sizes]
    for number, (size, piece) in enumerate(zip(sizes, pieces, strict=True)):
        assert piece.numel() == size
        assert piece.data_ptr() % ALIGNMENT == 0
        assert not piece.any()
        piece.fill_(number + 1)
    assert all((piece == number + 1).all() for number, piece in enumerate(pieces))


def test_large_pieces_begin_on_a_huge_page() -> None:
    piece = WeightMemory().take(SLAB_BYTES // 2, torch.bfloat16)
    assert piece.dtype == torch.bfloat16
    assert piece.nbytes == SLAB_BYTES
    assert piece.data_ptr() % HUGE_PAGE_BYTES == 0


def test_pieces_outlive_the_memory_they_came_from() -> None:
    pieces = [WeightMemory().take(100, torch.float32).fill_(number) for number in range(20)]
    assert [int(piece.sum()) for piece in pieces] == [100 * number for number in range(20)]
