"""Shapes of a model, from a Hugging Face config.json or from GGUF metadata."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How RoPE's frequencies are stretched beyond the trained context.

    kind "linear" divides all of them by factor; "llama3" divides low ones, keeps high ones and blends between
    (Llama 3.1); "factors" divides each by its own entry (GGUF's rope_freqs tensor).
    """

    kind: str
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_context: int = 8192
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A dense Llama-class decoder."""

    architecture: str
    """The Hugging Face class name: LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM or Qwen3ForCausalLM."""
    layers: int
    width: int
    """d_model: numbers in the residual stream of one token."""
    heads: int
    kv_heads: int
    head_dim: int
    ffn_width: int
    vocabulary: int
    """Rows of the embedding and width of the logits."""
    max_context: int
    norm_epsilon: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tied_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    """A bias on W_O (a Llama config with attention_bias)."""
    ffn_bias: bool = False
    """Biases on the feed-forward matrices (a Llama config with mlp_bias)."""
    qk_norm: bool = False
    """RMSNorm over head_dim on q and k before RoPE (Qwen 3)."""
    sliding_window: int | None = None
    """Positions a query may look back, itself included; None sees all."""
    dtype: str = "bfloat16"
    """The checkpoint's own dtype."""
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None

    @property
    def q_width(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key heads together; the values' is the same."""
        return self.kv_heads * self.head_dim
