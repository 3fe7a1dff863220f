"""Tiny checkpoints with random weights, made by the libraries that made the real ones."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from support import ggml_blocks
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

FAMILIES: dict[str, tuple[type[Any], type[PreTrainedModel]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def tiny_model(
    directory: Path,
    family: str,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    layers: int = 2,
    width: int = 64,
    ffn_width: int = 96,
    vocabulary: int = 128,
    max_context: int = 256,
    tied: bool = False,
    shards: int = 1,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> PreTrainedModel:
    """A transformers model of one of FAMILIES, in eval mode, saved to the directory as safetensors.

    Norm weights and biases are random too, so that a forgotten one shows. More keywords go to the configuration:
    rope_parameters=LLAMA3_ROPE, sliding_window=…, attention_bias=True, eos_token_id=[…].
    """
    config_class, model_class = FAMILIES[family]
    configuration = config_class(
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=ffn_width,
        vocab_size=vocabulary,
        max_position_embeddings=max_context,
        tie_word_embeddings=tied,
        **{"bos_token_id": 1, "eos_token_id": 2, **config},
    )
    generator = torch.Generator().manual_seed(seed)
    model = model_class(configuration).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.1 * noise)
    size = sum(parameter.nbytes for parameter in model.parameters())
    model.save_pretrained(directory, max_shard_size=size if shards == 1 else -(-size // shards))
    return model


def edit_config(directory: Path, **changes: Any) -> None:
    """Change fields of the directory's config.json; a value of ... removes the field."""
    file = directory / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))


COMPRESSED_TENSORS = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
            "output_activations": None,
        }
    },
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
}
"""As llm-compressor writes it for its scheme FP8_DYNAMIC."""
CACHE_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
"""As llm-compressor writes it for a cache that it has calibrated."""


def write_fp8(
    directory: Path,
    model: PreTrainedModel,
    *,
    per_tensor: bool = False,
    quantization: dict[str, Any] = COMPRESSED_TENSORS,
    cache_scales: dict[str, float] | None = None,
) -> dict[str, torch.Tensor]:
    """Save the model with the matrices of its blocks in 8-bit floats, beside bfloat16 scales of rows or of a whole one.

    cache_scales: k_scale and v_scale of the first block, each half as large in the next one.

    Returns the numbers that this means, by name; float32 holds them exactly.
    """
    model.save_pretrained(directory)
    stored, meant = {}, {}
    for name, parameter in model.state_dict().items():
        stored[name] = meant[name] = parameter.contiguous()
        if "_proj.weight" in name:
            largest = parameter.float().abs().amax() if per_tensor else parameter.float().abs().amax(1, keepdim=True)
            scale = (largest / 448).bfloat16()
            stored[name] = (parameter.float() / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
            stored[f"{name}_scale"] = scale
            meant[name] = stored[name].float() * scale.float()
    if model.config.tie_word_embeddings:
        del stored["lm_head.weight"], meant["lm_head.weight"]
    if cache_scales is not None:
        quantization = {**quantization, "kv_cache_scheme": CACHE_SCHEME}
        for layer in range(model.config.num_hidden_layers):
            prefix = f"model.layers.{layer}.self_attn."
            stored |= {prefix + name: torch.tensor([scale / 2**layer]) for name, scale in cache_scales.items()}
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    edit_config(directory, quantization_config=quantization)
    return meant


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """model.layers.3.self_attn.q_proj.weight -> blk.3.attn_q.weight."""
    stem, _, kind = name.rpartition(".")
    prefix = ""
    if stem.startswith("model.layers."):
        _, _, layer, stem = stem.split(".", 3)
        prefix = f"blk.{layer}."
    return f"{prefix}{GGUF_NAMES[stem]}.{kind}"


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of W_Q or W_K (or their bias) as llama.cpp's converter permutes them for its interleaved RoPE."""
    rows = weight.shape[0]
    return weight.reshape(heads, 2, rows // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    file: Path,
    model: PreTrainedModel,
    kind: str = "F32",
    *,
    kinds: dict[str, str] | None = None,
    metadata: dict[str, Any] | None = None,
    rope_factors: list[float] | None = None,
) -> dict[str, np.ndarray]:
    """Write the model as llama.cpp's converter would, matrices in the named type and vectors in F32.

    Returns what should be read back, by Hugging Face name and in its row order: float64, decoded number by number.
    For K-quants, which only llama.cpp itself can make, matrices are random blocks. `kinds` holds other types for
    matrices whose Hugging Face name contains a key, `metadata` further unsigned numbers, such as
    tokenizer.ggml.eot_token_id.
    """
    config = model.config
    architecture = "llama" if config.model_type == "mistral" else config.model_type
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    for key, value in (metadata or {}).items():
        writer.add_uint32(key, value)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(rope_factors, np.float32))
    read_back = {}
    for name, parameter in model.named_parameters():
        values = parameter.detach().float().numpy()
        order = np.arange(len(values))
        for projection, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if architecture == "llama" and projection in name:
                order = interleaved(order, heads)
        own = next((other for part, other in (kinds or {}).items() if part in name), kind)
        stored = own if values.ndim == 2 else "F32"
        data, decoded = _encoded(values[order], stored, seed=len(read_back))
        writer.add_tensor(gguf_name(name), data, raw_dtype=gguf.GGMLQuantizationType[stored])
        read_back[name] = decoded[np.argsort(order)]
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_back


def _encoded(values: np.ndarray, kind: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The stored form of a tensor, and the float64 numbers that it means."""
    if kind in {"Q4_K", "Q6_K"}:
        data = ggml_blocks.random_blocks(*values.shape, kind, seed)
    else:
        data = gguf.quantize(np.ascontiguousarray(values), gguf.GGMLQuantizationType[kind])
    if kind == "BF16":
        return data, (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return data, data.astype(np.float64) if kind in {"F32", "F16"} else ggml_blocks.decode(data, kind)
