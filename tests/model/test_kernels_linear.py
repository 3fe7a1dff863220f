"""Linears of every code path: against float64, and bit for bit against themselves."""

import functools
import itertools
import threading

import pytest
import torch
from support.kernels import ALL, DTYPES, NATIVE, linear_reference, make_kernels, make_linear, random, same_bits
from torch import Tensor

from octavo.model.kernels import Linear
from octavo.model.kernels.load import open_library
from octavo.model.kernels.native import PackedLinear

SMOLLM2 = ((960, 576), (576, 576), (3072, 576), (576, 1536), (1088, 576))
"""[out_features, in_features] of the default model's products; the last is a slice of its head."""
ODD = ((1, 1), (63, 31), (65, 33), (130, 64), (64, 577), (129, 95), (3, 2))
ROWS = (*range(1, 20), 31, 32, 33, 47, 48, 49, 63, 64, 65, 80, 81, 96, 97, 127, 128, 129, 130)

every_kernel = pytest.mark.parametrize(("path", "dtype"), ALL, ids=str)
every_native_kernel = pytest.mark.parametrize(("path", "dtype"), NATIVE, ids=str)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def product(linear: Linear, x: Tensor, out_dtype: torch.dtype = torch.float32) -> Tensor:
    out = torch.full((x.shape[0], linear.out_features), torch.nan, dtype=out_dtype)
    linear(x, out)
    return out


