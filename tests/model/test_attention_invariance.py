"""A token's attention has the same bits however its sequence is cut into steps, and whoever else is computed."""

from collections.abc import Iterator

import pytest
import torch
from support.attention import FLASHINFER, Bench, Row, Sequence, Shape, backends, set_threads
from torch import Tensor

invariant_backends = pytest.mark.parametrize(("backend", "dtype"), backends("reference", *FLASHINFER), ids=str)
CHUNKS = (1, 2, 3, 5, 7, 16, 31, 64, 100)
LENGTH = 260
SHAPES = {
    "9/3 heads of 64": Shape(heads=9, kv_heads=3, head_dim=64),
    "8/1 heads of 80": Shape(heads=8, kv_heads=1, head_dim=80),
    "2/2 heads of 128, window of 70": Shape(heads=2, kv_heads=2, head_dim=128, window=70),
}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """One thread, unless a test says otherwise."""
    before = torch.get_num_threads()
    set_threads(1)
    yield
    set_threads(before)


def bits(tensor: Tensor) -> Tensor:
    """The bit patterns, which tell -0 from +0."""
    return tensor.contiguous().view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32)


def differing(left: Tensor, right: Tensor) -> int:
    return int((bits(left) != bits(right)).sum())


def whole(bench: Bench, sequence: Sequence) -> Tensor:
    return bench.step([Row(sequence, 0, sequence.length)])[0]


@invariant_backends
def test_more_than_a_million_numbers_keep_their_bits_under_every_chunking(backend: str, dtype: torch.dtype) -> None:
    compared = 0
    for shape in SHAPES.values():
        bench = Bench.of(shape.of(dtype), backend)
        sequence, neighbours = bench.sequence(LENGTH), [bench.sequence(length) for length in (5, 70, 129)]
        reference = whole(bench, sequence)
        for count in CHUNKS:
            company = neighbours if count in {1, 7, 64} else []
            assert differing(reference, bench.chunks(sequence, count, company)) == 0, f"in chunks of {count}"
            compared += reference.numel()
    assert compared > 1_000_000


@invariant_backends
def test_a_sequence_alone_on_one_thread_keeps_its_bits_among_many_on_two(backend: str, dtype: torch.dtype) -> None:
    bench = Bench.of(SHAPES["9/3 heads of 64"].of(dtype), backend, blocks=512)
    sequences = [bench.sequence(length) for length in range(1, 400, 19)]
    alone = [whole(bench, sequence) for sequence in sequences]
    set_threads(2)
    together = bench.step([Row(sequence, 0, sequence.length) for sequence in sequences], padding=3)
    assert sum(differing(*pair) for pair in zip(alone, together, strict=True)) == 0
    assert sum(output.numel() for output in together) > 1_000_000


@invariant_backends
def test_decodes_on_two_threads_have_the_bits_of_a_prompt_on_one(backend: str, dtype: torch.dtype) -> None:
    bench = Bench.of(Shape(dtype=dtype), backend)
    sequence = bench.sequence(70)
    prompt = whole(bench, sequence)
    set_threads(2)
    assert differing(prompt, bench.chunks(sequence, 1)) == 0


@invariant_backends
def test_where_the_blocks_lie_does_not_matter(backend: str, dtype: torch.dtype) -> None:
    shape = Shape().of(dtype)
    outputs = []
    for blocks in (16, 100):
        bench = Bench.of(shape, backend, blocks=blocks)
        bench.random.manual_seed(1)
        outputs.append(whole(bench, bench.sequence(250)))
    assert differing(*outputs) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_comparison_finds_dense_attention_out(dtype: torch.dtype) -> None:
    """Softmax over the whole row at once: BLAS sums in another order for one token than for many."""
    bench = Bench.of(SHAPES["9/3 heads of 64"].of(dtype), "reference")
    sequence = bench.sequence(LENGTH)
    assert differing(whole(bench, sequence), bench.chunks(sequence, 1)) > 0


@pytest.mark.parametrize(
    "backend", [name for name, dtype in backends("reference", *FLASHINFER) if dtype == torch.float32]
)
def test_the_comparison_finds_another_order_of_positions_out(backend: str) -> None:
    """The same keys and values, rotated by one span: mathematically equal, and other bits."""
    bench = Bench.of(Shape(), backend)
    sequence = bench.sequence(129)
    last = bench.chunks(sequence, 129)[-1:]
    order = torch.cat([torch.arange(64, 128), torch.arange(64), torch.tensor([128])])
    rotated = Sequence(sequence.q, sequence.k[order], sequence.v[order], sequence.blocks)
    assert differing(last, bench.chunks(rotated, 129)[-1:]) > 10
