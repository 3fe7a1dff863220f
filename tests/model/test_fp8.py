"""8-bit floats on a GPU: what is rounded, how far it may be off, and what is refused."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.attention import LAYER, Bench, Expected, Row, Sequence, Shape, expect, rounded_to_fp8
from support.checkpoints import tiny_model
from support.flashinfer_emulation import Emulation, emulated_flashinfer
from support.gpu_runners import FP8_CACHE, SMALL_WORKSPACES, FakeCapture, build_on_gpu, gpu_formats, serve
from support.kernels import ROUNDOFF, random
from torch import Tensor

from octavo.kvcache.ledger import BUCKETS
from octavo.model.arena import ActivationArena
from octavo.model.arena_layout import StepShape, arena_layout, load, step_areas
from octavo.model.attention.flashinfer import FlashInferAttention, validate
from octavo.model.config import ModelConfig
from octavo.model.device import CPU
from octavo.model.kernels import FP8_KIND
from octavo.model.kernels.cuda import CudaKernels
from octavo.model.kernels.fp8 import FP8, LARGEST, Fp8Linear, round_rows
from octavo.model.memory import RunnerLimits, plan_memory, weights_bytes
from octavo.model.placement import place_on_cpu, place_on_gpu
from octavo.model.step import SamplingParams
from octavo.model.transformer import Transformer
from octavo.model.weights.checkpoint import Checkpoint, open_checkpoint
from octavo.model.weights.lookup import find_config
from octavo.model.workspaces import Workspaces
from octavo.scheduler.messages import Submission

LIMITS = RunnerLimits(max_model_len=128, max_rows=5, max_tokens=24, block_size=16, blocks=12)
UNIT = 2.0**-24
"""Roundoff of float32."""


@pytest.fixture(autouse=True)
def emulation() -> Iterator[Emulation]:
    with emulated_flashinfer() as found:
        yield found


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """With biases and without."""
    directory = tmp_path_factory.mktemp(request.param)
    tiny_model(directory, request.param, heads=4, kv_heads=2, head_dim=64, vocabulary=1100, dtype=torch.bfloat16)
    return open_checkpoint(directory)


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    bits, scales = torch.empty(x.shape, dtype=FP8), torch.empty(x.shape[0], 1)
    round_rows(x, bits, scales)
    return bits, scales


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_are_rounded_to_nearest_with_the_largest_number_as_scale(dtype: torch.dtype) -> None:
    x = random(7, 96, dtype=dtype) * torch.tensor([1, 1e-3, 30, 1, 5, 1e-4, 9]).to(dtype)[:, None]
    x[3] = 0
    bits, scales = rounded(x)
    largest = x.double().abs().amax(dim=1, keepdim=True)
    exact_scales = (largest / LARGEST).where(largest > 0, torch.full_like(largest, 2.0**-100))
    assert ((scales.double() - exact_scales).abs() <= UNIT * exact_scales).all()
    quotients = x.double() / scales.double()
    # The quotient is first a float32. Of e4m3, half a unit in the last place is 2^-4 of the number, 2^-10 below 2^-6.
    bound = (2.0**-4 * quotients.abs()).clamp(min=2.0**-10) + UNIT * quotients.abs()
    assert ((bits.double() - quotients).abs() <= bound).all()
    assert (bits.double().abs().amax(dim=1)[[0, 1, 2, 4, 5, 6]] == LARGEST).all()
    assert (bits[3].float() == 0).all()


def test_a_rounded_row_depends_on_no_other_and_what_is_no_number_stays_none() -> None:
    x = random(5, 64, dtype=torch.bfloat16)
    alone = rounded(x[2:3])
    x[1, 7], x[3, 9], x[4] = float("nan"), float("inf"), 1e38
    bits, scales = rounded(x)
    assert torch.equal(bits[2:3].view(torch.uint8), alone[0].view(torch.uint8))
    assert torch.equal(scales[2:3], alone[1])
    for ill in (1, 3):
        assert not (bits[ill].float() * scales[ill]).isfinite().all()
    assert (bits[4].float() == LARGEST).all()


def product_bound(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The exact product in float64, of x [tokens, K] and W [N, K], and how far the one in 8 bits may be from it.

    Rounding moves each number of x by 2^-4 of it, or by 2^-10 of its row's scale where that is more, and a relative
    2^-22 for the float32 scale and quotient. The sum of K float32 terms, scaled twice and with a bias, loses at most
    K + 4 roundoffs of the sum of magnitudes (Higham, section 4.2), and the result is rounded to bfloat16.
    """
    x, scale = x.double(), x.double().abs().amax(dim=1, keepdim=True) / LARGEST
    moved = torch.maximum(2.0**-4 * x.abs(), 2.0**-10 * scale) + 2.0**-22 * x.abs()
    magnitude = (x.abs() + moved) @ weight.abs().T
    exact, error = x @ weight.T, moved @ weight.abs().T
    if bias is not None:
        exact, magnitude = exact + bias.double(), magnitude + bias.double().abs()
    error = error + (x.shape[1] + 4) * UNIT * magnitude
    return exact, error + ROUNDOFF[torch.bfloat16] * (exact.abs() + error)


