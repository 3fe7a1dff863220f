"""Which matrices of a checkpoint are computed as one, and in which form each is kept. Imports no torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

from octavo.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class FusedMatrix:
    """Matrices of equal width that lie one below the other, so that one product computes them all."""

    parts: tuple[tuple[str, int], ...]
    """Hugging Face name, without ".weight", and output rows of each."""
    in_features: int
    bias: bool = False

    @property
    def out_features(self) -> int:
        """Output rows of all parts."""
        return sum(rows for _, rows in self.parts)

    def runs(self, quantised: Mapping[str, str]) -> list[tuple[str, int]]:
        """Type and rows of neighbouring parts that are kept alike: a type of quantised blocks, or "" for numbers.

        quantised: type of each tensor that is kept in blocks. A file may well mix types, of q, k and v for example.
        """
        kinds = ((quantised.get(name + ".weight", ""), rows) for name, rows in self.parts)
        return [(kind, sum(rows for _, rows in run)) for kind, run in groupby(kinds, key=lambda part: part[0])]


@dataclass(frozen=True, slots=True)
class BlockMatrices:
    """Of one block, in the order in which they are used."""

    qkv: FusedMatrix
    output: FusedMatrix
    gate_up: FusedMatrix
    down: FusedMatrix

    @classmethod
    def of(cls, config: ModelConfig, layer: int) -> "BlockMatrices":
        """The matrices of block `layer`."""
        attention, feed_forward = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.mlp."
        q, k, v = (attention + name for name in ("q_proj", "k_proj", "v_proj"))
        gate, up = feed_forward + "gate_proj", feed_forward + "up_proj"
        qkv = ((q, config.q_width), (k, config.kv_width), (v, config.kv_width))
        return cls(
            qkv=FusedMatrix(qkv, config.width, config.qkv_bias),
            output=FusedMatrix(((attention + "o_proj", config.width),), config.q_width, config.output_bias),
            gate_up=FusedMatrix(((gate, config.ffn_width), (up, config.ffn_width)), config.width, config.ffn_bias),
            down=FusedMatrix(((feed_forward + "down_proj", config.width),), config.ffn_width, config.ffn_bias),
        )

    def all(self) -> tuple[FusedMatrix, ...]:
        """All four."""
        return self.qkv, self.output, self.gate_up, self.down


def block_matrices(config: ModelConfig) -> Iterator[FusedMatrix]:
    """Those of all blocks."""
    for layer in range(config.layers):
        yield from BlockMatrices.of(config, layer).all()


def vocabulary_matrices(config: ModelConfig) -> tuple[FusedMatrix, ...]:
    """The embedding and, where it is not tied to it, the LM head."""
    names = ("model.embed_tokens",) if config.tied_embeddings else ("model.embed_tokens", "lm_head")
    return tuple(FusedMatrix(((name, config.vocabulary),), config.width) for name in names)


def kept_quantised(config: ModelConfig, *, panels: bool) -> Mapping[str, str]:
    """Types of the tensors that stay in their blocks: only kernels with `panels` can multiply with them."""
    return config.quantised if panels else {}
