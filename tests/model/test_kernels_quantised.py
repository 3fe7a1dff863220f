"""Products with quantised blocks: exact in float32, and the bits of widened weights on every code path."""

import functools
import itertools

import gguf
import numpy as np
import pytest
import torch
from support.ggml_blocks import random_blocks
from support.kernels import NATIVE, linear_reference, make_kernels, random, same_bits
from torch import Tensor

from octavo.model.kernels import Linear
from octavo.model.kernels.load import open_library
from octavo.model.kernels.packing import QUANTISED

KINDS = tuple(QUANTISED)
SMOLLM2 = ((960, 576), (576, 576), (3072, 576), (576, 1536), (1088, 576))
"""[out_features, in_features] of the default model's products; the last is a slice of its head."""
ROWS = (*range(1, 20), 31, 32, 33, 47, 48, 63, 64, 65, 97, 128, 129, 200, 300)

every_path = pytest.mark.parametrize(("path", "dtype"), NATIVE, ids=str)
every_kind = pytest.mark.parametrize("kind", KINDS)


def shapes_of(kind: str) -> list[tuple[int, int]]:
    """Shapes of the default model, as far as rows divide into blocks, and odd ones."""
    elements = QUANTISED[kind][0]
    odd = [(1, elements), (63, elements), (65, 3 * elements), (130, 2 * elements)]
    return [*(shape for shape in SMOLLM2 if shape[1] % elements == 0), *odd]


