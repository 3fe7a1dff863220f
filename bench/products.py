"""The matrix products of a step, quantised against bfloat16, at several numbers of rows.

    .venv/bin/python bench/products.py                       # the shapes and types of the default model
    .venv/bin/python bench/products.py --rows 1 32 --type Q4_K

Every layer has weights of its own, so they come from memory as they do when serving. The two kinds of weights take
turns, and the best of many repeats counts: other work on the machine only ever adds time. One thread is measured by
its CPU time, several by the clock.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from octavo.model.config import ModelConfig
from octavo.model.kernels import Kernels, Linear
from octavo.model.kernels.load import load_kernels
from octavo.model.kernels.packing import QUANTISED
from octavo.model.weights.configuration import read_config
from octavo.model.weights.locate import locate


def main() -> None:
    arguments = parse_arguments()
    config = read_config(locate(arguments.model))
    kernels = load_kernels(torch.bfloat16, arguments.threads)
    print(
        f"{arguments.model}, kernels {kernels.name}, {arguments.threads} threads, ms: the best of {arguments.repeats}"
    )
    for part, shapes, quantised, out_dtype in (
        ("blocks", block_shapes(config), arguments.type, torch.bfloat16),
        ("LM head", [(config.vocabulary, config.width)], arguments.head_type, torch.float32),
    ):
        wide = [filled(kernels, shape) for shape in shapes]
        packed = [filled(kernels, shape, quantised) for shape in shapes]
        nbytes = [sum(linear.nbytes for linear in linears) / 1e6 for linears in (wide, packed)]
        print(f"{part}: bfloat16 {nbytes[0]:.0f} MB, {quantised} {nbytes[1]:.0f} MB")
        for rows in arguments.rows:
            clock = time.thread_time if arguments.threads == 1 else time.perf_counter
            runs = [products(linears, rows, out_dtype) for linears in (wide, packed)]
            one, other = measure(runs, arguments.repeats, clock)
            print(f"{rows:5d} rows: {1e3 * one:8.2f} {1e3 * other:8.2f} = {other / one:.2f} x", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="whose shapes (default: %(default)s)")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 3, 4, 8, 16, 32, 64, 128, 512])
    parser.add_argument("--type", default="Q4_1", help="of the blocks' matrices (default: %(default)s)")
    parser.add_argument("--head-type", default="Q8_0", help="of the LM head (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=40)
    return parser.parse_args()


def block_shapes(config: ModelConfig) -> list[tuple[int, int]]:
    """Output rows and input columns of all products of all blocks."""
    width, ffn_width = config.width, config.ffn_width
    block = [
        (config.q_width + 2 * config.kv_width, width),
        (width, config.q_width),
        (2 * ffn_width, width),
        (width, ffn_width),
    ]
    return block * config.layers


def filled(kernels: Kernels, shape: tuple[int, int], quantised: str = "") -> Linear:
    """A Linear of zeros that were written, as memory that never was is no memory yet."""
    linear = kernels.linear(*shape, quantised=quantised)
    elements, block_bytes = QUANTISED.get(quantised, (1, 0))
    blocks = torch.zeros(shape[0], shape[1] // elements * block_bytes, dtype=torch.uint8)
    linear.load(0, blocks if quantised else torch.zeros(shape))
    return linear


def products(linears: list[Linear], rows: int, out_dtype: torch.dtype) -> Callable[[], None]:
    """A function that multiplies with each once."""
    operands: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    for linear in linears:
        shape = (linear.out_features, linear.in_features)
        x, out = torch.ones(rows, shape[1], dtype=torch.bfloat16), torch.zeros(rows, shape[0], dtype=out_dtype)
        operands.setdefault(shape, (x, out))

    def run() -> None:
        for linear in linears:
            linear(*operands[linear.out_features, linear.in_features])

    return run


def measure(functions: list[Callable[[], None]], repeats: int, clock: Callable[[], float]) -> list[float]:
    """The least seconds of each, taking turns."""
    best = [float("inf")] * len(functions)
    for _ in range(repeats):
        for index, function in enumerate(functions):
            start = clock()
            function()
            best[index] = min(best[index], clock() - start)
    return best


if __name__ == "__main__":
    main()
