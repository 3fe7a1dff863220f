import random
import unicodedata
from pathlib import Path
from typing import Any

import gguf
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from support.vocabularies import (
    CORPUS,
    TEXTS,
    plain_byte_level_ids,
    plain_sentencepiece_ids,
    sentencepiece_metadata,
    trained_merges,
)

from octavo.model.weights.errors import CheckpointError
from octavo.server.tokenizer_files import load_tokenizer
from octavo.server.tokenizer_gguf import gguf_tokenizer
from octavo.server.vocabulary import TokenizerError

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
PATTERNS = {
    "gpt-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "llama-bpe": CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "tekken": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


UNREACHABLE = "zqzq"
"""A token that no merge makes: found only where whole pieces are looked up first."""


def byte_level_metadata(pre: str | None, **more: Any) -> dict[str, Any]:
    """The trained vocabulary and behind it one more token, two control and two user-defined ones."""
    tokens, merges = trained_merges()
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [*tokens, UNREACHABLE, "<|begin|>", "<|end|>", "<think>", "   \t"],
        "tokenizer.ggml.token_type": [1] * len(tokens) + [1, 3, 3, 4, 4],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.bos_token_id": len(tokens) + 1,
        "tokenizer.ggml.eos_token_id": len(tokens) + 2,
    }
    if pre is not None:
        metadata["tokenizer.ggml.pre"] = pre
    return metadata | {f"tokenizer.ggml.{name}": value for name, value in more.items()}


@pytest.mark.parametrize("pre", PATTERNS)
def test_each_pre_tokenizer_splits_as_its_model_publishes(pre: str) -> None:
    tokens, merges = trained_merges()
    tokenizer = gguf_tokenizer(byte_level_metadata(pre))
    whole = pre in {"llama-bpe", "tekken"}
    for text in [*TEXTS, UNREACHABLE]:
        normal = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
        pieces = regex.compile(PATTERNS[pre]).findall
        expected = plain_byte_level_ids(normal, pieces, [*tokens, UNREACHABLE], merges, whole)
        assert tokenizer.encode(text, add_special_tokens=False) == expected, text
        assert tokenizer.decode(expected) == normal


def test_the_pre_tokenizers_differ_on_these_texts() -> None:
    """Otherwise the comparison above would show nothing."""
    results = {
        pre: str([gguf_tokenizer(byte_level_metadata(pre)).encode(text, False) for text in TEXTS]) for pre in PATTERNS
    }
    assert len(set(results.values())) == len(PATTERNS)


@pytest.mark.parametrize(("pre", "same_as"), [(None, "gpt-2"), ("default", "gpt-2"), ("llama3", "llama-bpe")])
def test_other_names_of_the_same_rules(pre: str | None, same_as: str) -> None:
    one, other = gguf_tokenizer(byte_level_metadata(pre)), gguf_tokenizer(byte_level_metadata(same_as))
    for text in TEXTS:
        assert one.encode(text) == other.encode(text)


@pytest.mark.parametrize(
    ("pre", "says", "adds"),
    [("llama-bpe", None, True), ("llama-bpe", False, False), ("qwen2", None, False), ("qwen2", True, True)],
)
def test_bos_is_added_as_the_file_says_or_else_as_its_family_does(pre: str, says: bool | None, adds: bool) -> None:
    """Case C21."""
    tokenizer = gguf_tokenizer(byte_level_metadata(pre, **({} if says is None else {"add_bos_token": says})))
    plain = tokenizer.encode("the dog", add_special_tokens=False)
    assert tokenizer.encode("the dog") == ([tokenizer.bos_id] if adds else []) + plain


def test_control_tokens_are_special_and_user_defined_ones_are_text() -> None:
    tokenizer = gguf_tokenizer(byte_level_metadata("gpt-2"))
    text = "<|begin|>a<think>b   \tc<|end|>"
    ids = tokenizer.encode(text)
    first = tokenizer.vocabulary - 4
    assert [i for i in ids if i >= first] == [first, first + 2, first + 3, first + 1]
    assert [tokenizer.is_special(i) for i in range(first, first + 4)] == [True, True, False, False]
    assert tokenizer.decode(ids) == "a<think>b   \tc"
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert (tokenizer.bos_id, tokenizer.eos_token) == (first, "<|end|>")


def test_the_end_of_a_turn_stands_for_an_end_of_text_that_is_not_named() -> None:
    metadata = byte_level_metadata("gpt-2", eot_token_id=5)
    assert gguf_tokenizer(metadata).eos_token == "<|end|>"
    del metadata["tokenizer.ggml.eos_token_id"]
    assert gguf_tokenizer(metadata).eos_token == metadata["tokenizer.ggml.tokens"][5]


