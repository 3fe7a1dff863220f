"""What `octavo describe` says of a model: its block as a table, its parameters, and what a token costs in the cache."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.kvcache.layout import KVLayout
from octavo.model.config import ModelConfig
from octavo.model.memory import block_norms, kv_layout
from octavo.model.roofline import block_parameters
from octavo.model.weights.headers import parameters

if TYPE_CHECKING:
    from octavo.model.trace import Trace


@dataclass(frozen=True, slots=True)
class Matrix:
    """One matrix of a block, as it is drawn: inputs x outputs."""

    name: str
    inputs: int
    outputs: int
    receives: str
    produces: str

    @property
    def parameters(self) -> int:
        """Its numbers, without a bias."""
        return self.inputs * self.outputs


def matrices(config: ModelConfig) -> tuple[Matrix, ...]:
    """The seven matrices of a block, in the order in which they are used."""
    width, q_width, kv_width, ffn_width = config.width, config.q_width, config.kv_width, config.ffn_width
    query, shared = f"{config.heads} heads x {config.head_dim}", f"{config.kv_heads} heads x {config.head_dim}"
    return (
        Matrix("W_Q", width, q_width, "norm(x)", f"q: {query}"),
        Matrix("W_K", width, kv_width, "norm(x)", f"k: {shared}"),
        Matrix("W_V", width, kv_width, "norm(x)", f"v: {shared}"),
        Matrix("W_O", q_width, width, f"outputs of {config.heads} heads, concatenated", "added to x, giving x'"),
        Matrix("W_gate", width, ffn_width, "norm(x')", "gate"),
        Matrix("W_up", width, ffn_width, "norm(x')", "up"),
        Matrix("W_down", ffn_width, width, "SiLU(gate) * up", "added to x'"),
    )


def attention_parameters(config: ModelConfig) -> int:
    """Numbers in a block's four matrices of attention."""
    return sum(matrix.parameters for matrix in matrices(config)[:4])


def saved_by_sharing(config: ModelConfig) -> int:
    """Parameters that a block saves because several query heads share each head of k and v."""
    return 2 * config.width * (config.q_width - config.kv_width)


def describe(config: ModelConfig, element_bytes: int) -> Iterator[str]:
    """Lines for a terminal. element_bytes: of a number in the cache."""
    total = block_parameters(config)
    yield f"{config.architecture}: {config.layers} blocks around a spine of {config.width:,} numbers a token"
    yield "x += attention_branch(norm(x)), then x' += feed_forward_branch(norm(x'))"
    yield ""
    rows: list[tuple[str, ...]] = [("matrix", "shape", "receives", "produces", "parameters", "share")]
    rows += [
        (
            *(matrix.name, f"{matrix.inputs:,} x {matrix.outputs:,}", matrix.receives, matrix.produces),
            *(f"{matrix.parameters:,}", f"{matrix.parameters / total:.1%}"),
        )
        for matrix in matrices(config)
    ]
    yield from table(rows)
    yield ""
    attention, head_norms = attention_parameters(config), ", and those of q's and k's heads" if config.qk_norm else ""
    yield _line("attention", attention, f"{attention / total:.1%} of the block's matrices")
    yield _line("feed-forward", total - attention, f"{(total - attention) / total:.1%}")
    yield _line("one block, matrices", total)
    yield _line("one block, norms", block_norms(config), f"the norms before the branches{head_norms}")
    yield _line("all blocks, matrices", config.layers * total)
    yield _line("embedding", config.vocabulary * config.width, "also the LM head" if config.tied_embeddings else "")
    if not config.tied_embeddings:
        yield _line("LM head", config.vocabulary * config.width)
    yield _line("whole model", parameters(config), "with every norm and bias")
    yield ""
    yield from _cache_lines(config, kv_layout(config, 16, element_bytes))


def _cache_lines(config: ModelConfig, layout: KVLayout) -> Iterator[str]:
    yield _line("KV of a token, a layer", layout.token_layer_bytes, "bytes")
    yield _line("KV of a token, in all", layout.token_bytes, "bytes")
    if config.kv_heads == config.heads:
        yield "every query head has its own k and v (multi-head attention)"
        return
    group = config.heads // config.kv_heads
    yield f"{group} query heads share each head of k and v (grouped-query attention); if each had its own:"
    yield _line("KV of a token, a layer", group * layout.token_layer_bytes, "bytes")
    yield _line("KV of a token, in all", group * layout.token_bytes, "bytes")
    yield _line("parameters saved a block", saved_by_sharing(config))
    yield _line("parameters saved in all", config.layers * saved_by_sharing(config))


def describe_trace(found: "Trace", tokens: int) -> Iterator[str]:
    """Lines for a terminal."""
    yield "The residual stream, or spine: one vector a token, to which every block adds two. Their lengths (Euclidean"
    yield f"norms), each a mean over {tokens} tokens: what a block's branches add, and the spine after both."
    rows: list[tuple[str, ...]] = [("block", "attention adds", "feed-forward adds", "spine after")]
    rows += [("embedding", "", "", f"{found.embedding:.4g}")]
    rows += [(str(index), *(f"{size:.4g}" for size in block)) for index, block in enumerate(found.blocks)]
    yield from table(rows)
    yield f"final spine = embedding + {2 * len(found.blocks)} contributions, within {found.largest_error:.2g}"


def table(rows: list[tuple[str, ...]]) -> Iterator[str]:
    """Columns as wide as their widest entry; the first row is the heading. Numbers are set to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (
            cell.rjust(width) if rows[1:] and _is_number(rows[-1][index]) else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()


def _is_number(cell: str) -> bool:
    return cell[:1].isdigit() and " " not in cell


def _line(name: str, value: int, remark: str = "") -> str:
    return f"{name:<26}{value:>18,}  {remark}".rstrip()
