"""Norms, additions, RoPE and SiLU of every code path, against float64 and against plain torch."""

import pytest
import torch
from support.kernels import ALL, NATIVE, ROUNDOFF, make_kernels, random, same_bits
from torch import Tensor

from octavo.model.draw import highest
from octavo.model.kernels.native import NativeKernels

EPSILON = 1e-5
WIDTHS = (1, 5, 16, 64, 100, 576)
TOKENS = 40

every_kernel = pytest.mark.parametrize(("path", "dtype"), ALL, ids=str)
every_native_kernel = pytest.mark.parametrize(("path", "dtype"), NATIVE, ids=str)


def strided(values: Tensor) -> Tensor:
    """The same [tokens, ...] values, in the middle of wider rows of NaN."""
    flat = values.flatten(1)
    wide = torch.full((len(values), flat.shape[1] + 11), torch.nan, dtype=values.dtype)
    view = wide[:, 3 : 3 + flat.shape[1]]
    view.copy_(flat)
    return view.unflatten(1, values.shape[1:])


def check_norm(out: Tensor, x: Tensor, weight: Tensor) -> None:
    """Compare with float64; and bit for bit wherever the errors of float32 cannot decide how a number is rounded."""
    width, dtype = x.shape[-1], x.dtype
    normalised = x.double() / (x.double().square().mean(-1, keepdim=True) + EPSILON).sqrt()
    error = (width / 2 + 8) * 2.0**-24  # relative: half that of a sum of `width` squares, and a few operations
    exact = normalised * weight
    unit = ROUNDOFF[dtype]
    assert ((out - exact).abs() <= exact.abs() * ((1 + error) * (1 + unit) ** 2 - 1)).all()
    low, high = (normalised * (1 - error)).to(dtype), (normalised * (1 + error)).to(dtype)
    if dtype == torch.bfloat16:
        certain = low == high
        assert certain.float().mean() > 0.9
        assert same_bits(out[certain], (low * weight)[certain])


@every_kernel
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm_rounds_before_the_weight_as_the_reference_does(path: str, dtype: torch.dtype, width: int) -> None:
    kernels, weight = make_kernels(path, dtype), random(width, dtype=dtype, seed=1)
    x = random(TOKENS, width, dtype=dtype)
    out = strided(torch.zeros_like(x))
    kernels.rms_norm(strided(x), weight, EPSILON, out)
    check_norm(out, x, weight)
    in_place = x.clone()
    kernels.rms_norm(in_place, weight, EPSILON, in_place)
    assert same_bits(in_place, out)


@every_kernel
def test_rms_norm_works_on_each_head_of_a_strided_view(path: str, dtype: torch.dtype) -> None:
    kernels, weight = make_kernels(path, dtype), random(64, dtype=dtype, seed=1)
    x = random(TOKENS, 3, 64, dtype=dtype)
    heads = strided(x)
    kernels.rms_norm(heads, weight, EPSILON, heads)
    check_norm(heads, x, weight)


@every_kernel
@pytest.mark.parametrize("width", WIDTHS)
def test_additions_are_those_of_torch(path: str, dtype: torch.dtype, width: int) -> None:
    kernels, weight = make_kernels(path, dtype), random(width, dtype=dtype, seed=2)
    x, branch = random(TOKENS, width, dtype=dtype), random(TOKENS, width, dtype=dtype, seed=1)
    added, out = strided(x), strided(branch)
    kernels.rms_norm(added, weight, EPSILON, out, out)  # over the branch
    assert same_bits(added, x + branch)
    check_norm(out, x + branch, weight)


@every_kernel
@pytest.mark.parametrize("head_dim", [2, 16, 22, 64, 128])
def test_rope_turns_each_pair_by_its_angle(path: str, dtype: torch.dtype, head_dim: int) -> None:
    kernels = make_kernels(path, dtype)
    angles = torch.rand(50, head_dim // 2, generator=torch.Generator().manual_seed(3)).double() * 6.28
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1).float()
    positions = torch.arange(TOKENS, dtype=torch.int32).flip(0) + 7
    qkv = strided(random(TOKENS, 12, head_dim, dtype=dtype))
    before = qkv.double()
    kernels.rotate(qkv[:, :9], qkv[:, 9:11], positions, cos_sin)
    cosines, sines = cos_sin.double()[positions].unsqueeze(1).chunk(2, dim=-1)
    low, high = before[:, :11].chunk(2, dim=-1)
    exact = torch.cat((low * cosines - high * sines, high * cosines + low * sines), dim=-1)
    magnitude = torch.cat(
        ((low * cosines).abs() + (high * sines).abs(), (high * cosines).abs() + (low * sines).abs()), -1
    )
    bound = 3 * 2.0**-24 * magnitude + ROUNDOFF[dtype] * (exact.abs() + magnitude * 2.0**-22)
    assert ((qkv[:, :11] - exact).abs() <= bound).all()
    assert torch.equal(qkv[:, 11].double(), before[:, 11]), "v is not rotated"


