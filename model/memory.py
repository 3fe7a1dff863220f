"""What a model takes in memory, from its shapes alone: nothing is loaded, and no torch is imported.

The server allocates what these functions say, so its ledger equals a plan made elsewhere to the byte.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from octavo.kvcache.layout import KVLayout
from octavo.kvcache.ledger import MemoryPlan
from octavo.model.arena_layout import StepShape, arena_layout, padded
from octavo.model.config import ModelConfig
from octavo.model.kernels.packing import expanded_bytes, packed_elements, quantised_bytes
from octavo.model.matrices import FusedMatrix, block_matrices, kept_quantised, vocabulary_matrices
from octavo.model.weights.errors import CheckpointError
from octavo.model.workspaces import Workspaces

_FLOAT32 = 4
_INT32 = 4


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """What a runner is built for. All of its memory follows from these numbers and the model's shapes."""

    max_model_len: int
    """Prompt and output of one request, in tokens."""
    max_rows: int
    """Rows of a step, and so requests that run at one time."""
    max_tokens: int
    """Tokens of a step."""
    block_size: int
    """Positions in a block of the cache."""
    blocks: int
    """Blocks in the pool."""

    @property
    def table_entries(self) -> int:
        """Blocks in the tables of all slots together, shared ones counted as often as they occur."""
        return self.max_rows * -(-self.max_model_len // self.block_size)

    @property
    def slot_bytes(self) -> int:
        """Token ids kept on the device: an int32 for every position of every slot, and one for the last sample."""
        return _INT32 * self.max_rows * (self.max_model_len + 1)

    def mask_bytes(self, vocabulary: int) -> int:
        """Token masks of all slots, and a byte for every token of the one that is being applied."""
        return (self.max_rows + 8) * mask_width(vocabulary)


@dataclass(frozen=True, slots=True)
class Formats:
    """How a device keeps numbers, in bytes for each, and how a model is divided among devices."""

    activations: int
    """Also norms, biases, the embedding and the LM head."""
    matrices: int
    """Of the blocks. 1 is an 8-bit float, with a float32 scale for every output row."""
    cache: int
    panels: bool = False
    """Whether matrices are padded to the panels of the compiled kernels (`Kernels.panels`)."""
    threads: int = 1
    """How many compute; each expands panels of quantised weights in memory of its own."""
    ranks: int = 1
    """Degree of tensor parallelism: devices that share one model."""
    gate_in_place: bool = True
    """Whether SiLU(gate) * up overwrites the gate (`Kernels.gate_in_place`)."""
    workspaces: Workspaces | None = None
    """What libraries are given to work in on a GPU; None on a CPU."""


def plan_memory(config: ModelConfig, formats: Formats, limits: RunnerLimits, budget: int) -> MemoryPlan:
    """Plan the three buckets of one device.

    Before the number of blocks is decided, a plan with none of them tells how much of a budget is taken
    (`MemoryPlan.fixed`).
    """
    return MemoryPlan(
        weights=weights_bytes(config, formats),
        activations=sum(activation_lines(config, formats, limits).values()),
        block_bytes=kv_layout(rank_shape(config, formats.ranks), limits.block_size, formats.cache).block_bytes,
        blocks=limits.blocks,
        budget=budget,
    )


def activation_lines(config: ModelConfig, formats: Formats, limits: RunnerLimits) -> dict[str, int]:
    """The parts of the activations' bucket, in bytes.

    With tensor parallelism every rank computes its share of the logits in its arena and gathers all of them beside it;
    on a CPU also what each rank adds to the spine.
    """
    rank = rank_shape(config, formats.ranks)
    lines = {
        "arena": arena_layout(largest_step(rank, formats, limits)).bytes,
        "token ids of all slots": limits.slot_bytes,
        "token masks of all slots": limits.mask_bytes(config.vocabulary),
        "RoPE table": rope_bytes(config, limits.max_model_len),
    }
    if widest := max(_quantised_widths(config, formats), default=0):
        lines["expanded panels"] = formats.threads * expanded_bytes(widest, formats.activations)
    if formats.ranks > 1:
        lines["gathered logits"] = _FLOAT32 * padded(limits.max_rows) * config.vocabulary
        if formats.workspaces is None:  # a GPU adds in place
            lines["products of ranks"] = _FLOAT32 * (formats.ranks + 1) * padded(limits.max_tokens) * config.width
    if formats.workspaces is not None:
        layout = kv_layout(rank, limits.block_size, formats.cache)
        attention = formats.workspaces.attention_bytes(
            rank, limits.max_rows, limits.max_tokens, limits.table_entries, formats.activations
        )
        lines["workspaces"] = attention + layout.block_bytes + formats.workspaces.library_bytes()
    return lines


def largest_step(config: ModelConfig, formats: Formats, limits: RunnerLimits) -> StepShape:
    """The step that the arena is made for. config: the shapes of one rank."""
    return StepShape(
        config,
        limits.max_tokens,
        limits.max_rows,
        formats.activations,
        formats.ranks,
        gate_in_place=formats.gate_in_place,
        fp8=formats.matrices == 1,
    )


def mask_width(vocabulary: int) -> int:
    """Bytes of a mask with one bit a token, in whole words of 32 bits."""
    return 4 * -(-vocabulary // 32)


def rope_bytes(config: ModelConfig, positions: int) -> int:
    """Cosines and sines of all positions, float32 [positions, head_dim]."""
    return _FLOAT32 * positions * config.head_dim


def kv_layout(config: ModelConfig, block_size: int, element_bytes: int) -> KVLayout:
    """Shape of the cache of a model."""
    return KVLayout(config.layers, config.kv_heads, config.head_dim, block_size, element_bytes)


def rank_shape(config: ModelConfig, ranks: int) -> ModelConfig:
    """The shapes of one rank of a model that is divided by Megatron's scheme (Shoeybi et al., 2019).

    Each has its heads, its columns of gate, up and down, and its rows of the vocabulary, the last rank's padded; the
    spine and the norms are whole on all. Raises CheckpointError where the heads or the columns do not divide.
    """
    for name, count in (("attention heads", config.heads), ("KV heads", config.kv_heads), ("FFN", config.ffn_width)):
        if count % ranks:
            what = f"the FFN width of {count}" if name == "FFN" else f"{count} {name}"
            raise CheckpointError(f"{what} cannot be divided among {ranks} devices: choose a number that divides it")
    return replace(
        config,
        heads=config.heads // ranks,
        kv_heads=config.kv_heads // ranks,
        ffn_width=config.ffn_width // ranks,
        vocabulary=-(-config.vocabulary // ranks),
    )


def weights_bytes(config: ModelConfig, formats: Formats) -> int:
    """Bytes of one rank's matrices as they are stored, biases and norms. Tied embeddings count once."""
    rank = rank_shape(config, formats.ranks)
    quantised = kept_quantised(rank, panels=formats.panels)
    tables = sum(_matrix_bytes(table, formats, quantised, formats.activations) for table in vocabulary_matrices(rank))
    blocks = sum(_matrix_bytes(matrix, formats, quantised, formats.matrices) for matrix in block_matrices(rank))
    norms = rank.layers * block_norms(config) + config.width
    return tables + blocks + norms * formats.activations


def block_norms(config: ModelConfig) -> int:
    """Parameters in the norms of a block."""
    return 2 * config.width + 2 * config.head_dim * config.qk_norm


def _quantised_widths(config: ModelConfig, formats: Formats) -> Iterator[int]:
    """Input columns of the matrices that stay in their blocks."""
    quantised = kept_quantised(config, panels=formats.panels)
    if not quantised:
        return
    for matrix in (*vocabulary_matrices(config), *block_matrices(config)):
        if any(kind for kind, _ in matrix.runs(quantised)):
            yield matrix.in_features


def _matrix_bytes(matrix: FusedMatrix, formats: Formats, quantised: Mapping[str, str], element_bytes: int) -> int:
    """Bytes of a matrix and its bias; element_bytes: of its numbers, where it is not quantised."""
    size = matrix.bias * matrix.out_features * formats.activations
    for kind, rows in matrix.runs(quantised):
        if kind:
            size += quantised_bytes(rows, matrix.in_features, kind)
        else:
            size += _numbers_bytes(rows, matrix.in_features, element_bytes, panels=formats.panels)
    return size


def _numbers_bytes(rows: int, columns: int, element_bytes: int, *, panels: bool) -> int:
    elements = packed_elements(rows, columns, element_bytes) if panels else rows * columns
    return elements * element_bytes + (_FLOAT32 * rows if element_bytes == 1 else 0)
