"""The published shapes of well-known models, in the words of their config.json. Imports no torch."""

from collections.abc import Mapping
from typing import Final


def _llama(layers: int, width: int, heads: int, kv_heads: int, ffn_width: int, **more: object) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn_width,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        **more,
    }


_LLAMA_3_1: Final = {
    "max_position_embeddings": 131072,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}

PUBLISHED: Final[Mapping[str, Mapping[str, object]]] = {
    "llama-2-70b": _llama(
        80, 8192, 64, 8, 28672, vocab_size=32000, max_position_embeddings=4096, rope_theta=10000.0, dtype="float16"
    ),
    "llama-3-8b": _llama(32, 4096, 32, 8, 14336),
    "llama-3-70b": _llama(80, 8192, 64, 8, 28672),
    "llama-3.1-405b": _llama(126, 16384, 128, 8, 53248, **_LLAMA_3_1),
    "mistral-7b": _llama(
        32, 4096, 32, 8, 14336,
        architectures=["MistralForCausalLM"],
        vocab_size=32768, max_position_embeddings=32768, rope_theta=1000000.0, sliding_window=None,
    ),
    "qwen2.5-72b": _llama(
        80, 8192, 64, 8, 29568,
        architectures=["Qwen2ForCausalLM"],
        vocab_size=152064, max_position_embeddings=32768, rms_norm_eps=1e-6, rope_theta=1000000.0,
    ),
    "smollm2": _llama(30, 576, 9, 3, 1536, vocab_size=49152, rope_theta=100000.0, tie_word_embeddings=True),
}  # fmt: skip
"""The instruct versions: of Mistral 7B v0.3, of Qwen 2.5 72B, of SmolLM2 135M."""
