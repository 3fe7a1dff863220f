"""Tokenizers to test with: SmolLM2's, small trained ones, and a slow, plain BPE to compare with."""

# ruff: noqa: RUF001 - characters that look like others are what these texts are for

import json
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from octavo.model.weights.locate import locate
from octavo.server.tokenizer import Tokenizer
from octavo.server.tokenizer_files import load_tokenizer
from octavo.server.vocabulary import BYTE_OF

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog said: don't!",
    "def area(radius):\n    return 3.14159 * radius ** 2\n\n\nprint(area(10), area(2024))",
    "Il était une fois, à l'orée du bois, un café très étrange où l'on ne servait que du thé.",
    "今日は良い天気ですね。你好，世界！我们在2024年见面。",
    "Привет, мир! Сколько будет 123456 + 654321?\r\n\r\n\tTabs and    runs   of spaces.",
    "HelloWorld camelCase SCREAMING_SNAKE kebab-case I'LL you'RE THEY'D we've",
]

TEXTS = [
    *CORPUS,
    "",
    " ",
    "   leading and trailing   ",
    "1 22 333 4444 55555 1234567890 x86 3.14159",
    "“Curly” ‘quotes’ — and 'straight' ones; it's, we'll, I'M",
    "emoji 🌶\ufe0f and family 👨\u200d👩\u200d👧\u200d👦 and flag 🇨🇿 and skin 👍🏽",
    "combining: e\u0301 n\u0303 a\u030a\u0323 and \u1e69 and हिन्दी தமிழ்",
    "a\nb\n\nc\r\nd\t\te\n\n\n\nf",
    "for (int i = 0; i < 10; ++i) {\n\treturn a[i] ? 'x' : \"y\";\n}",
    "x" + " " * 40 + "y" + "\n" * 20 + "z",
    "zero\u200bwidth \u00a0no-break \u3000ideographic",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 ﬁ Ⅷ ½ ² ٣",
]


@cache
def smollm2() -> Tokenizer:
    return load_tokenizer(locate("smollm2"))


@cache
def smollm2_reference() -> Any:
    """Transformers' tokenizer of the same GGUF file."""
    from transformers import AutoTokenizer

    path = locate("smollm2")
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@cache
def trained_merges() -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Tokens and merges of a byte-level BPE trained across words, digits and lines, so that any splitting shows."""
    trainer = trainers.BpeTrainer(
        vocab_size=1200, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), max_token_length=12
    )
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.train_from_iterator([*CORPUS * 4, *TEXTS * 2], trainer)
    tokens, merges = model_of(backend)
    return tokens, merges


def model_of(backend: tokenizers.Tokenizer) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Tokens in order of their ids, and merges in order of their ranks."""
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return tuple(tokens), tuple((left, right) for left, right in model["merges"])


@cache
def byte_level_backend() -> tokenizers.Tokenizer:
    """The trained byte-level BPE with three special tokens and three plain added ones."""
    tokens, merges = trained_merges()
    backend = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in ("<s>", "</s>", "<|turn|>")])
    backend.add_tokens([AddedToken(token, normalized=False) for token in ("<think>", "日本", "two words")])
    return backend


@cache
def byte_level() -> Tokenizer:
    own = tokenizers.Tokenizer.from_str(byte_level_backend().to_str())
    return Tokenizer(own, bos_token="<s>", eos_token="</s>", adds_bos=True)


@cache
def sentencepiece_metadata() -> dict[str, Any]:
    """GGUF metadata of a small vocabulary in the manner of Llama 2's: scores fall with the rank."""
    trainer = trainers.BpeTrainer(vocab_size=500, show_progress=False, max_token_length=8)
    backend = tokenizers.Tokenizer(models.BPE())
    words = [word for line in CORPUS for word in line.replace("\n", " ").split(" ") if word.isascii()]
    backend.train_from_iterator([["▁" + word for word in words]] * 4, trainer)
    learned, _ = model_of(backend)
    characters = [token for token in learned if len(token) == 1]
    pieces = [token for token in learned if len(token) > 1]
    control, of_bytes = ["<unk>", "<s>", "</s>"], [f"<0x{byte:02X}>" for byte in range(256)]
    normal = pieces + characters
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*control, *of_bytes, *normal],
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(normal))],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(normal)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def plain_byte_level_ids(
    text: str,
    split: Callable[[str], Iterable[str]],
    tokens: Sequence[str],
    merges: Sequence[tuple[str, str]],
    whole: bool,
) -> list[int]:
    """Byte-level BPE by its definition: in each piece, merge the pair of lowest rank, leftmost first."""
    spelling = {byte: char for char, byte in BYTE_OF.items()}
    ids, ranks = {token: i for i, token in enumerate(tokens)}, {merge: i for i, merge in enumerate(merges)}
    result = []
    for piece in split(text):
        parts = [spelling[byte] for byte in piece.encode()]
        if whole and "".join(parts) in ids:
            parts = ["".join(parts)]
        while pairs := [(ranks[pair], i) for i, pair in enumerate(pairwise(parts)) if pair in ranks]:
            _, i = min(pairs)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        result += [ids[part] for part in parts]
    return result


def plain_sentencepiece_ids(text: str, metadata: dict[str, Any]) -> list[int]:
    """SentencePiece BPE by its definition: join the neighbours whose union scores highest, leftmost first."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    ids = {token: i for i, token in enumerate(tokens)}
    joined = {token: scores[i] for token, i in ids.items() if metadata["tokenizer.ggml.token_type"][i] == 1}
    parts = list(("▁" + text if text else text).replace(" ", "▁"))
    while pairs := [(-joined[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in joined]:
        _, i = min(pairs)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    result = []
    for part in parts:
        result += [ids[part]] if part in ids else [ids[f"<0x{byte:02X}>"] for byte in part.encode()]
    return result
