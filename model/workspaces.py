"""What attention, sampling and the matrix library work in on a GPU, in bytes. Plain arithmetic: imports no torch.

Everything here is charged to the activations. The memory plan and the attention backend use the same numbers.
"""

from dataclasses import dataclass
from typing import Final, Literal

from octavo.model.arena_layout import padded
from octavo.model.config import ModelConfig

PrefillPath = Literal["fa2", "fa3"]
DecodePath = Literal["fa2", "xqa"]

_MIB: Final = 1 << 20
FLOAT_WORKSPACE: Final = 128 * _MIB
"""Partial results of split attention. Its planner asks for 24 MiB with 256 rows of Llama-3-70B, and for less with
fewer; a model that needs more is given what `workspace_size` says at start-up."""
INT_WORKSPACE: Final = 8 * _MIB
"""The schedule of one wrapper: the size FlashInfer itself allocates."""
PREFILL_LENGTHS: Final = 32_768 * 4
"""Lengths of rows, which the prefill wrapper allocates itself."""
XQA_WORKSPACE: Final = 128 * _MIB
"""XQA's own: its first 8 MiB are semaphores that must stay zero between calls."""
MATRIX_WORKSPACE: Final = 32 * _MIB
"""cuBLAS's, as torch makes it on Hopper: a prediction on other devices."""
SAMPLER_LOGITS: Final = 1 << 22
"""Logits that are sampled at one time on a GPU."""
SAMPLER_BYTES: Final = 40
"""Temporaries per logit while tokens are drawn, at most."""


@dataclass(frozen=True, slots=True)
class Workspaces:
    """How attention is computed on a GPU."""

    prefill: PrefillPath = "fa2"
    decode: DecodePath = "fa2"
    float_bytes: int = FLOAT_WORKSPACE
    fp8_cache: bool = False
    """Whether K and V are kept in 8-bit floats."""

    def attention_bytes(
        self, config: ModelConfig, max_rows: int, max_tokens: int, table_entries: int, element_bytes: int
    ) -> int:
        """What the attention backend allocates for the largest step, but for its block of padding.

        config: the shapes of one device; table_entries: blocks in the tables of all rows together.
        """
        indices = 4 * (2 * max_rows + 1 + table_entries)
        slots = 8 * padded(max_tokens)
        total = self.float_bytes + 2 * INT_WORKSPACE + PREFILL_LENGTHS + indices + slots
        if self.fp8_cache:
            total += padded(max_tokens) * config.kv_width * (element_bytes + 1)
        if self.decode == "xqa":
            queries = max_rows * config.q_width * element_bytes
            total += XQA_WORKSPACE + 4 * (table_entries + max_rows) + queries
        return total

    def library_bytes(self) -> int:
        """What torch allocates for sampling and for products."""
        return SAMPLER_LOGITS * SAMPLER_BYTES + MATRIX_WORKSPACE
