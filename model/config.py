"""Shapes of a model, from a Hugging Face config.json or from GGUF metadata."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from octavo.model.config_keys import ROPE, refuse_others, refuse_unknown_keys
from octavo.model.fields import Fields
from octavo.model.quantization import scales_cache, stores_fp8
from octavo.model.weights.errors import CheckpointError

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
GGUF_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""GGUF's "llama" covers Mistral's files too: they differ in nothing but the sliding window, which has its own key."""

# Far above every model of these families, far below what would make a size computed from them absurd.
MAX_LAYERS = 1024
MAX_WIDTH = 1 << 17
MAX_HEADS = 1024
MAX_HEAD_DIM = 1024
MAX_FFN_WIDTH = 1 << 20
MAX_VOCABULARY = 1 << 22
MAX_CONTEXT = 1 << 27


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
    """The checkpoint's own dtype; of a quantised one, what it is widened to."""
    quantised: Mapping[str, str] = field(default_factory=dict, hash=False)
    """GGUF type of every matrix that can be kept in its quantised blocks, by its Hugging Face name."""
    stored_fp8: bool = False
    """Whether the checkpoint has the matrices of the blocks as 8-bit floats, with a scale for each row."""
    cache_scales: bool = False
    """Whether the checkpoint has, for a cache of 8-bit floats, a scale for the K and one for the V of every block."""
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

    def widened(self) -> "ModelConfig":
        """The same model with all weights as numbers."""
        return replace(self, quantised={})

    @classmethod
    def from_hugging_face(cls, config: Mapping[str, object], generation: Mapping[str, object] = {}) -> "ModelConfig":
        """Read config.json and, where there is one, generation_config.json, whose ids of the end of text come first.

        Defaults are those of the architecture's class in transformers. A key that names code to run (auto_map) is not
        looked at, one that is unknown is refused (config_keys.py). Raises CheckpointError.
        """
        fields = Fields(config, "config.json")
        architecture = _hugging_face_architecture(fields)
        refuse_unknown_keys(fields)
        heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
        width = fields.integer("hidden_size", 1, MAX_WIDTH)
        layers = fields.integer("num_hidden_layers", 1, MAX_LAYERS)
        vocabulary = fields.integer("vocab_size", 1, MAX_VOCABULARY)
        max_context = fields.integer("max_position_embeddings", 1, MAX_CONTEXT)
        rope_theta, rope_scaling = _hugging_face_rope(fields, max_context)
        attention_bias = architecture in {"LlamaForCausalLM", "Qwen3ForCausalLM"} and fields.flag(
            "attention_bias", default=False
        )
        ends = Fields(generation, "generation_config.json").token_ids("eos_token_id", vocabulary)
        ends += fields.token_ids("eos_token_id", vocabulary)
        return cls(
            architecture=architecture,
            layers=layers,
            width=width,
            heads=heads,
            kv_heads=_kv_heads(fields, "num_key_value_heads", heads),
            head_dim=_head_dim(fields, "head_dim", width, heads, default=128 if "Qwen3" in architecture else None),
            ffn_width=fields.integer("intermediate_size", 1, MAX_FFN_WIDTH),
            vocabulary=vocabulary,
            max_context=max_context,
            norm_epsilon=fields.number("rms_norm_eps", 0.0, 0.1, 1e-6),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            tied_embeddings=fields.flag("tie_word_embeddings", default=False),
            qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
            output_bias=attention_bias,
            ffn_bias=architecture == "LlamaForCausalLM" and fields.flag("mlp_bias", default=False),
            qk_norm=architecture == "Qwen3ForCausalLM",
            sliding_window=_hugging_face_window(fields, architecture, layers),
            dtype=_hugging_face_dtype(fields),
            stored_fp8=stores_fp8(fields),
            cache_scales=scales_cache(fields),
            eos_ids=tuple(dict.fromkeys(ends)),
            bos_id=next(iter(fields.token_ids("bos_token_id", vocabulary)), None),
        )

    @classmethod
    def from_gguf(
        cls,
        metadata: Mapping[str, object],
        shapes: Mapping[str, tuple[int, ...]],
        dtype: str = "bfloat16",
        rope_factors: Sequence[float] = (),
    ) -> "ModelConfig":
        """Read the metadata of a GGUF file, the names and shapes of its tensors (rows first), and rope_freqs.weight.

        Which biases exist and whether the head is tied is told by which tensors are there. Raises CheckpointError.
        """
        fields = Fields(metadata, "GGUF metadata")
        name = _gguf_architecture(fields)
        heads = fields.integer(f"{name}.attention.head_count", 1, MAX_HEADS)
        width = fields.integer(f"{name}.embedding_length", 1, MAX_WIDTH)
        head_dim = _head_dim(fields, f"{name}.attention.key_length", width, heads)
        for same in (f"{name}.attention.value_length", f"{name}.rope.dimension_count"):
            if fields.integer(same, 1, MAX_HEAD_DIM, head_dim) != head_dim:
                raise fields.error(same, f"differs from the key's head size {head_dim}, which is not supported")
        if "token_embd.weight" not in shapes:
            raise CheckpointError("GGUF: tensor token_embd.weight is missing")
        vocabulary = shapes["token_embd.weight"][0]
        ends = [fields.token_ids(f"tokenizer.ggml.{end}_token_id", vocabulary) for end in ("eos", "eot", "eom")]
        return cls(
            architecture=GGUF_ARCHITECTURES[name],
            layers=fields.integer(f"{name}.block_count", 1, MAX_LAYERS),
            width=width,
            heads=heads,
            kv_heads=_kv_heads(fields, f"{name}.attention.head_count_kv", heads),
            head_dim=head_dim,
            ffn_width=fields.integer(f"{name}.feed_forward_length", 1, MAX_FFN_WIDTH),
            vocabulary=vocabulary,
            max_context=fields.integer(f"{name}.context_length", 1, MAX_CONTEXT),
            norm_epsilon=_rounded(fields.number(f"{name}.attention.layer_norm_rms_epsilon", 0.0, 0.1)),
            rope_theta=_rounded(fields.number(f"{name}.rope.freq_base", 1.0, 1e12, 10000.0)),
            rope_scaling=_gguf_rope_scaling(fields, name, head_dim, rope_factors),
            tied_embeddings="output.weight" not in shapes,
            qkv_bias="blk.0.attn_q.bias" in shapes,
            output_bias="blk.0.attn_output.bias" in shapes,
            ffn_bias="blk.0.ffn_down.bias" in shapes,
            qk_norm=name == "qwen3",
            sliding_window=fields.integer(f"{name}.attention.sliding_window", 0, MAX_CONTEXT, 0) or None,
            dtype=dtype,
            eos_ids=tuple(dict.fromkeys(sum(ends, ()))),
            bos_id=next(iter(fields.token_ids("tokenizer.ggml.bos_token_id", vocabulary)), None),
        )