@functools.cache
def numbers(shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Weight, bias and x [40, in_features]."""
    return random(*shape, dtype=dtype), random(shape[0], dtype=dtype, seed=1), random(40, shape[1], dtype=dtype, seed=2)


@functools.cache
def expected(shape: tuple[int, int], dtype: torch.dtype, out_dtype: torch.dtype, bias: bool) -> tuple[Tensor, Tensor]:
    weight, bias_values, x = numbers(shape, dtype)
    return linear_reference(x, weight, bias_values if bias else None, out_dtype)


@every_kernel
@pytest.mark.parametrize("shape", [*SMOLLM2[:4], *ODD], ids=str)
def test_products_are_as_exact_as_float32_sums(path: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight, _, x = numbers(shape, dtype)
    linear = make_linear(path, weight)
    for rows, out_dtype in itertools.product((8, 40), {dtype, torch.float32}):
        exact, bound = expected(shape, dtype, out_dtype, bias=False)
        assert ((product(linear, x[:rows], out_dtype) - exact[:rows]).abs() <= bound[:rows]).all()


@every_kernel
@pytest.mark.parametrize("shape", ODD, ids=str)
def test_a_bias_is_added_to_the_sums(path: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight, bias, x = numbers(shape, dtype)
    linear = make_linear(path, weight, bias)
    for out_dtype in {dtype, torch.float32}:
        exact, bound = expected(shape, dtype, out_dtype, bias=True)
        if path == "torch" and out_dtype == torch.bfloat16:
            bound = bound + 2.0**-8 * (exact - bias).abs() * (1 + 2.0**-8)  # rounded once more, before the bias
        assert ((product(linear, x, out_dtype) - exact).abs() <= bound).all()


@every_native_kernel
@pytest.mark.parametrize("shape", SMOLLM2, ids=str)
def test_a_row_has_the_same_bits_among_any_number_of_rows(
    path: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    linear = make_linear(path, random(*shape, dtype=dtype))
    x = random(600, shape[1], dtype=dtype, seed=1)
    among_all = product(linear, x)
    for rows in ROWS:
        first = rows * 37 % (600 - rows)
        assert same_bits(product(linear, x[first : first + rows]), among_all[first : first + rows]), f"{rows} rows"


@every_native_kernel
@pytest.mark.parametrize(("width", "bias"), [(64, False), (192, True), (33, False), (8, True)])
def test_a_gated_product_has_the_bits_of_a_product_and_silu_mul(
    path: str, dtype: torch.dtype, width: int, bias: bool
) -> None:
    kernels = make_kernels(path, dtype)
    linear = make_linear(path, random(2 * width, 95, dtype=dtype), random(2 * width, dtype=dtype) if bias else None)
    assert isinstance(linear, PackedLinear)
    x = random(600, 95, dtype=dtype, seed=1)
    for rows in (1, 5, 16, 17, 32, 33, 130, 600):
        plain = product(linear, x[:rows], dtype)
        wide = torch.full((rows, 2 * width + 7), torch.nan, dtype=dtype)
        gated = linear.gated(x[:rows], wide[:, : 2 * width])
        assert gated.data_ptr() == wide.data_ptr()
        assert same_bits(wide[:, width : 2 * width], plain[:, width:])
        assert same_bits(gated, kernels.silu_mul(plain)), f"{rows} rows"
        assert wide[:, 2 * width :].isnan().all()


@every_dtype
@pytest.mark.parametrize("shape", [*SMOLLM2, (130, 95)], ids=str)
def test_torch_gives_a_row_the_same_bits_among_any_multiple_of_eight(
    dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    linear = make_linear("torch", random(*shape, dtype=dtype))
    x = random(272, shape[1], dtype=dtype, seed=1)
    for out_dtype in {dtype, torch.float32}:
        among_all = product(linear, x, out_dtype)
        for rows in (8, 16, 24, 64, 136):
            first = rows * 5 % (272 - rows)
            some = product(linear, x[first : first + rows], out_dtype)
            assert same_bits(some, among_all[first : first + rows]), f"{rows} rows"


@every_native_kernel
def test_the_comparison_of_bits_sees_another_order_of_additions(path: str, dtype: torch.dtype) -> None:
    weight, x = random(960, 576, dtype=dtype), random(64, 576, dtype=dtype, seed=1)
    halves = [product(make_linear(path, weight[:, part]), x[:, part]) for part in (slice(0, 288), slice(288, 576))]
    whole = product(make_linear(path, weight), x)
    assert (halves[0] + halves[1] != whole).float().mean() > 0.1


@every_native_kernel
def test_rounded_results_are_the_float32_sums_rounded_to_nearest_even(path: str, dtype: torch.dtype) -> None:
    linear = make_linear(path, random(192, 576, dtype=dtype))
    x = random(33, 576, dtype=dtype, seed=1)
    assert same_bits(product(linear, x, dtype), product(linear, x).to(dtype))


@every_native_kernel
def test_ties_round_to_even_and_special_values_survive(path: str, dtype: torch.dtype) -> None:
    if dtype == torch.float32:
        values = rounded = [1.5, torch.inf, -torch.inf, torch.nan]
    else:
        values = [1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, -torch.inf, torch.nan, -0.0]  # two ties, and an overflow
        rounded = [1.0, 1 + 2**-6, torch.inf, -torch.inf, torch.nan, 0.0]
    high = torch.tensor(values).to(dtype)
    low = (torch.tensor(values).double() - high.double()).nan_to_num(0, 0, 0).to(dtype)
    weight = torch.stack((high, low), dim=1)  # their sum is the value
    result = product(make_linear(path, weight), torch.ones(3, 2, dtype=dtype), dtype)
    torch.testing.assert_close(result, torch.tensor([rounded] * 3, dtype=dtype), rtol=0, atol=0, equal_nan=True)


@every_native_kernel
def test_the_number_of_threads_does_not_change_a_bit(path: str, dtype: torch.dtype) -> None:
    linear, x = make_linear(path, random(960, 576, dtype=dtype)), random(70, 576, dtype=dtype, seed=1)
    results = []
    for threads in (1, 2, 5):
        open_library(threads)
        results.append(product(linear, x))
    open_library(2)
    assert same_bits(results[0], results[1])
    assert same_bits(results[0], results[2])


@every_kernel
def test_rows_may_be_strided_and_nothing_else_is_written(path: str, dtype: torch.dtype) -> None:
    weight = random(130, 95, dtype=dtype)
    linear = make_linear(path, weight)
    x = random(24, 95, dtype=dtype, seed=1)
    compact = product(linear, x, dtype)
    wide_x = torch.full((24, 103), torch.nan, dtype=dtype)
    wide_x[:, 3:98] = x
    wide_out = torch.full((26, 139), 7.0, dtype=dtype)
    linear(wide_x[:, 3:98], wide_out[1:25, 4:134])
    assert same_bits(wide_out[1:25, 4:134], compact)
    wide_out[1:25, 4:134] = 7.0
    assert (wide_out == 7.0).all()


@every_kernel
@pytest.mark.parametrize("shape", [(960, 576), *ODD], ids=str)
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_weights_come_back_as_they_were_loaded(
    path: str, dtype: torch.dtype, shape: tuple[int, int], source: torch.dtype
) -> None:
    rows, columns = shape
    weight = random(*shape).to(source)
    linear = make_kernels(path, dtype).linear(rows, columns)
    cut = rows // 3
    linear.load(cut, weight[cut:])
    linear.load(0, weight[:cut])
    ids = torch.randperm(rows, generator=torch.Generator().manual_seed(0)).to(torch.int32)
    out = torch.empty(rows, columns, dtype=dtype)
    linear.gather(ids, out)
    assert same_bits(out, weight.to(dtype)[ids])


@every_kernel
def test_a_shard_of_columns_and_a_transposed_matrix_can_be_loaded(path: str, dtype: torch.dtype) -> None:
    whole = random(70, 99, dtype=dtype)
    for weight in (whole[:, 33:66], whole.T[33:66]):
        out = torch.empty(weight.shape, dtype=dtype)
        make_linear(path, weight).gather(torch.arange(len(weight), dtype=torch.int32), out)
        assert same_bits(out, weight)


@every_kernel
def test_the_size_is_known_without_memory(path: str, dtype: torch.dtype) -> None:
    kernels = make_kernels(path, dtype)
    for shape in (*SMOLLM2, *ODD):
        with torch.device("meta"):
            planned = kernels.linear(*shape, bias=True)
        real = kernels.linear(*shape, bias=True)
        assert planned.nbytes == real.nbytes >= (shape[0] * shape[1] + shape[0]) * dtype.itemsize
    assert kernels.linear(960, 576).nbytes == 960 * 576 * dtype.itemsize


def test_two_threads_may_compute_at_the_same_time() -> None:
    path, dtype = NATIVE[0]
    linears = [make_linear(path, random(960, 576, dtype=dtype, seed=seed)) for seed in range(2)]
    x = random(20, 576, dtype=dtype, seed=2)
    alone = [product(linear, x) for linear in linears]
    equal: list[bool] = []

    def compute(index: int) -> None:
        equal.extend(same_bits(product(linears[index], x), alone[index]) for _ in range(200))

    threads = [threading.Thread(target=compute, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert equal == [True] * 400


@every_native_kernel
def test_wrong_arguments_are_refused(path: str, dtype: torch.dtype) -> None:
    linear = make_linear(path, random(64, 32, dtype=dtype))
    assert isinstance(linear, PackedLinear)
    x, out = torch.zeros(4, 32, dtype=dtype), torch.zeros(4, 64, dtype=dtype)
    ids = torch.zeros(4, dtype=torch.int32)
    wrong_calls = [
        (x[:, :31], out),
        (x.half(), out),
        (x, out[:3]),
        (x, out[:, :63]),
        (x, out.double()),
        (x.T.contiguous().T, out),
        (x, out.T.contiguous().T),
        (x[0], out[0]),
        (x.to("meta"), out),
    ]
    for wrong_x, wrong_out in wrong_calls:
        for multiply in (linear, linear.gated):
            with pytest.raises(ValueError, match="expected"):
                multiply(wrong_x, wrong_out)
    with pytest.raises(ValueError, match="even width"):
        make_linear(path, random(63, 32, dtype=dtype)).gated(x, out[:, :63])
    for wrong_ids in (ids + 64, ids - 1, ids.long(), ids[:3], torch.zeros(8, dtype=torch.int32)[::2]):
        with pytest.raises(ValueError, match=r"ids|expected"):
            linear.gather(wrong_ids, x)
    for first_row, weight in ((1, random(64, 32)), (-1, random(4, 32)), (0, random(4, 31)), (0, ids.view(1, 4))):
        with pytest.raises(ValueError, match="weight"):
            linear.load(first_row, weight)
    with pytest.raises(ValueError, match="no bias"):
        linear.load_bias(0, random(64))


@every_native_kernel
def test_a_linear_without_memory_cannot_be_used(path: str, dtype: torch.dtype) -> None:
    with torch.device("meta"):
        linear = make_kernels(path, dtype).linear(64, 32)
    x, out = torch.zeros(4, 32, dtype=dtype), torch.zeros(4, 64, dtype=dtype)
    with pytest.raises(ValueError, match="cannot be used"):
        linear(x, out)
    with pytest.raises(ValueError, match="cannot be used"):
        linear.load(0, random(64, 32))