def stored(linear: Fp8Linear) -> Tensor:
    """W as it is kept, in float64."""
    return linear._weight.double() * linear._scales.double().T


def make_linear(outputs: int, inputs: int, *, bias: bool = False, tokens: int = 64) -> Fp8Linear:
    kernels = CudaKernels(torch.bfloat16, CPU, fp8=True)
    assert kernels.fp8 is not None
    config = ModelConfig("", 1, inputs, 1, 1, inputs, 16, 16, 16, 1e-5, 1e4)
    kernels.fp8.arena = ActivationArena(arena_layout(StepShape(config, tokens, 8, 2, fp8=True)), torch.bfloat16, CPU)
    linear = kernels.linear(outputs, inputs, bias=bias, quantised=FP8_KIND)
    assert isinstance(linear, Fp8Linear)
    return linear


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 3, 17, 64])
def test_a_product_is_the_float64_product_of_the_stored_matrix_within_its_rounding(tokens: int, bias: bool) -> None:
    linear = make_linear(48, 160, bias=bias)
    weight = 0.1 * random(48, 160, seed=1) * torch.linspace(0.01, 3, 48)[:, None]
    for first in (0, 7, 32):  # slices, as a checkpoint is read
        linear.load(first, weight[first:].bfloat16())
    biases = random(48, dtype=torch.bfloat16, seed=2) if bias else None
    if biases is not None:
        linear.load_bias(0, biases)
    assert ((stored(linear) - weight.double()).abs() <= 0.07 * weight.double().abs() + 0.01).all()
    x, out = random(tokens, 160, dtype=torch.bfloat16, seed=3), torch.full((tokens, 48), torch.nan).bfloat16()
    linear(x, out)
    exact, bound = product_bound(x, stored(linear), biases)
    assert ((out.double() - exact).abs() <= bound).all()
    # Without rounding x the result would be much nearer: the bound is no larger than it has to be.
    assert (out.double() - exact).abs().max() > 0.02 * bound.max()
    assert linear.nbytes == 48 * 160 + 4 * 48 + (96 if bias else 0)


def test_matrices_in_8_bits_serve_no_embedding_and_need_an_arena_and_a_bias_to_load_one() -> None:
    linear = make_linear(16, 16)
    with pytest.raises(ValueError, match="cannot be read"):
        linear.gather(torch.zeros(1, dtype=torch.int32), torch.empty(1, 16))
    with pytest.raises(ValueError, match="no bias"):
        linear.load_bias(0, torch.zeros(16))
    kernels = CudaKernels(torch.bfloat16, CPU, fp8=True)
    with pytest.raises(RuntimeError, match="before there is an arena"):
        kernels.linear(16, 16, quantised=FP8_KIND)(torch.zeros(1, 16), torch.empty(1, 16))
    with pytest.raises(ValueError, match="do not multiply with fp8 blocks"):
        CudaKernels(torch.bfloat16, CPU).linear(16, 16, quantised=FP8_KIND)


def test_the_arena_has_room_for_the_rounded_input_of_each_product() -> None:
    config = ModelConfig("", 2, 64, 4, 2, 32, 96, 100, 64, 1e-5, 1e4)
    areas = {area.name: area for area in step_areas(StepShape(config, 24, 5, 2, gate_in_place=False, fp8=True))}
    assert (areas["fp8"].rows, areas["fp8"].columns, areas["fp8"].element_bytes) == (24, 128, 1)
    assert (areas["fp8_scales"].rows, areas["fp8_scales"].columns, areas["fp8_scales"].element_bytes) == (24, 1, 4)
    for rounded_input in (areas["fp8"], areas["fp8_scales"]):
        assert not rounded_input.points & areas["logits"].points
        for name in ("to_attention", "attended", "to_feed_forward", "gated", "qkv", "gate_up"):
            assert rounded_input.points & areas[name].points, name
    layout = arena_layout(StepShape(config, 24, 5, 2, gate_in_place=False, fp8=True))
    assert layout.bytes >= load(areas.values(), range(9))


