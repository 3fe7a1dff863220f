"""Which keys a config.json may hold.

A key that nobody here knows may change what a model computes or how large it is: whoever ignores it serves another
model than the file describes. So every key is one that is read, one known to change neither, or a reason to refuse.
"""

import difflib

from octavo.model.fields import Fields

READ = frozenset(
    {
        *("architectures", "num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size"),
        *("num_attention_heads", "num_key_value_heads", "head_dim"),
        *("max_position_embeddings", "tie_word_embeddings", "rms_norm_eps"),
        *("hidden_act", "attention_bias", "mlp_bias", "dtype", "torch_dtype", "quantization_config"),
        *("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
        *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "original_max_position_embeddings"),
        *("bos_token_id", "eos_token_id"),
    }
)
"""What `ModelConfig.from_hugging_face` looks up."""
UNUSED = frozenset(
    {
        *("model_type", "transformers_version", "id2label", "label2id", "problem_type", "pad_token_id"),
        *("initializer_range", "attention_dropout", "use_cache", "chunk_size_feed_forward", "pretraining_tp"),
        *("output_attentions", "output_hidden_states", "return_dict"),
    }
)
"""The other attributes of these families' configurations in transformers: labels, and what matters in training only."""
REMARKS = frozenset(
    {
        *("auto_map", "transformers.js_config", "tokenizer_class", "task_specific_params", "finetuning_task"),
        *("max_length", "max_sequence_length", "torchscript", "gradient_checkpointing", "neftune_noise_alpha"),
        *("cls_token_id", "sep_token_id", "unk_token_id", "mask_token_id", "decoder_start_token_id"),
        *("embd_pdrop", "resid_pdrop", "hidden_dropout", "attn_implementation"),
    }
)
"""What earlier versions and other tools have written into published files, without a bearing on a forward pass."""
REMARK_PREFIXES = ("_", "unsloth_")
ONLY = {
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "rope_interleaved": False,
    "use_mrope": False,
    "qk_layer_norms": False,
    "is_llama_config": True,
    "activation": "swiglu",
}
"""Keys of published files that name, with this value, what these families do anyway."""
ROPE = frozenset(
    {
        *("rope_theta", "rope_type", "type", "factor", "low_freq_factor", "high_freq_factor"),
        *("original_max_position_embeddings", "partial_rotary_factor"),
    }
)
"""What is looked up in `rope_parameters` or `rope_scaling`."""


def refuse_unknown_keys(fields: Fields) -> None:
    """Raise CheckpointError for keys of a config.json that could mean anything. null counts as absent."""
    for name, value in ONLY.items():
        if fields.values.get(name) not in (None, value):
            raise fields.error(name, f"is {str(fields.values[name])[:60]!r}; only {str(value).lower()} is supported")
    refuse_others(fields, READ | UNUSED | REMARKS | ONLY.keys())


def refuse_others(fields: Fields, known: frozenset[str]) -> None:
    """The same for the keys of any section, of which some are known."""
    given = (name for name, value in fields.values.items() if value is not None)
    unknown = [name for name in given if name not in known and not name.startswith(REMARK_PREFIXES)]
    if not unknown:
        return
    names = ", ".join(repr(name[:40]) for name in unknown[:3])
    if len(unknown) > 3:
        names += f" and {len(unknown) - 3} more"
    alike = difflib.get_close_matches(unknown[0], known, 1, 0.85)
    hint = f"did you mean {alike[0]}?" if alike else "remove what does not change the model's results"
    raise fields.error("unknown keys" if unknown[1:] else "unknown key", f"{names}; {hint}")
