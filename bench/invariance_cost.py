"""What batch invariance costs: the kernels that serve beside torch's, whose results may depend on the batch.

    .venv/bin/python bench/invariance_cost.py

All products of a step of the default model in bfloat16, every layer with weights of its own, and the attention of its
layers: once with the kernels that serve, whose bits for a row do not depend on the other rows, and once with
torch.nn.functional.linear (oneDNN) and scaled_dot_product_attention, which choose blocking and order of summation by
the shape of the batch. They take turns; the best of many repeats counts, by the clock. The cost of invariance is what
the first is slower by, if it is.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from products import block_shapes, filled, measure, products
from torch.nn.functional import linear, scaled_dot_product_attention

from octavo.kvcache.store import KVStore
from octavo.model.attention import AttentionBatch
from octavo.model.attention.cpu import CpuAttention
from octavo.model.config import ModelConfig
from octavo.model.kernels.cores import available_cores
from octavo.model.kernels.load import load_kernels
from octavo.model.kernels.native import NativeKernels
from octavo.model.memory import kv_layout
from octavo.model.weights.configuration import read_config
from octavo.model.weights.locate import locate

BLOCK = 16
BFLOAT16 = torch.bfloat16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=available_cores())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    config = read_config(locate("smollm2"))
    kernels = load_kernels(BFLOAT16, arguments.threads)
    if not isinstance(kernels, NativeKernels):
        raise SystemExit("there are no compiled kernels here to compare")
    print(f"kernels {kernels.name}, {arguments.threads} threads, ms: invariant, torch, ratio")
    shapes = block_shapes(config)
    ours = [filled(kernels, shape) for shape in shapes]
    theirs = [torch.randn(shape).to(BFLOAT16) for shape in shapes]
    for rows in (1, 8, 32, 128, 512):
        inputs = {width: torch.randn(rows, width).to(BFLOAT16) for width in {shape[1] for shape in shapes}}
        other = [(inputs[weight.shape[1]], weight) for weight in theirs]
        report(f"products, {rows} rows", (products(ours, rows), partial(run, linear, other)), arguments.repeats)
    for name, rows, context, count in (
        ("32 decodes behind 192", 32, 192, 1),
        ("4 decodes behind 1,500", 4, 1500, 1),
        ("a prompt of 512", 1, 0, 512),
        ("128 tokens behind 1,300", 1, 1300, 128),
    ):
        report(f"attention, {name}", attentions(config, kernels, rows, context, count), arguments.repeats)


def run(function: Callable[..., torch.Tensor], calls: list[tuple[torch.Tensor, ...]]) -> None:
    for operands in calls:
        function(*operands)


def attentions(
    config: ModelConfig, kernels: NativeKernels, rows: int, context: int, count: int
) -> tuple[Callable[[], None], Callable[[], None]]:
    """The attention of all layers for `rows` requests that compute `count` tokens behind `context` others.

    torch is given its keys and values as it likes them best: contiguous, one batch of equally long requests.
    """
    length = context + count
    blocks = -(-length // BLOCK)
    layout = kv_layout(config, BLOCK, BFLOAT16.itemsize)
    store = KVStore(layout, rows * blocks, BFLOAT16, torch.device("cpu"))
    store.data.fill_(0.5)
    attention = CpuAttention(config, store, kernels.library, kernels.name)

    def ints(values: range | list[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int32)

    slots = [row * blocks * BLOCK + position for row in range(rows) for position in range(context, length)]
    attention.plan(
        AttentionBatch(
            query_indptr=ints(range(0, rows * count + 1, count)),
            kv_lengths=ints([length] * rows),
            block_indptr=ints(range(0, rows * blocks + 1, blocks)),
            block_indices=ints(range(rows * blocks)),
            last_block_len=ints([(length - 1) % BLOCK + 1] * rows),
            slots=ints(slots),
        )
    )
    tokens, kv = rows * count, (config.kv_heads, config.head_dim)
    q = torch.randn(tokens, config.heads, config.head_dim).to(BFLOAT16)
    k, v = (torch.randn(tokens, *kv).to(BFLOAT16) for _ in range(2))
    out = torch.empty_like(q)
    queries = torch.randn(rows, config.heads, count, config.head_dim).to(BFLOAT16)
    cache = torch.randn(config.layers, 2, rows, config.kv_heads, length, config.head_dim).to(BFLOAT16)
    mask = torch.ones(count, length, dtype=torch.bool).tril(context)

    def ours() -> None:
        for layer in range(config.layers):
            attention.forward(layer, q, k, v, out)

    def theirs() -> None:
        for keys, values in cache:
            scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)

    return ours, theirs


def report(name: str, functions: tuple[Callable[[], None], Callable[[], None]], repeats: int) -> None:
    """Measure both in turn and print one line."""
    ours, theirs = measure(list(functions), repeats, time.perf_counter)
    print(f"  {name:36} {1e3 * ours:8.2f} {1e3 * theirs:8.2f}   {ours / theirs:.2f}", flush=True)


if __name__ == "__main__":
    main()