def serve_tiny(checkpoint: Checkpoint, **options: object) -> dict[int, list[int]]:
    runner, ledger = build_on_gpu(checkpoint, LIMITS, **options)
    prompts = [(1, 2, 3), tuple(range(40, 90)), tuple(range(7, 20))]
    params = SamplingParams(temperature=0.0)
    batch = [Submission(request=i, prompt=prompt, params=params, max_tokens=7) for i, prompt in enumerate(prompts)]
    served = serve(runner, LIMITS, batch)
    assert served.errors == []
    for bucket in BUCKETS:
        if not options.get("reference"):
            assert ledger.allocated[bucket] == ledger.plan.planned(bucket)
    return served.tokens


def test_a_model_in_8_bits_serves_with_the_ledger_as_planned_and_the_tokens_of_the_reference(
    emulation: Emulation, tiny: Checkpoint
) -> None:
    expected = serve_tiny(tiny, fp8=True, reference=True)
    assert {len(tokens) for tokens in expected.values()} == {7}
    assert serve_tiny(tiny, fp8=True) == expected
    assert serve_tiny(tiny, fp8=True, capture=FakeCapture(emulation)) == expected
    assert emulation.calls.kernels.count("multiply_fp8") > emulation.calls.kernels.count("multiply") > 0


@pytest.mark.parametrize("fp8", [False, True])
def test_a_cache_in_8_bits_serves_with_half_the_bytes_and_the_tokens_of_attention_to_rounded_numbers(
    emulation: Emulation, tiny: Checkpoint, fp8: bool
) -> None:
    expected = serve_tiny(tiny, fp8=fp8, workspaces=FP8_CACHE, reference=True)
    assert serve_tiny(tiny, fp8=fp8, workspaces=FP8_CACHE) == expected
    assert serve_tiny(tiny, fp8=fp8, workspaces=FP8_CACHE, capture=FakeCapture(emulation)) == expected
    halves = [
        plan_memory(tiny.config, gpu_formats(workspaces), LIMITS, 1 << 40).cache
        for workspaces in (FP8_CACHE, SMALL_WORKSPACES)
    ]
    assert 2 * halves[0] == halves[1]


def test_the_cache_keeps_the_nearest_8_bit_numbers_and_the_largest_for_what_lies_beyond() -> None:
    bench = Bench.of(Shape(dtype=torch.bfloat16), "flashinfer-fp8")
    sequence = bench.sequence(3)
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    finite = every[every.isfinite()]
    for start in range(0, len(finite), sequence.k.numel()):
        part = finite[start : start + sequence.k.numel()]
        sequence.k.view(-1)[: len(part)] = part
        sequence.v.view(-1)[: len(part)] = -part
        bench.step([Row(sequence, 0, 3)], finite=False)
        pages = [side.view(-1, *sequence.k.shape[1:]) for side in (bench.store.keys(1), bench.store.values(1))]
        first = 16 * sequence.blocks[0]
        for kept, new in zip(pages, (sequence.k, sequence.v), strict=True):
            assert torch.equal(kept[first : first + 3].double(), rounded_to_fp8(new))


def test_attention_to_a_scaled_cache_is_exact_attention_to_what_it_keeps() -> None:
    """The scales of K and V, no powers of two, are applied once each; the last one rounds the output once more."""
    scales = {"k_scale": 0.0123, "v_scale": 0.77}
    bench = Bench.of(Shape(dtype=torch.bfloat16), "flashinfer-fp8")
    bench.store.scales[LAYER].update(scales)
    long, short = bench.sequence(41), bench.sequence(20)
    outputs = bench.step([Row(short, 0, 19), Row(long, 0, 40)]) + bench.step([Row(short, 19, 1), Row(long, 40, 1)])
    kept = [kept_by(bench, sequence, scales) for sequence in (short, long)]
    for sequence, stored in zip((short, long), kept, strict=True):
        for name, side in (("k_scale", "k"), ("v_scale", "v")):
            # A quotient is rounded to bfloat16, then to 8 bits.
            quotient = getattr(sequence, side).double() / scales[name]
            bound = (2.0**-4 * quotient.abs()).clamp(min=2.0**-10) + 2.0**-7 * quotient.abs()
            off = (getattr(stored, side) / scales[name] - quotient.clamp(-LARGEST, LARGEST)).abs()
            assert (off <= bound).all()
    rows = [Row(kept[0], 0, 19), Row(kept[1], 0, 40), Row(kept[0], 19, 1), Row(kept[1], 40, 1)]
    for row, output in zip(rows, outputs, strict=True):
        expected = expect(Shape(dtype=torch.bfloat16), row, weight_roundoff=0.0)
        rounding = ROUNDOFF[torch.bfloat16]
        bound = expected.bound * (1 + rounding) + rounding * expected.output.abs()
        Expected(expected.output, bound).assert_matches(output)


