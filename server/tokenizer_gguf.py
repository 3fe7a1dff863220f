"""A tokenizer from a GGUF file's metadata.

The file names the model ("gpt2": byte-level BPE; "llama": SentencePiece) and the pre-tokenizer, but not its rules: the
rules below are those of the tokenizer.json files of the models that carry these names.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from octavo.server.tokenizer import Tokenizer
from octavo.server.vocabulary import TokenizerError

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
"""Token types of the GGUF specification."""

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _TAIL
)


@dataclass(frozen=True, slots=True)
class ByteLevelRules:
    """What a pre-tokenizer's name stands for."""

    split: str | None = None
    """Pattern of the pieces that are merged separately; None: GPT-2's own."""
    single_digits: bool = False
    whole_words: bool = False
    """A piece that is a token is taken as it is, without merging."""
    adds_bos: bool = False
    """Unless the file says otherwise."""
    composes: bool = False
    """Text is brought to Unicode's composed form (NFC) first."""


_GPT2 = ByteLevelRules()
_LLAMA3 = ByteLevelRules(LLAMA3, whole_words=True, adds_bos=True)
_QWEN2 = ByteLevelRules(QWEN2, composes=True)
RULES = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": ByteLevelRules(single_digits=True),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": ByteLevelRules(TEKKEN, whole_words=True, adds_bos=True),
}


def gguf_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer that GGUF metadata describes. Raises TokenizerError."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in {"gpt2", "llama"}:
        raise TokenizerError(f"tokenizer.ggml.model {kind!r} is not supported; supported: 'gpt2', 'llama'")
    rules = _rules(metadata) if kind == "gpt2" else None
    try:
        backend = _byte_level(metadata, rules) if rules is not None else _sentencepiece(metadata)
        _add_special_tokens(backend, metadata)
        bos, *ends = (_special_token(metadata, name) for name in ("bos", "eos", "eot", "eom"))
    except TokenizerError:
        raise
    except Exception as error:  # missing or malformed metadata; `tokenizers` raises nothing more specific
        raise TokenizerError(f"the tokenizer's metadata cannot be used: {type(error).__name__}: {error}") from None
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", rules is None or rules.adds_bos)
    eos = next((token for token in ends if token is not None), None)
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(
        backend,
        bos_token=bos,
        eos_token=eos,
        adds_bos=bool(adds_bos),
        chat_template=template if isinstance(template, str) else None,
    )


def _rules(metadata: Mapping[str, Any]) -> ByteLevelRules:
    name = metadata.get("tokenizer.ggml.pre", "default")
    rules = RULES.get(name)
    if rules is None:
        raise TokenizerError(
            f"pre-tokenizer {name!r} (tokenizer.ggml.pre) is not supported; supported: {', '.join(RULES)}"
        )
    return rules


def _special_token(metadata: Mapping[str, Any], name: str) -> str | None:
    token = metadata.get(f"tokenizer.ggml.{name}_token_id")
    tokens = metadata["tokenizer.ggml.tokens"]
    if token is None:
        return None
    if not 0 <= token < len(tokens):
        raise TokenizerError(f"tokenizer.ggml.{name}_token_id {token} is outside the vocabulary of {len(tokens)}")
    return str(tokens[token])


def _vocabulary(metadata: Mapping[str, Any]) -> dict[str, int]:
    return {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}


def _byte_level(metadata: Mapping[str, Any], rules: ByteLevelRules) -> tokenizers.Tokenizer:
    merges = [(left, right) for left, _, right in (m.partition(" ") for m in metadata["tokenizer.ggml.merges"])]
    backend = tokenizers.Tokenizer(models.BPE(_vocabulary(metadata), merges, ignore_merges=rules.whole_words))
    if rules.composes:
        backend.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if rules.single_digits else []
    if rules.split is not None:
        steps.append(pre_tokenizers.Split(Regex(rules.split), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rules.split is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """SentencePiece BPE as in Llama 2's tokenizer.json: a text is one word, ▁ is a space, rare characters are bytes."""
    unknown = _special_token(metadata, "unknown")
    backend = tokenizers.Tokenizer(
        models.BPE(
            _vocabulary(metadata), _merges_by_score(metadata), unk_token=unknown, fuse_unk=True, byte_fallback=True
        )
    )
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def _merges_by_score(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Merges in order of the score of what they yield, which is the order in which SentencePiece applies them."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    types = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    score_of = {token: score for token, score, kind in zip(tokens, scores, types, strict=True) if kind == NORMAL}
    merges = []
    for token in sorted(score_of, key=lambda token: -score_of[token]):
        for cut in range(len(token) - 1, 0, -1):
            left, right = token[:cut], token[cut:]
            if left in score_of and right in score_of:
                merges.append((left, right))
    return merges


def _add_special_tokens(backend: tokenizers.Tokenizer, metadata: Mapping[str, Any]) -> None:
    """Control tokens are found in a text as a whole and skipped in decoding; user-defined ones are only found whole."""
    kinds = metadata.get("tokenizer.ggml.token_type") or ()
    typed = list(zip(metadata["tokenizer.ggml.tokens"], kinds, strict=bool(kinds)))
    control = [AddedToken(token, normalized=False, special=True) for token, kind in typed if kind == CONTROL]
    backend.add_special_tokens(control)
    backend.add_tokens([AddedToken(token, normalized=False) for token, kind in typed if kind == USER_DEFINED])