@functools.cache
def blocks_and_numbers(shape: tuple[int, int], kind: str) -> tuple[Tensor, Tensor]:
    """Blocks of arbitrary bits, scales of both signs among them, and what the gguf package reads in them."""
    data = random_blocks(*shape, kind, seed=shape[0])
    signs = np.random.default_rng(0).integers(0, 2, (shape[0], shape[1] // QUANTISED[kind][0]), np.uint8)
    data.reshape(shape[0], -1, QUANTISED[kind][1])[:, :, 1] |= signs << 7  # the sign of the first float16
    return torch.from_numpy(data), torch.from_numpy(gguf.dequantize(data, gguf.GGMLQuantizationType[kind]))


@functools.cache
def quantised(path: str, dtype: torch.dtype, shape: tuple[int, int], kind: str) -> Linear:
    linear = make_kernels(path, dtype).linear(*shape, quantised=kind)
    linear.load(0, blocks_and_numbers(shape, kind)[0])
    return linear


@functools.cache
def widened(path: str, dtype: torch.dtype, shape: tuple[int, int], kind: str) -> Linear:
    linear = make_kernels(path, dtype).linear(*shape)
    linear.load(0, blocks_and_numbers(shape, kind)[1])
    return linear


def product(linear: Linear, x: Tensor, out_dtype: torch.dtype = torch.float32) -> Tensor:
    out = torch.full((x.shape[0], linear.out_features), torch.nan, dtype=out_dtype)
    linear(x, out)
    return out


@pytest.mark.parametrize("path", [path for path, dtype in NATIVE if dtype == torch.float32])
@every_kind
def test_float32_products_are_those_of_the_exact_weights_up_to_the_rounding_of_the_sums(path: str, kind: str) -> None:
    for shape in shapes_of(kind):
        x = random(20, shape[1], seed=1)
        exact, bound = linear_reference(x, blocks_and_numbers(shape, kind)[1], None, torch.float32)
        assert ((product(quantised(path, torch.float32, shape, kind), x) - exact).abs() <= bound).all()


@every_path
@every_kind
def test_products_have_the_bits_of_widened_weights_at_every_number_of_rows(
    path: str, dtype: torch.dtype, kind: str
) -> None:
    for shape in shapes_of(kind):
        x = random(300, shape[1], dtype=dtype, seed=1)
        expected = product(widened(path, dtype, shape, kind), x)
        linear = quantised(path, dtype, shape, kind)
        for rows in ROWS:
            first = rows * 37 % (301 - rows)
            part = slice(first, first + rows)
            assert same_bits(product(linear, x[part]), expected[part]), f"{shape}, {rows} rows"
        assert same_bits(product(linear, x, dtype), expected.to(dtype))


@every_path
@every_kind
def test_gated_products_have_the_bits_of_widened_weights(path: str, dtype: torch.dtype, kind: str) -> None:
    x = random(64, 256, dtype=dtype, seed=1)
    linears = quantised(path, dtype, (384, 256), kind), widened(path, dtype, (384, 256), kind)
    for rows in (1, 3, 17, 32, 33, 64):
        gated = [linear.gated(x[:rows], torch.empty(rows, 384, dtype=dtype)) for linear in linears]
        assert same_bits(gated[0], gated[1]), f"{rows} rows"


@every_path
def test_the_number_of_threads_does_not_change_a_bit(path: str, dtype: torch.dtype) -> None:
    linear, x = quantised(path, dtype, (960, 576), "Q4_1"), random(200, 576, dtype=dtype, seed=1)
    results = []
    for threads in (1, 2, 5):
        open_library(threads)
        results.append([product(linear, x[:rows]) for rows in (3, 64, 200)])
    open_library(2)
    for one, other in itertools.pairwise(results):
        assert all(itertools.starmap(same_bits, zip(one, other, strict=True)))


@every_path
@every_kind
def test_rows_read_back_are_the_weights_rounded_once(path: str, dtype: torch.dtype, kind: str) -> None:
    for shape in shapes_of(kind):
        ids = torch.randperm(shape[0], generator=torch.Generator().manual_seed(0)).to(torch.int32)
        out = torch.empty(shape, dtype=dtype)
        quantised(path, dtype, shape, kind).gather(ids, out)
        assert same_bits(out, blocks_and_numbers(shape, kind)[1].to(dtype)[ids])


@every_kind
def test_weights_may_arrive_in_slices_and_in_any_order(kind: str) -> None:
    path, dtype = NATIVE[0]
    shape = (130, 2 * QUANTISED[kind][0])
    data, numbers = blocks_and_numbers(shape, kind)
    linear = make_kernels(path, dtype).linear(*shape, quantised=kind)
    for rows in (slice(70, 130), slice(0, 1), slice(1, 70)):
        linear.load(rows.start, data[rows])
    out = torch.empty(shape, dtype=dtype)
    linear.gather(torch.arange(130, dtype=torch.int32), out)
    assert same_bits(out, numbers.to(dtype))


@every_path
def test_a_bias_is_added_as_to_widened_weights(path: str, dtype: torch.dtype) -> None:
    shape, kind = (130, 64), "Q4_0"
    data, numbers = blocks_and_numbers(shape, kind)
    kernels = make_kernels(path, dtype)
    linears = [kernels.linear(*shape, bias=True, quantised=kind), kernels.linear(*shape, bias=True)]
    for linear, weight in zip(linears, (data, numbers), strict=True):
        linear.load(0, weight)
        linear.load_bias(0, random(130, seed=3))
    x = random(9, 64, dtype=dtype, seed=1)
    assert same_bits(product(linears[0], x), product(linears[1], x))


@every_path
@every_kind
def test_every_product_with_a_unit_vector_is_a_weight_rounded_once(path: str, dtype: torch.dtype, kind: str) -> None:
    """Each row of W has scales of its own, so each integer meets thousands of them, next to ties too."""
    shape = (1024, QUANTISED[kind][0])
    numbers = blocks_and_numbers(shape, kind)[1].to(dtype)
    rows = torch.eye(shape[1], dtype=dtype)
    linear = quantised(path, dtype, shape, kind)
    few = torch.cat([product(linear, rows[row : row + 1]) for row in range(32)])
    assert torch.equal(few, numbers[:, :32].T.float())
    assert torch.equal(product(linear, rows.repeat(2, 1))[: shape[1]], numbers.T.float())


@every_path
def test_extreme_scales_survive(path: str, dtype: torch.dtype) -> None:
    halves = np.array([6e-8, -6e-8, 6.1e-5, 0.0, -0.0, 65504.0, -65504.0, 1.0], np.float16)
    data = random_blocks(8, 32, "Q4_0", seed=1)
    data[:, :2] = halves[:, None].view(np.uint8)
    numbers = torch.from_numpy(gguf.dequantize(data, gguf.GGMLQuantizationType.Q4_0)).to(dtype)
    linear = make_kernels(path, dtype).linear(8, 32, quantised="Q4_0")
    linear.load(0, torch.from_numpy(data))
    out = torch.empty(8, 32, dtype=dtype)
    linear.gather(torch.arange(8, dtype=torch.int32), out)
    assert same_bits(out, numbers)
    one_by_one = product(linear, torch.eye(32, dtype=dtype))
    assert torch.equal(one_by_one.T, numbers.float())


@every_kind
def test_blocks_take_as_many_bytes_as_in_the_file_and_are_known_without_memory(kind: str) -> None:
    path, dtype = NATIVE[0]
    kernels, (elements, block_bytes) = make_kernels(path, dtype), QUANTISED[kind]
    with torch.device("meta"):
        planned = kernels.linear(192, 4 * elements, quantised=kind)
    assert planned.nbytes == kernels.linear(192, 4 * elements, quantised=kind).nbytes == 192 * 4 * block_bytes


def test_wrong_blocks_are_refused() -> None:
    path, dtype = NATIVE[0]
    kernels = make_kernels(path, dtype)
    with pytest.raises(ValueError, match="48 columns cannot be divided into blocks of 32"):
        kernels.linear(64, 48, quantised="Q4_0")
    with pytest.raises(ValueError, match="torch's kernels"):
        make_kernels("torch", dtype).linear(64, 32, quantised="Q4_0")
    linear = kernels.linear(64, 32, quantised="Q4_0")
    blocks = torch.zeros(64, 18, dtype=torch.uint8)
    for first_row, wrong in ((1, blocks), (-1, blocks[:4]), (0, blocks[:, :17]), (0, random(64, 32)), (0, blocks[0])):
        with pytest.raises(ValueError, match="weight"):
            linear.load(first_row, wrong)
    for wrong_ids in (torch.tensor([64], dtype=torch.int32), torch.tensor([-1], dtype=torch.int32)):
        with pytest.raises(ValueError, match="ids"):
            linear.gather(wrong_ids, torch.empty(1, 32, dtype=dtype))