@every_kernel
@pytest.mark.parametrize("width", WIDTHS)
def test_silu_mul_is_the_gated_unit_of_the_paper(path: str, dtype: torch.dtype, width: int) -> None:
    gate = (random(TOKENS, width) * 20).to(dtype)
    up = random(TOKENS, width, dtype=dtype, seed=1)
    gate_up = strided(torch.cat((gate, up), dim=1))
    result = make_kernels(path, dtype).silu_mul(gate_up)
    assert result.data_ptr() == gate_up.data_ptr()
    assert same_bits(result, gate_up[:, :width])
    assert same_bits(gate_up[:, width:], up)
    exact = gate.double() * torch.sigmoid(gate.double()) * up.double()
    relative = 16 * 2.0**-24 + ROUNDOFF[dtype]  # an exponential within 8 roundoffs and four operations
    assert ((result - exact).abs() <= relative * exact.abs() + 2.0**-120).all()


@every_native_kernel
def test_silu_of_extreme_values_is_finite_or_infinite_as_it_should_be(path: str, dtype: torch.dtype) -> None:
    gate = torch.tensor([[0.0, -1e4, 1e4, -3e38, 3e38, torch.inf, torch.nan]])
    result = make_kernels(path, dtype).silu_mul(torch.cat((gate, torch.ones_like(gate)), dim=1).to(dtype)).float()[0]
    assert result[0] == 0
    assert abs(result[1]) < 1e-30
    assert torch.equal(result[[2, 4, 5]], gate.to(dtype).float()[0, [2, 4, 5]])
    assert abs(result[3]) < 10
    assert result[6].isnan()


@every_kernel
def test_a_row_has_the_same_bits_alone_and_among_others(path: str, dtype: torch.dtype) -> None:
    """Enough rows that several threads share them."""
    kernels, weight = make_kernels(path, dtype), random(576, dtype=dtype, seed=1)
    x, branch = random(296, 576, dtype=dtype), random(296, 576, dtype=dtype, seed=2)
    positions = torch.arange(296, dtype=torch.int32)
    cos_sin = random(296, 64, seed=3)

    def compute(rows: slice) -> Tensor:
        spine, normed = x[rows].clone(), torch.empty_like(x[rows])
        kernels.rms_norm(spine, weight, EPSILON, normed, branch[rows])
        kernels.rotate(normed.view(-1, 9, 64)[:, :6], normed.view(-1, 9, 64)[:, 6:], positions[rows], cos_sin)
        return kernels.silu_mul(torch.cat((spine, normed), dim=1))

    together = compute(slice(0, 296))
    for first, count in ((0, 8), (8, 16), (80, 104), (288, 8)):
        assert same_bits(compute(slice(first, first + count)), together[first : first + count])


@every_native_kernel
def test_wrong_arguments_are_refused(path: str, dtype: torch.dtype) -> None:
    kernels = make_kernels(path, dtype)
    x, weight = torch.zeros(4, 32, dtype=dtype), torch.zeros(32, dtype=dtype)
    heads, positions, cos_sin = x.view(4, 2, 16), torch.zeros(4, dtype=torch.int32), torch.zeros(8, 16)
    wrong_calls = [
        lambda: kernels.rms_norm(x, weight[:31], EPSILON, x),
        lambda: kernels.rms_norm(x, weight.double(), EPSILON, x),
        lambda: kernels.rms_norm(x, weight, EPSILON, x[:3]),
        lambda: kernels.rms_norm(x.half(), weight, EPSILON, x),
        lambda: kernels.rms_norm(x.T.contiguous().T, weight, EPSILON, x),
        lambda: kernels.rms_norm(weight, weight, EPSILON, weight),
        lambda: kernels.rms_norm(x, weight, EPSILON, x, x[:, :16]),
        lambda: kernels.rms_norm(x, weight, EPSILON, x, x[:3]),
        lambda: kernels.rms_norm(x, weight, EPSILON, x, x.to("meta")),
        lambda: kernels.rotate(heads, heads, positions + 8, cos_sin),
        lambda: kernels.rotate(heads, heads, positions - 1, cos_sin),
        lambda: kernels.rotate(heads, heads, positions[:3], cos_sin),
        lambda: kernels.rotate(heads, heads, positions.long(), cos_sin),
        lambda: kernels.rotate(heads, heads, positions, cos_sin.double()),
        lambda: kernels.rotate(heads, heads, positions, torch.zeros(8, 32)),
        lambda: kernels.rotate(x, heads, positions, cos_sin),
        lambda: kernels.silu_mul(x[:, :31]),
        lambda: kernels.silu_mul(heads),
    ]
    for call in wrong_calls:
        with pytest.raises(ValueError, match=r"expected|positions"):
            call()


@every_native_kernel
@pytest.mark.parametrize("width", [1, 7, 16, 40, 1000])
def test_the_lowest_of_the_largest_logits_is_found_and_what_is_not_finite(
    path: str, dtype: torch.dtype, width: int
) -> None:
    kernels = make_kernels(path, dtype)
    assert isinstance(kernels, NativeKernels)
    logits = random(TOKENS, width + 5)[:, :width].mul(2).round()  # many are equal
    logits[3] = -torch.inf
    for row, value in ((5, torch.nan), (6, torch.inf), (7, -torch.inf), (9, -torch.nan)):
        logits[row, row * 5 % width] = value
    for row, column in ((11, 0), (12, width - 1), (13, width // 2)):
        logits[row, column] = 100
    (ids, failed), (expected, finite) = kernels.highest(logits), (logits.argmax(1), logits.isfinite().all(1))
    assert torch.equal(failed, ~finite)
    assert torch.equal(ids[finite], expected.int()[finite])
    assert ((ids >= 0) & (ids < width)).all()
    for found, reference in zip(kernels.highest(logits), highest(logits), strict=True):
        assert torch.equal(found[finite], reference[finite])
