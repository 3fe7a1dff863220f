"""Steps of paged attention over random sequences, and what they must yield."""

import functools
from dataclasses import dataclass, field, replace

import torch
from support.reference_attention import ReferenceAttention
from torch import Tensor

from octavo.kvcache.layout import KVLayout
from octavo.kvcache.store import KVStore
from octavo.model.attention import AttentionBackend, AttentionBatch
from octavo.model.attention.cpu import CpuAttention
from octavo.model.attention.fallback import TorchAttention
from octavo.model.attention.flashinfer import HEAD_DIMS, XQA_BLOCK_SIZES, FlashInferAttention
from octavo.model.attention.load import attention_variant
from octavo.model.config import ModelConfig
from octavo.model.kernels.library import Library
from octavo.model.kernels.load import available_paths, open_library
from octavo.model.workspaces import Workspaces

LAYERS, LAYER = 3, 1
DTYPES = (torch.bfloat16, torch.float32)
FLASHINFER = {
    "flashinfer": Workspaces(float_bytes=1 << 20),
    "flashinfer-fa3": Workspaces(prefill="fa3", float_bytes=1 << 20),
    "flashinfer-xqa": Workspaces(decode="xqa", float_bytes=1 << 20),
    "flashinfer-fp8": Workspaces(fp8_cache=True, float_bytes=1 << 20),
}
"""By name of a test's backend: with its compiled modules emulated, see flashinfer_emulation.py."""
OTHERS = ("reference", "torch", *FLASHINFER)


def backends(*excluded: str) -> list[tuple[str, torch.dtype]]:
    """All attention backends by name, each with the dtypes it knows; the CPU's go by their instruction set."""
    names = [(name, dtype) for dtype in DTYPES for name in (*OTHERS, *available_paths(dtype))]
    return [
        (name, dtype)
        for name, dtype in names
        if name not in excluded and (name not in FLASHINFER or dtype == torch.bfloat16)
    ]


def takes(backend: str, shape: "Shape") -> bool:
    """Whether the backend has kernels for a shape."""
    if backend not in FLASHINFER:
        return True
    return shape.head_dim in HEAD_DIMS and (backend != "flashinfer-xqa" or shape.block_size in XQA_BLOCK_SIZES)


def make_backend(name: str, config: ModelConfig, store: KVStore) -> AttentionBackend:
    """Make one of `backends`."""
    if name == "reference":
        return ReferenceAttention(config, store)
    if name == "torch":
        return TorchAttention(config, store)
    if name in FLASHINFER:
        return FlashInferAttention(config, store, FLASHINFER[name])
    return CpuAttention(config, store, shared_library(), attention_variant(name, config.head_dim))


@functools.cache
def shared_library() -> Library:
    return open_library(2)


def set_threads(threads: int) -> None:
    torch.set_num_threads(threads)
    shared_library().octavo_set_threads(threads)


def weight_roundoff(backend: str, dtype: torch.dtype) -> float:
    """How far a weight may be rounded before it meets V: to bfloat16 in the bfloat16 kernels."""
    return 0.0 if backend in OTHERS or dtype == torch.float32 else 2.0**-8


@dataclass(frozen=True)
class Shape:
    """The shapes of a test; `dtype` is that of all inputs, and of the store unless that is `fp8`."""

    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    window: int | None = None
    dtype: torch.dtype = torch.float32
    fp8: bool = False

    def kept(self, x: Tensor) -> Tensor:
        """What the store keeps of K or V."""
        return rounded_to_fp8(x) if self.fp8 else x

    def of(self, dtype: torch.dtype) -> "Shape":
        return replace(self, dtype=dtype)

    def config(self) -> ModelConfig:
        return ModelConfig(
            architecture="LlamaForCausalLM",
            layers=LAYERS,
            width=self.heads * self.head_dim,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            ffn_width=64,
            vocabulary=64,
            max_context=4096,
            norm_epsilon=1e-5,
            rope_theta=1e4,
            sliding_window=self.window,
        )

    def store(self, blocks: int) -> KVStore:
        """A store whose memory holds NaN wherever nobody has written."""
        dtype = torch.float8_e4m3fn if self.fp8 else self.dtype
        layout = KVLayout(LAYERS, self.kv_heads, self.head_dim, self.block_size, dtype.itemsize)
        store = KVStore(layout, blocks, dtype, torch.device("cpu"))
        store.data.fill_(float("nan"))
        return store