def kept_by(bench: Bench, sequence: Sequence, scales: dict[str, float]) -> Sequence:
    """What a store holds of a sequence, as float64 numbers."""
    slots = [16 * sequence.blocks[position // 16] + position % 16 for position in range(sequence.length)]
    sides = (bench.store.keys(LAYER), bench.store.values(LAYER))
    k, v = (
        side.view(-1, *sequence.k.shape[1:])[slots].double() * scale
        for side, scale in zip(sides, scales.values(), strict=True)
    )
    return Sequence(sequence.q, k, v, sequence.blocks)


@pytest.mark.parametrize("paths", [{"prefill": "fa3"}, {"decode": "xqa"}])
def test_attention_that_would_round_queries_too_refuses_a_cache_in_8_bits(paths: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="--kv-cache-dtype fp8_e4m3: fa3 and xqa would round queries to 8 bits too"):
        validate(64, 16, torch.bfloat16, Workspaces(fp8_cache=True, **paths))
    shape = Shape(dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"a cache of torch.bfloat16 beside queries of torch.bfloat16"):
        FlashInferAttention(shape.config(), shape.store(2), Workspaces(fp8_cache=True))


def test_every_product_of_a_whole_model_matches_float64_on_the_same_matrices(tiny: Checkpoint) -> None:
    calls = []
    original = Fp8Linear.__call__

    def noted(self: Fp8Linear, x: Tensor, out: Tensor) -> None:
        kept = x.clone()
        original(self, x, out)
        calls.append((self, kept, out.clone()))

    with mock.patch.object(Fp8Linear, "__call__", noted):
        serve_tiny(tiny, fp8=True)
    assert len(calls) % (4 * tiny.config.layers) == 0
    for linear, x, out in calls:
        exact, bound = product_bound(x, stored(linear), linear._bias)
        assert ((out.double() - exact).abs() <= bound).all()


def test_the_matrices_of_llama_3_70b_take_the_bytes_that_are_planned() -> None:
    config = find_config("llama-3-70b")
    meta = torch.device("meta")
    model = Transformer(
        config, CudaKernels(torch.bfloat16, meta, fp8=True), dtype=torch.bfloat16, device=meta, max_positions=4
    )
    assert model.weights_nbytes == weights_bytes(config, gpu_formats(fp8=True))


@pytest.mark.parametrize(
    ("dtype", "capability", "width", "named"),
    [
        (torch.float16, (9, 0), 64, "multiplied in bfloat16, not in torch.float16"),
        (torch.bfloat16, (8, 6), 64, "compute capability 8.9 or higher"),
        (torch.bfloat16, (8, 9), 72, "16 does not divide the sides of a 512 x 72 matrix"),
    ],
)
def test_what_the_products_cannot_do_is_refused(
    dtype: torch.dtype, capability: tuple[int, int], width: int, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    config = ModelConfig("", 2, width, 4, 2, 64, 96, 100, 64, 1e-5, 1e4)
    with pytest.raises(ValueError, match=f"--quantization fp8.*{named}"):
        place_on_gpu(CPU, dtype, config, 16, Workspaces(), fp8=True)
    place_on_gpu(CPU, dtype, config, 16, Workspaces(), fp8=False)


def test_a_cpu_refuses_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--quantization fp8 needs the products of a GPU: use --device cuda"):
        place_on_cpu(torch.bfloat16, Workspaces(), 1, 1, fp8=True)
    with pytest.raises(ValueError, match="--kv-cache-dtype choose kernels of a GPU: use --device cuda"):
        place_on_cpu(torch.bfloat16, Workspaces(fp8_cache=True), 1, 1, fp8=False)