def _hugging_face_architecture(fields: Fields) -> str:
    names = fields.texts("architectures")
    if not names or names[0] not in SUPPORTED_ARCHITECTURES:
        found = repr(names[0])[:80] if names else "missing"
        raise fields.error("architectures", f"is {found}; supported: {', '.join(SUPPORTED_ARCHITECTURES)}")
    if fields.text("hidden_act", "silu") != "silu":
        raise fields.error("hidden_act", "is not supported; only silu is")
    return names[0]


def _gguf_architecture(fields: Fields) -> str:
    name = fields.text("general.architecture")
    if name not in GGUF_ARCHITECTURES:
        raise fields.error("general.architecture", f"is {name[:80]!r}; supported: {', '.join(GGUF_ARCHITECTURES)}")
    if fields.integer(f"{name}.expert_count", 0, MAX_WIDTH, 0) > 0:
        raise fields.error(f"{name}.expert_count", "is not 0; mixtures of experts are not supported")
    if fields.integer("split.count", 0, 1 << 16, 1) > 1:
        raise fields.error("split.count", "is above 1; merge the parts with `llama-gguf-split --merge`")
    return name


def _kv_heads(fields: Fields, name: str, heads: int) -> int:
    kv_heads = fields.integer(name, 1, heads, heads)
    if heads % kv_heads:
        raise fields.error(name, f"is {kv_heads}, of which {heads} attention heads are not a multiple")
    return kv_heads


