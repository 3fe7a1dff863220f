from collections.abc import Iterator

import pytest
import torch
from support.attention import FLASHINFER, Bench, Row, Shape, backends, expect, set_threads, takes, weight_roundoff
from support.flashinfer_emulation import emulated_flashinfer

EDGES = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200)


def check(bench: Bench, backend: str, rows: list[Row], padding: int = 0) -> None:
    outputs = bench.step(rows, padding)
    for row, output in zip(rows, outputs, strict=True):
        roundoff = weight_roundoff(backend, bench.shape.dtype)
        expect(bench.shape, row, weight_roundoff=roundoff).assert_matches(output)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small products gain nothing from more, and wait for each other on a busy machine."""
    before = torch.get_num_threads()
    set_threads(1)
    yield
    set_threads(before)


@pytest.fixture(autouse=True)
def emulated(backend: str) -> Iterator[None]:
    if backend in FLASHINFER:
        with emulated_flashinfer():
            yield
    else:
        yield


def bench_of(shape: Shape, backend: str) -> Bench | None:
    """A bench, or None for a shape that the backend has no kernels for, and refuses."""
    if takes(backend, shape):
        return Bench.of(shape, backend)
    with pytest.raises(ValueError, match=f"head_dim {shape.head_dim}|--block-size {shape.block_size}"):
        Bench.of(shape, backend)
    return None


pytestmark = pytest.mark.parametrize(("backend", "dtype"), backends(), ids=str)


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (8, 1)])
def test_prompts_of_every_block_edge_match_dense_attention(
    backend: str, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> None:
    if bench := bench_of(Shape(heads, kv_heads, head_dim, dtype=dtype), backend):
        check(bench, backend, [Row(bench.sequence(length), 0, length) for length in EDGES])


def test_a_decode_at_every_length_up_to_two_spans_matches(backend: str, dtype: torch.dtype) -> None:
    bench = Bench.of(Shape(dtype=dtype), backend)
    sequence = bench.sequence(130)
    for position in range(130):
        check(bench, backend, [Row(sequence, position, 1)])


def test_chunks_decodes_and_prompts_of_one_step_match(backend: str, dtype: torch.dtype) -> None:
    bench = Bench.of(Shape(heads=9, kv_heads=3, dtype=dtype), backend)
    decodes = [bench.sequence(length) for length in (1, 16, 17, 70, 300)]
    chunked = bench.sequence(210)
    bench.step([Row(sequence, 0, sequence.length - 1) for sequence in decodes if sequence.length > 1])
    bench.step([Row(chunked, 0, 37)])
    rows = [Row(sequence, sequence.length - 1, 1) for sequence in decodes]
    check(bench, backend, [*rows, Row(chunked, 37, 150), Row(bench.sequence(90), 0, 90)], padding=5)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(9, 1, 64), (5, 5, 34), (64, 1, 16), (4, 2, 256), (7, 1, 48)]
)
def test_unusual_shapes_match(backend: str, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> None:
    if bench := bench_of(Shape(heads, kv_heads, head_dim, dtype=dtype), backend):
        sequence = bench.sequence(101)
        check(bench, backend, [Row(sequence, 0, 60)])
        check(bench, backend, [Row(sequence, 60, 41)])


@pytest.mark.parametrize("block_size", [32, 48])
def test_larger_blocks_match(backend: str, dtype: torch.dtype, block_size: int) -> None:
    if bench := bench_of(Shape(block_size=block_size, dtype=dtype), backend):
        sequences = [bench.sequence(length) for length in (33, 47, 49, 200)]
        check(bench, backend, [Row(sequence, 0, sequence.length) for sequence in sequences])


@pytest.mark.parametrize("window", [1, 7, 16, 64, 65, 100])
def test_a_sliding_window_hides_older_positions(backend: str, dtype: torch.dtype, window: int) -> None:
    bench = Bench.of(Shape(window=window, dtype=dtype), backend)
    long, short = bench.sequence(290), bench.sequence(50)
    check(bench, backend, [Row(long, 0, 150), Row(short, 0, 50)])
    for start, count in ((150, 1), (151, 100), (251, 39)):
        check(bench, backend, [Row(long, start, count)])


def test_a_row_reads_blocks_that_a_later_row_of_the_same_step_fills(backend: str, dtype: torch.dtype) -> None:
    bench = Bench.of(Shape(dtype=dtype), backend)
    owner = bench.sequence(80)
    sharer = bench.sequence(70, prefix=owner, shared=64)
    check(bench, backend, [Row(sharer, 64, 6), Row(owner, 0, 80)])


def test_a_sequence_that_shares_a_prefix_leaves_the_owner_alone(backend: str, dtype: torch.dtype) -> None:
    bench = Bench.of(Shape(dtype=dtype), backend)
    owner = bench.sequence(65)
    sharer = bench.sequence(100, prefix=owner, shared=48)
    check(bench, backend, [Row(owner, 0, 64)])
    check(bench, backend, [Row(sharer, 48, 52)])
    check(bench, backend, [Row(owner, 64, 1)])


def test_large_scores_neither_overflow_nor_lose_the_winner(backend: str, dtype: torch.dtype) -> None:
    bench = Bench.of(Shape(dtype=dtype), backend)
    sequence = bench.sequence(150)
    sequence.q *= 100
    check(bench, backend, [Row(sequence, 0, 150)])


def test_scores_that_all_fall_far_below_zero_keep_their_weights(backend: str, dtype: torch.dtype) -> None:
    bench = Bench.of(Shape(dtype=dtype), backend)
    sequence = bench.sequence(150)
    sequence.q.abs_().mul_(-8)
    sequence.k.abs_().mul_(4)
    check(bench, backend, [Row(sequence, 0, 150)])


def test_a_nan_in_a_row_shows_in_its_output_and_nowhere_else(backend: str, dtype: torch.dtype) -> None:
    bench = Bench.of(Shape(dtype=dtype), backend)
    healthy, ill = bench.sequence(70), bench.sequence(70)
    ill.k[3] = float("nan")
    first, second = bench.step([Row(healthy, 0, 70), Row(ill, 0, 70)], finite=False)
    assert first.isfinite().all()
    assert second[:3].isfinite().all()
    assert second[3:].isnan().all()


def test_other_layers_are_left_alone(backend: str, dtype: torch.dtype) -> None:
    bench = Bench.of(Shape(dtype=dtype), backend)
    bench.step([Row(bench.sequence(40), 0, 40)])
    assert bench.store.data[[0, 2]].isnan().all()
    written = (~bench.store.data[1].isnan()).sum()
    assert written == 2 * 40 * bench.shape.kv_heads * bench.shape.head_dim


def test_forward_without_a_plan_is_refused(backend: str, dtype: torch.dtype) -> None:
    bench = Bench.of(Shape(dtype=dtype), backend)
    q, k = torch.zeros(1, 6, 64, dtype=dtype), torch.zeros(1, 2, 64, dtype=dtype)
    with pytest.raises(RuntimeError, match="without a plan"):
        bench.backend.forward(0, q, k, k, torch.zeros_like(q))


def test_positions_beyond_the_longest_row_may_be_unallocated(backend: str, dtype: torch.dtype) -> None:
    """A table holds no more blocks than its row fills, whatever the span of 64 would reach for."""
    bench = Bench.of(Shape(dtype=dtype), backend, blocks=3)
    check(bench, backend, [Row(bench.sequence(33), 0, 33)])