def test_sentencepiece_encodes_as_the_plain_algorithm_does() -> None:
    tokenizer, draw = gguf_tokenizer(sentencepiece_metadata()), random.Random(1)
    words = [word for line in CORPUS for word in line.split(" ")]
    texts = [*TEXTS, *(" ".join(draw.choices(words, k=draw.randrange(1, 12))) for _ in range(300))]
    for text in texts:
        expected = plain_sentencepiece_ids(text, sentencepiece_metadata())
        assert tokenizer.encode(text, add_special_tokens=False) == expected, text
        assert tokenizer.encode(text) == [1, *expected]
        assert tokenizer.decode([1, *expected]) == text


def test_sentencepiece_falls_back_to_bytes() -> None:
    tokenizer = gguf_tokenizer(sentencepiece_metadata())
    ids = tokenizer.encode("你", add_special_tokens=False)
    assert [tokenizer.token_bytes(i) for i in ids] == [b" ", b"\xe4", b"\xbd", b"\xa0"]
    assert [tokenizer.token_text(i) for i in ids] == [" ", "bytes:\\xe4", "bytes:\\xbd", "bytes:\\xa0"]


@settings(max_examples=300, deadline=None)
@given(
    parts=st.lists(
        st.integers(0, 2).map(lambda i: [i])
        | st.integers(259, 600).map(lambda i: [i])
        | st.characters(exclude_categories=["Cs"]).map(lambda char: [3 + byte for byte in char.encode()])
    ),
    skip=st.booleans(),
)
def test_any_ids_of_sentencepiece_with_whole_characters_decode_as_the_library_does(
    parts: list[list[int]], skip: bool
) -> None:
    tokenizer = gguf_tokenizer(sentencepiece_metadata())
    ids = [i for part in parts for i in part]
    assert tokenizer.decode(ids, skip) == tokenizer._backend.decode(ids, skip_special_tokens=skip)


def test_without_a_space_prefix_nothing_is_added_and_nothing_stripped() -> None:
    tokenizer = gguf_tokenizer(sentencepiece_metadata() | {"tokenizer.ggml.add_space_prefix": False})
    for text in ("the dog", " the dog", "  the"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text == tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pre": "deepseek-llm"}, "pre-tokenizer 'deepseek-llm'"),
        ({"model": "bert"}, "model 'bert'"),
        ({"merges": ["no such"]}, "cannot be used"),
        ({"token_type": [1]}, "cannot be used"),
        ({"bos_token_id": 1 << 30}, "bos_token_id"),
        ({"eos_token_id": -1}, "eos_token_id"),
    ],
)
def test_metadata_that_cannot_be_served_is_refused_in_one_line(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(TokenizerError, match=reason) as caught:
        gguf_tokenizer(byte_level_metadata(**{"pre": "gpt-2"} | changes))
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 65


@pytest.mark.parametrize("missing", ["model", "tokens", "merges"])
def test_missing_metadata_is_refused(missing: str) -> None:
    metadata = byte_level_metadata("gpt-2")
    del metadata[f"tokenizer.ggml.{missing}"]
    with pytest.raises(TokenizerError, match=missing):
        gguf_tokenizer(metadata)


def write(path: Path, pre: str) -> Path:
    metadata = byte_level_metadata(pre)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(metadata["tokenizer.ggml.tokens"])
    writer.add_token_types(metadata["tokenizer.ggml.token_type"])
    writer.add_token_merges(metadata["tokenizer.ggml.merges"])
    writer.add_bos_token_id(metadata["tokenizer.ggml.bos_token_id"])
    writer.add_eos_token_id(metadata["tokenizer.ggml.eos_token_id"])
    writer.add_chat_template("{{ bos_token }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_a_file_is_read_like_its_metadata(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write(tmp_path / "model.gguf", "qwen2"))
    assert tokenizer.encode(TEXTS[0]) == gguf_tokenizer(byte_level_metadata("qwen2")).encode(TEXTS[0])
    assert (tokenizer.bos_token, tokenizer.chat_template) == ("<|begin|>", "{{ bos_token }}")


def test_an_error_names_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", "viking")
    with pytest.raises(TokenizerError, match="viking") as caught:
        load_tokenizer(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"nothing")
    with pytest.raises(CheckpointError):
        load_tokenizer(tmp_path / "model.gguf")