def _head_dim(fields: Fields, name: str, width: int, heads: int, default: int | None = None) -> int:
    if default is None and fields.values.get(name) is None and width % heads:
        raise fields.error(name, f"is missing, and {heads} heads do not divide the width of {width}")
    head_dim = fields.integer(name, 2, MAX_HEAD_DIM, default or width // heads)
    if head_dim % 2:
        raise fields.error(name, f"is {head_dim}; RoPE needs an even number")
    return head_dim


def _hugging_face_rope(fields: Fields, max_context: int) -> tuple[float, RopeScaling | None]:
    """Theta and scaling: `rope_parameters` of transformers 5, or top-level `rope_theta` and `rope_scaling` before."""
    rope = fields.section("rope_parameters") or fields.section("rope_scaling") or Fields({}, fields.source)
    theta = rope.number("rope_theta", 1.0, 1e12, fields.number("rope_theta", 1.0, 1e12, 10000.0))
    for part in (fields, rope):
        if part.number("partial_rotary_factor", 0.0, 1.0, 1.0) != 1.0:
            raise part.error("partial_rotary_factor", "is not supported")
    if any(isinstance(value, Mapping) for value in rope.values.values()):
        raise CheckpointError(f"{rope.source} differs between layers, which is not supported")
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind not in {"default", "linear", "llama3"}:
        raise rope.error("rope_type", f"is {kind[:80]!r}; supported: default, linear, llama3")
    refuse_others(rope, ROPE)
    if kind == "default":
        return theta, None
    factor = rope.number("factor", 1.0, 1e6)
    if kind == "linear":
        return theta, RopeScaling("linear", factor)
    low, high = rope.number("low_freq_factor", 1e-6, 1e6), rope.number("high_freq_factor", 1e-6, 1e6)
    if low >= high:
        raise rope.error("low_freq_factor", "is not below high_freq_factor")
    field = "original_max_position_embeddings"
    original = fields.integer(field, 1, MAX_CONTEXT, rope.integer(field, 1, MAX_CONTEXT, max_context))
    return theta, RopeScaling("llama3", factor, low, high, original)


def _gguf_rope_scaling(fields: Fields, name: str, head_dim: int, factors: Sequence[float]) -> RopeScaling | None:
    kind = fields.text(f"{name}.rope.scaling.type", "none")
    if kind not in {"none", "linear"}:
        raise fields.error(f"{name}.rope.scaling.type", f"is {kind[:80]!r}; supported: none, linear")
    factor = fields.number(f"{name}.rope.scaling.factor", 1.0, 1e6) if kind == "linear" else 1.0
    if not factors:
        return RopeScaling("linear", factor) if kind == "linear" else None
    if len(factors) != head_dim // 2 or not all(1e-6 <= entry <= 1e6 for entry in factors):
        raise CheckpointError(f"GGUF: rope_freqs.weight must hold {head_dim // 2} positive numbers")
    return RopeScaling("factors", factors=tuple(factor * entry for entry in factors))


def _hugging_face_window(fields: Fields, architecture: str, layers: int) -> int | None:
    """The sliding window, the same in every layer or none in any."""
    if architecture == "LlamaForCausalLM":
        return None
    if architecture == "MistralForCausalLM":
        return _optional_window(fields)
    if not fields.flag("use_sliding_window", default=False) or (window := _optional_window(fields)) is None:
        return None
    # Layers below max_window_layers see everything; layer_types, where it is written out, has the last word.
    full_layers = fields.integer("max_window_layers", 0, 1 << 31, 28)
    kinds = set(fields.texts("layer_types")) or {
        "full_attention" if layer < full_layers else "sliding_attention" for layer in range(layers)
    }
    if kinds == {"full_attention"}:
        return None
    if kinds != {"sliding_attention"}:
        raise fields.error("sliding_window", "differs between layers (max_window_layers), which is not supported")
    return window


def _optional_window(fields: Fields) -> int | None:
    """sliding_window, where null means none and absence means the default of transformers."""
    if "sliding_window" in fields.values and fields.values["sliding_window"] is None:
        return None
    return fields.integer("sliding_window", 1, MAX_CONTEXT, 4096)


def _hugging_face_dtype(fields: Fields) -> str:
    dtype = fields.text("dtype", fields.text("torch_dtype", "bfloat16"))
    if dtype not in {"float32", "float16", "bfloat16"}:
        raise fields.error("dtype", f"is {dtype[:80]!r}; supported: float32, float16, bfloat16")
    return dtype


def _rounded(value: float) -> float:
    """A float32's decimal meaning: GGUF stores 1e-05 as 9.99999974e-06."""
    return float(f"{value:.7g}")
