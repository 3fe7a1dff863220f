"""A start-up test of batch invariance. Which kernels run depends on the processor: only this machine can tell."""

import torch
from torch import Tensor

from octavo.model.kernels import Linear
from octavo.model.transformer import Transformer

ROWS = 64
ON_GPU = "matrix libraries and attention of a GPU add in orders that depend on the whole step"
SMALLER = (1, 2, 3, 5, 8, 13, 32)
"""Numbers of rows at which matrix libraries are known to change the order of their sums."""


def check_batch_invariance(model: Transformer) -> tuple[bool, str]:
    """Compare, bit for bit, products of a few rows with the same rows among 64, for every shape of matrix in the model.

    Returns whether they agree and one line that says why. Float32 results show differences in the order of additions
    that rounding to bfloat16 would mostly hide.
    """
    generator = torch.Generator().manual_seed(0)
    # Matrices of one shape that take different numbers of bytes are kept, and so multiplied, differently.
    shapes = {(linear.out_features, linear.in_features, linear.nbytes): linear for linear in model.linears()}
    for (outputs, inputs, _), linear in shapes.items():
        x = torch.randn(ROWS, inputs, generator=generator).to(model.dtype).to(model.rope.device)
        together = _product(linear, x)
        for rows in SMALLER:
            computed = -(-rows // model.kernels.row_multiple) * model.kernels.row_multiple
            few = _product(linear, torch.cat((x[-rows:], x[: computed - rows])))
            if not torch.equal(few[:rows], together[-rows:]):
                return False, f"{rows} rows of a {outputs} x {inputs} product differ from the same rows among {ROWS}"
    return True, f"products of {SMALLER[0]} to {SMALLER[-1]} rows equal the same rows among {ROWS}"


def _product(linear: Linear, x: Tensor) -> Tensor:
    out = torch.empty(x.shape[0], linear.out_features, device=x.device)
    linear(x, out=out)
    return out