def rounded_to_fp8(x: Tensor) -> Tensor:
    """The nearest numbers of e4m3 (3 bits of mantissa, exponents from -6), those beyond 448 becoming 448; in float64.

    Spelled out: a number of exponent e lies on a grid of 2^(e-3), and round() takes the even of two neighbours.
    """
    wide = x.double().clamp(-448, 448)
    grid = 2.0 ** (torch.frexp(wide).exponent - 1).clamp(min=-6).double() / 8
    return (wide / grid).round() * grid


@dataclass
class Sequence:
    """q [length, heads, head_dim], k and v [length, kv_heads, head_dim] of one request, and the blocks it holds."""

    q: Tensor
    k: Tensor
    v: Tensor
    blocks: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        return self.q.shape[0]


@dataclass
class Row:
    sequence: Sequence
    start: int
    count: int


class Bench:
    """One backend over a poisoned store, its blocks handed out in shuffled order."""

    def __init__(
        self, shape: Shape, backend: AttentionBackend, store: KVStore, seed: int = 0, padding_blocks: int = 0
    ) -> None:
        self.shape = shape
        self.store = store
        self.backend = backend
        self.random = torch.Generator().manual_seed(seed)
        blocks = store.blocks - padding_blocks
        self.free = torch.randperm(blocks, generator=self.random).tolist()
        backend.reserve(64, 4096, 64 * blocks)

    @classmethod
    def of(cls, shape: Shape, backend: str, blocks: int = 128) -> "Bench":
        padding_blocks = int(backend in FLASHINFER)
        shape = replace(shape, fp8=backend == "flashinfer-fp8")
        store = shape.store(blocks + padding_blocks)
        return cls(shape, make_backend(backend, shape.config(), store), store, padding_blocks=padding_blocks)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random, dtype=torch.float64).to(self.shape.dtype)

    def sequence(self, length: int, prefix: Sequence | None = None, shared: int = 0) -> Sequence:
        """A random sequence; its first `shared` positions, and their blocks, are those of `prefix`."""
        shape = self.shape
        q = 2 * self.normal(length, shape.heads, shape.head_dim)
        k = self.normal(length, shape.kv_heads, shape.head_dim)
        v = self.normal(length, shape.kv_heads, shape.head_dim)
        blocks = []
        if prefix is not None:
            k[:shared], v[:shared] = prefix.k[:shared], prefix.v[:shared]
            blocks = prefix.blocks[: shared // shape.block_size]
        own = -(-length // shape.block_size) - len(blocks)
        return Sequence(q, k, v, blocks + [self.free.pop() for _ in range(own)])

    def batch(self, rows: list[Row]) -> AttentionBatch:
        size = self.shape.block_size
        ends = [row.start + row.count for row in rows]
        tables = [row.sequence.blocks[: -(-end // size)] for row, end in zip(rows, ends, strict=True)]
        slots = [
            row.sequence.blocks[position // size] * size + position % size
            for row in rows
            for position in range(row.start, row.start + row.count)
        ]
        return AttentionBatch(
            query_indptr=_indptr([row.count for row in rows]),
            kv_lengths=_int32(ends),
            block_indptr=_indptr([len(table) for table in tables]),
            block_indices=_int32([block for table in tables for block in table]),
            last_block_len=_int32([(end - 1) % size + 1 for end in ends]),
            slots=_int32(slots),
        )

    def step(self, rows: list[Row], padding: int = 0, *, finite: bool = True) -> list[Tensor]:
        """Run one step on strided views of one fused tensor, as the model does; outputs by row.

        Padded tokens are NaN on the way in and must be finite on the way out.
        """
        shape = self.shape
        parts = [slice(row.start, row.start + row.count) for row in rows]
        fused = torch.cat(
            [
                torch.cat([getattr(row.sequence, name)[part] for row, part in zip(rows, parts, strict=True)]).flatten(1)
                for name in ("q", "k", "v")
            ],
            dim=1,
        )
        tokens = fused.shape[0]
        fused = torch.cat([fused, torch.full((padding, fused.shape[1]), float("nan"), dtype=shape.dtype)])
        widths = [heads * shape.head_dim for heads in (shape.heads, shape.kv_heads, shape.kv_heads)]
        q, k, v = (part.unflatten(1, (-1, shape.head_dim)) for part in fused.split(widths, dim=1))
        out = torch.full((tokens + padding, 2 * widths[0]), float("nan"), dtype=shape.dtype)
        out = out[:, widths[0] :].unflatten(1, (-1, shape.head_dim))
        self.backend.plan(self.batch(rows))
        self.backend.forward(LAYER, q, k, v, out)
        assert out.isfinite().all() or not finite
        return list(out[:tokens].split([row.count for row in rows]))

    def chunks(self, sequence: Sequence, count: int, neighbours: list[Sequence] | None = None) -> Tensor:
        """Compute a whole sequence, `count` tokens a step, among one-token rows of the neighbours."""
        outputs = []
        length = sequence.length
        for step, start in enumerate(range(0, length, count)):
            rows = [Row(other, step % other.length, 1) for other in neighbours or []]
            rows.append(Row(sequence, start, min(count, length - start)))
            outputs.append(self.step(rows)[-1])
        return torch.cat(outputs)


def _int32(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def _indptr(counts: list[int]) -> Tensor:
    return _int32([0, *torch.tensor(counts).cumsum(0).tolist()])


@dataclass
class Expected:
    """The exact output of some tokens, and how far a result may lie from it."""

    output: Tensor
    bound: Tensor

    def assert_matches(self, actual: Tensor) -> None:
        excess = (actual.double() - self.output).abs() - self.bound
        worst = excess.max().item()
        assert worst <= 0, f"{(excess > 0).sum()} of {excess.numel()} outputs exceed their bound, the worst by {worst}"


def expect(shape: Shape, row: Row, *, weight_roundoff: float) -> Expected:
    """Dense attention in float64, straight from the sequence's own K and V, and a bound of the rounding error.

    With w the exact weights of a query, o its exact output, n the positions it sees and u = 2^-24 the unit roundoff of
    float32 (of which products of head_dim terms and sums of n terms lose at most that many times the sum of absolute
    values; Higham, Accuracy and Stability of Numerical Algorithms, section 3.1):

    - a score is off by at most s = (head_dim + 8) u sum |q k| / sqrt(head_dim), which changes a weight, before it is
      normalised, by a factor within exp(+-s). Where each weight carries a relative error of at most r and the same
      weights normalise, the output moves by at most r / (1 - r) sum w |v - o|, and that sum is at most the standard
      deviation of v under w;
    - the weights that meet V, but not those that normalise, may be rounded: by `weight_roundoff` sum w |v| at most;
    - the sums over positions, rescaled once in 64, lose (n + n / 16 + 16) u sum w |v|;
    - the output is rounded to the store's dtype.
    """
    unit = 2.0**-24
    group = shape.heads // shape.kv_heads
    end = row.start + row.count
    q = row.sequence.q[row.start : end].double()
    k, v = (
        t[:end].double().repeat_interleave(group, dim=1)
        for t in (shape.kept(row.sequence.k), shape.kept(row.sequence.v))
    )
    position = torch.arange(end)
    seen_from = torch.arange(row.start, end)[:, None]
    visible = (position <= seen_from) & (position > seen_from - (shape.window or end))
    scores = torch.einsum("thd,phd->htp", q, k) / shape.head_dim**0.5
    weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    output = torch.einsum("htp,phd->thd", weights, v)

    sizes = torch.einsum("thd,phd->htp", q.abs(), k.abs()).masked_fill(~visible, 0).amax(dim=-1) / shape.head_dim**0.5
    score_error = ((shape.head_dim + 8) * unit * sizes).expm1().T[:, :, None]
    spread = (torch.einsum("htp,phd->thd", weights, v * v) - output * output).clamp(min=0).sqrt()
    absolute = torch.einsum("htp,phd->thd", weights, v.abs())
    seen = visible.sum(dim=-1)[:, None, None]
    weight_error = score_error + 4 * unit
    bound = weight_error / (1 - weight_error) * spread
    bound += (weight_roundoff + (seen * 17 / 16 + 16) * unit) * absolute
    output_roundoff = torch.finfo(shape.dtype).eps / 2
    return Expected(output, bound * (1 + output_roundoff) + output_roundoff * output.abs())
