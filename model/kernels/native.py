"""The operators of the CPU library, called through ctypes.

The C++ side trusts its arguments, so every tensor is checked here: a wrong one raises ValueError before anything runs.
Calls release the GIL.
"""

import ctypes
from ctypes import c_char_p, c_float, c_int, c_int64, c_void_p
from struct import Struct

import torch
from torch import Tensor

from octavo.model.kernels.library import Library
from octavo.model.kernels.memory import WeightMemory
from octavo.model.kernels.packing import QUANTISED, expanded_bytes, packed_elements, quantised_bytes

LOAD_ELEMENTS = 1 << 22
"""How many weights are converted at once while loading: bounds the temporary copy."""
SUFFIXES = {torch.bfloat16: "bf16", torch.float32: "f32"}

ROUNDED, IN_FLOAT32, GATED = range(3)
"""`Form` in linear.h."""

_two_views = Struct("8q")
_three_views = Struct("12q")


class _Weights(ctypes.Structure):
    """Mirrors `Linear` in linear.h."""

    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("out_features", c_int64),
        ("in_features", c_int64),
        ("kind", c_int64),
    )


class PackedLinear:
    """A Linear whose weights lie in panels of 64 rows of W, see linear.h; one copy, made while loading."""

    def __init__(
        self,
        library: Library,
        variant: str,
        weight: Tensor,
        *,
        shape: tuple[int, int],
        dtype: torch.dtype,
        bias: bool,
        quantised: str = "",
    ) -> None:
        """Own `weight`, flat memory for the panels of W of this shape, [out_features, in_features].

        `variant` names the copy of the kernel, for example "avx2"; dtype is that of activations and bias; quantised is
        empty or a key of QUANTISED.
        """
        out_features, in_features = shape
        kind = 1 + list(QUANTISED).index(quantised) if quantised else 0
        self.out_features = out_features
        self.in_features = in_features
        self.dtype = dtype
        self._weight = weight
        self._bias = torch.zeros(out_features, dtype=dtype) if bias else None
        self._usable = self._weight.is_cpu
        self._weights = _Weights(
            weight.data_ptr(), None if self._bias is None else self._bias.data_ptr(), out_features, in_features, kind
        )
        self._address = ctypes.addressof(self._weights)
        pointers = (c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int)
        self._run = library.function(f"linear_{SUFFIXES[dtype]}_{variant}", *pointers)
        form = "quantised" if kind else "linear"
        self._pack = library.function(f"{form}_pack", c_void_p, *(c_int64,) * 4, c_void_p, c_int64)
        gather = (c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int64)
        self._gather = library.function(f"{form}_gather", *gather, result=c_int)

    @property
    def nbytes(self) -> int:
        """Bytes of the stored weight, its padding included, and bias."""
        return self._weight.nbytes + (0 if self._bias is None else self._bias.nbytes)

    @property
    def scratch_nbytes(self) -> int:
        """Numbers need none."""
        return 0

    def load(self, first_row: int, weight: Tensor) -> None:
        """Store weight [rows, in_features], any float dtype, at rows first_row .. of W."""
        if weight.ndim != 2 or weight.shape[1] != self.in_features or not weight.is_floating_point():
            raise ValueError(
                f"weight: expected floats [rows, {self.in_features}], got {weight.dtype} {list(weight.shape)}"
            )
        self._check_rows("weight", first_row, weight)
        step = max(1, LOAD_ELEMENTS // self.in_features)
        for start in range(0, weight.shape[0], step):
            rows = weight[start : start + step].to(self.dtype)
            if rows.stride(1) != 1:
                rows = rows.contiguous()
            size = rows.element_size()
            address, stride = rows.data_ptr(), rows.stride(0) * size
            self._pack(self._weights.weight, self.in_features, size, first_row + start, rows.shape[0], address, stride)

    def load_bias(self, first_row: int, bias: Tensor) -> None:
        """Store bias [rows] at rows first_row .. ; only for a Linear that was made with a bias."""
        if self._bias is None or bias.ndim != 1:
            raise ValueError(
                f"bias {list(bias.shape)}: this linear has {'no' if self._bias is None else 'a flat'} bias"
            )
        self._check_rows("bias", first_row, bias)
        self._bias[first_row : first_row + bias.shape[0]].copy_(bias)

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """Compute out [tokens, out_features], of x's dtype or float32, from x [tokens, in_features]."""
        self._multiply(x, out, IN_FLOAT32 if out.dtype is torch.float32 else ROUNDED)

    def gated(self, x: Tensor, out: Tensor) -> Tensor:
        """Compute out as a call does, then as `silu_mul` does: return its left half, SiLU(gate) * up."""
        if self.out_features % 2:
            raise ValueError(f"out: expected an even width, got {list(out.shape)}")
        self._multiply(x, out, GATED)
        return out[:, : self.out_features // 2]

    def _multiply(self, x: Tensor, out: Tensor, form: int) -> None:
        tokens, x_stride = _matrix("x", x, self.dtype, self.in_features)
        out_dtype = torch.float32 if form == IN_FLOAT32 else self.dtype
        rows, out_stride = _matrix("out", out, out_dtype, self.out_features)
        if rows != tokens:
            raise ValueError(f"out: expected {tokens} rows as in x, got {rows}")
        self._check_usable()
        self._run(self._address, x.data_ptr(), x_stride, tokens, out.data_ptr(), out_stride, form)

    def gather(self, rows: Tensor, out: Tensor) -> None:
        """Copy rows of W (int32 ids, [tokens]) to out [tokens, in_features]."""
        tokens = _vector("rows", rows, torch.int32)
        out_rows, stride = _matrix("out", out, self.dtype, self.in_features)
        if out_rows != tokens:
            raise ValueError(f"out: expected {tokens} rows, one for each id, got {out_rows}")
        self._check_usable()
        size = out.element_size()
        if self._gather(self._address, size, rows.data_ptr(), tokens, out.data_ptr(), stride * size):
            raise ValueError(f"rows: ids must be 0 .. {self.out_features - 1}")

    def _check_rows(self, name: str, first_row: int, tensor: Tensor) -> None:
        if first_row < 0 or first_row + tensor.shape[0] > self.out_features:
            raise ValueError(
                f"{name}: rows {first_row} .. {first_row + tensor.shape[0] - 1} are not among the {self.out_features}"
            )
        if not tensor.is_cpu:
            raise ValueError(f"{name}: expected a tensor on the CPU, got {tensor.device}")
        self._check_usable()

    def _check_usable(self) -> None:
        if not self._usable:
            raise ValueError(f"this linear was made on {self._weight.device} for its size alone; it cannot be used")


class QuantisedLinear(PackedLinear):
    """A Linear whose panels hold the quantised blocks of a GGUF file, see quantised.h."""

    @property
    def scratch_nbytes(self) -> int:
        """Bytes that each thread keeps for an expanded panel."""
        return expanded_bytes(self.in_features, self.dtype.itemsize)

    def load(self, first_row: int, weight: Tensor) -> None:
        """Store uint8 [rows, bytes of a row] at rows first_row .. of W: blocks as they lie in a GGUF file."""
        elements, block_bytes = list(QUANTISED.values())[self._weights.kind - 1]
        row_bytes = self.in_features // elements * block_bytes
        if weight.dtype != torch.uint8 or weight.ndim != 2 or weight.shape[1] != row_bytes:
            raise ValueError(
                f"weight: expected blocks, torch.uint8 [rows, {row_bytes}], got {weight.dtype} {list(weight.shape)}"
            )
        self._check_rows("weight", first_row, weight)
        rows = weight if weight.stride(1) == 1 else weight.contiguous()
        packed, kind = self._weights.weight, self._weights.kind
        self._pack(packed, self.in_features, kind, first_row, rows.shape[0], rows.data_ptr(), rows.stride(0))


class NativeKernels:
    """The Kernels protocol over the compiled library."""

    row_multiple = 1
    panels = True
    gate_in_place = True
    fp8 = None

    def __init__(self, library: Library, name: str, dtype: torch.dtype) -> None:
        """`name` is the code path, one that this CPU can run; `dtype` that of weights and activations."""
        self.name = name
        self.threads = int(library.octavo_threads())
        self.library = library
        self.dtype = dtype
        self.vector_variant = name if name in {"avx2", "plain"} else "avx512"
        """The copy of a kernel to use where it needs neither AMX nor bfloat16 instructions."""
        self._memory = WeightMemory()
        rounds = dtype == torch.bfloat16 and name in {"avx512_bf16", "amx_bf16"}
        suffix = f"{SUFFIXES[dtype]}_{'avx512_bf16' if rounds else self.vector_variant}"
        counts = (c_int64, c_int64)
        self._norm = library.function(f"add_rms_norm_{suffix}", c_char_p, c_void_p, c_float, *counts)
        self._rotate = library.function(
            f"rotate_{suffix}", c_char_p, c_void_p, c_int64, c_void_p, *counts, result=c_int
        )
        self._silu_mul = library.function(f"silu_mul_{suffix}", c_void_p, c_int64, *counts)
        self._largest = library.function(
            f"largest_{self.vector_variant}", c_void_p, c_int64, *counts, c_void_p, c_void_p
        )

    def linear(self, out_features: int, in_features: int, *, bias: bool = False, quantised: str = "") -> PackedLinear:
        """Make a Linear with uninitialised weights; quantised is empty or a key of QUANTISED."""
        if out_features < 1 or in_features < 1:
            raise ValueError(f"a linear needs at least one row and column, got {out_features} x {in_features}")
        variant = self.name if self.dtype == torch.bfloat16 else self.vector_variant
        shape = (out_features, in_features)
        elements = quantised_bytes(*shape, quantised) if quantised else packed_elements(*shape, self.dtype.itemsize)
        weight = self._memory.take(elements, torch.uint8 if quantised else self.dtype)
        make = QuantisedLinear if quantised else PackedLinear
        return make(self.library, variant, weight, shape=shape, dtype=self.dtype, bias=bias, quantised=quantised)

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float, out: Tensor, branch: Tensor | None = None) -> None:
        """Add branch to x if it is given, then write x / sqrt(mean(x^2) + epsilon) * weight to out; see Kernels."""
        shape = x.shape
        tokens, width = shape[0], shape[-1]
        if _vector("weight", weight, self.dtype) != width:
            raise ValueError(f"weight: expected [{width}] as wide as x, got {list(weight.shape)}")
        views = _three_views.pack(
            *_view("x", x, self.dtype, shape),
            *((0, 0, 0, 0) if branch is None else _view("branch", branch, self.dtype, shape)),
            *_view("out", out, self.dtype, shape),
        )
        self._norm(views, weight.data_ptr(), epsilon, tokens, width)

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
        """Apply RoPE in place to q [tokens, heads, head_dim] and k [tokens, kv_heads, head_dim]."""
        tokens = _vector("positions", positions, torch.int32)
        most, head_dim = cos_sin.shape
        if cos_sin.dtype is not torch.float32 or not cos_sin.is_contiguous() or not cos_sin.is_cpu or head_dim % 2:
            raise ValueError("cos_sin: expected contiguous float32 [max_positions, head_dim] on the CPU")
        views = _two_views.pack(
            *_view("q", q, self.dtype, (tokens, q.shape[1], head_dim)),
            *_view("k", k, self.dtype, (tokens, k.shape[1], head_dim)),
        )
        if self._rotate(views, positions.data_ptr(), tokens, cos_sin.data_ptr(), most, head_dim):
            raise ValueError(f"positions: must be 0 .. {most - 1}, the rows of cos_sin")

    def silu_mul(self, gate_up: Tensor, out: Tensor | None = None) -> Tensor:
        """Write SiLU(gate) * up over the gate half of gate_up [tokens, 2 * width], copy it to out; return that."""
        width, odd = divmod(gate_up.shape[-1], 2)
        if odd:
            raise ValueError(f"gate_up: expected an even width, got {list(gate_up.shape)}")
        tokens, stride = _matrix("gate_up", gate_up, self.dtype, 2 * width)
        self._silu_mul(gate_up.data_ptr(), stride, tokens, width)
        gated = gate_up[:, :width]
        return gated if out is None else out.copy_(gated)

    def highest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the id of each row's largest logit, and which rows are not finite; see draw.highest."""
        rows, stride = _matrix("logits", logits, torch.float32, width := logits.shape[-1])
        ids, failed = torch.empty(rows, dtype=torch.int32), torch.empty(rows, dtype=torch.bool)
        self._largest(logits.data_ptr(), stride, rows, width, ids.data_ptr(), failed.data_ptr())
        return ids, failed


def _matrix(name: str, tensor: Tensor, dtype: torch.dtype, width: int) -> tuple[int, int]:
    """Check that tensor is [rows, width] with contiguous rows; return the number of rows and their stride."""
    shape = tensor.shape
    if len(shape) == 2 and shape[1] == width and tensor.dtype is dtype and tensor.is_cpu:
        stride, step = tensor.stride()
        if step == 1:
            return shape[0], stride
    raise _wrong(name, tensor, dtype, f"[rows, {width}]")


def _vector(name: str, tensor: Tensor, dtype: torch.dtype) -> int:
    """Check that tensor is flat and contiguous; return its length."""
    if tensor.ndim != 1 or tensor.dtype is not dtype or not tensor.is_cpu or not tensor.is_contiguous():
        raise _wrong(name, tensor, dtype, "[length]")
    return tensor.shape[0]


def _view(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Check that tensor has this shape, [tokens, width] or [tokens, heads, width]; return the fields of a `View`."""
    if tensor.shape == shape and tensor.dtype is dtype and tensor.is_cpu:
        stride = tensor.stride()
        if stride[-1] == 1:
            if len(stride) == 2:
                return tensor.data_ptr(), stride[0], 0, 1
            if len(stride) == 3:
                return tensor.data_ptr(), stride[0], stride[1], shape[1]
    raise _wrong(name, tensor, dtype, str(list(shape)))


def _wrong(name: str, tensor: Tensor, dtype: torch.dtype, expected: str) -> ValueError:
    return ValueError(
        f"{name}: expected {dtype} {expected} on the CPU, its last dimension contiguous; "
        f"got {tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())} on {tensor.device}"
    )
