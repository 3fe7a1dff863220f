import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from support.vocabularies import (
    CORPUS,
    TEXTS,
    byte_level,
    byte_level_backend,
    model_of,
    plain_byte_level_ids,
    smollm2,
    smollm2_reference,
)
from tokenizers import decoders, processors

from octavo.model.weights.errors import CheckpointError
from octavo.model.weights.locate import locate
from octavo.server.tokenizer import Tokenizer
from octavo.server.tokenizer_files import load_tokenizer
from octavo.server.vocabulary import TokenizerError

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def save(directory: Path, config: dict[str, Any] | None = None, **files: str) -> Path:
    byte_level_backend().save(str(directory / "tokenizer.json"))
    if config is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
    for name, text in files.items():
        (directory / name.replace("__", ".")).write_text(text)
    return directory


def smollm2_pieces(text: str) -> list[str]:
    """Each digit alone, then GPT-2's pattern between the digits: the two steps of SmolLM2's tokenizer.json."""
    parts = regex.split(r"(\p{N})", text)
    return [piece for part in parts for piece in regex.findall(GPT2, part)]


@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_encodes_as_the_plain_algorithm_does(text: str) -> None:
    tokens, merges = model_of(smollm2()._backend)
    assert smollm2().encode(text) == plain_byte_level_ids(text, smollm2_pieces, tokens, merges, whole=False)


@pytest.mark.parametrize("text", [text for text in TEXTS if not regex.search(r"\s\s\p{N}|\s(?![0-9])\p{N}", text)])
def test_smollm2_encodes_as_transformers_does(text: str) -> None:
    """Transformers leaves the separate digits out: that shows after two spaces, and in numbers that are no digits."""
    assert smollm2().encode(text) == smollm2_reference().encode(text)


@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_decodes_to_the_text(text: str) -> None:
    ids = smollm2().encode(text)
    assert smollm2().decode(ids) == text == smollm2_reference().decode(ids)


def test_smollm2_knows_its_special_tokens() -> None:
    tokenizer, reference = smollm2(), smollm2_reference()
    text = "<|im_start|>user\nHi<|im_end|>\n"
    assert tokenizer.encode(text) == reference.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == reference.decode(
        reference.encode(text), skip_special_tokens=True
    )
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
    assert [i for i in range(tokenizer.vocabulary) if tokenizer.is_special(i)] == list(range(17))
    assert (tokenizer.vocabulary, tokenizer.bos_id) == (49152, 1)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.chat_template == reference.chat_template


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=12), skip=st.booleans())
def test_any_ids_of_smollm2_decode_as_transformers_does(ids: list[int], skip: bool) -> None:
    assert smollm2().decode(ids, skip) == smollm2_reference().decode(ids, skip_special_tokens=skip)


@settings(max_examples=500, deadline=None)
@given(ids=st.lists(st.integers(0, byte_level().vocabulary + 3), max_size=12), skip=st.booleans())
def test_any_ids_of_a_byte_level_vocabulary_decode_as_the_library_does(ids: list[int], skip: bool) -> None:
    assert byte_level().decode(ids, skip) == byte_level_backend().decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("text", ["<think>", "日本", "two words"])
def test_added_tokens_are_their_own_text(text: str) -> None:
    (token,) = byte_level().encode(text, add_special_tokens=False)
    assert byte_level().token_text(token) == text == byte_level_backend().decode([token])


@settings(max_examples=300, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_the_bytes_of_a_texts_tokens_are_the_texts_bytes(text: str) -> None:
    """Case C06."""
    ids = byte_level().encode(text, add_special_tokens=False)
    assert b"".join(map(byte_level().token_bytes, ids)) == text.encode()


def test_token_text_is_the_text_and_never_the_vocabularys_spelling() -> None:
    """Case C06."""
    tokenizer = smollm2()
    (token,) = tokenizer.encode(" Hello")
    assert tokenizer.token_text(token) == " Hello"
    assert list(tokenizer.token_bytes(token)) == [32, 72, 101, 108, 108, 111]


def test_token_text_spells_bytes_that_are_no_text() -> None:
    tokenizer = smollm2()
    ids = tokenizer.encode("🌶")
    assert b"".join(map(tokenizer.token_bytes, ids)) == "🌶".encode()
    assert [tokenizer.token_text(i) for i in ids] == [
        "bytes:" + "".join(f"\\x{byte:02x}" for byte in tokenizer.token_bytes(i)) for i in ids
    ]
    assert tokenizer.token_text(ids[-1]) == "bytes:\\xb6"


def test_ids_outside_the_vocabulary_have_no_text() -> None:
    for token in (-1, 49152, 2**40):
        assert smollm2().token_bytes(token) == b""
        assert not smollm2().is_special(token)


@pytest.mark.parametrize("text", ["a\ud800b", "\udfff", "\ud83d \ude00"])
def test_a_lone_surrogate_counts_as_a_replacement_character(text: str) -> None:
    """Case A30."""
    ids = byte_level().encode(text, add_special_tokens=False)
    assert byte_level().decode(ids) == "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in text)


def test_a_directory_encodes_and_decodes_as_transformers_does(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    smollm2_reference().save_pretrained(tmp_path)
    tokenizer, reference = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == reference.encode(text)
        assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    assert tokenizer.chat_template == reference.chat_template
    assert (tokenizer.bos_id, tokenizer.eos_token) == (reference.bos_token_id, reference.eos_token)


def test_special_tokens_may_be_objects_and_may_stand_in_their_own_file(tmp_path: Path) -> None:
    special = json.dumps({"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>"})
    tokenizer = load_tokenizer(save(tmp_path, {"bos_token": None}, special_tokens_map__json=special))
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")


@pytest.mark.parametrize(
    ("config", "adds"), [({"add_bos_token": True}, True), ({"add_bos_token": False}, False), ({}, False)]
)
def test_bos_is_added_as_the_configuration_says(tmp_path: Path, config: dict[str, Any], adds: bool) -> None:
    """Case C21: `add_special_tokens` switches it off."""
    tokenizer = load_tokenizer(save(tmp_path, {"bos_token": "<s>", **config}))
    plain = tokenizer.encode("the dog", add_special_tokens=False)
    assert tokenizer.bos_id not in plain
    assert tokenizer.encode("the dog") == ([tokenizer.bos_id] if adds else []) + plain
    assert tokenizer.encode("") == ([tokenizer.bos_id] if adds else [])


@pytest.mark.parametrize("says", [True, False])
def test_a_post_processor_of_its_own_decides_about_bos(tmp_path: Path, says: bool) -> None:
    """As in transformers, where tokenizer.json goes before tokenizer_config.json; and never two BOS (case C21)."""
    from transformers import AutoTokenizer

    save(tmp_path, {"bos_token": "<s>", "add_bos_token": says, "tokenizer_class": "PreTrainedTokenizerFast"})
    backend = byte_level_backend().from_file(str(tmp_path / "tokenizer.json"))
    bos = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", pair=None, special_tokens=[("<s>", bos)])
    backend.save(str(tmp_path / "tokenizer.json"))
    ids = load_tokenizer(tmp_path).encode("the dog")
    assert ids.count(bos) == 1
    assert ids[0] == bos
    assert ids == AutoTokenizer.from_pretrained(tmp_path).encode("the dog")


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    save(tmp_path)
    backend = byte_level_backend().from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode(CORPUS[0])) == CORPUS[0]


def test_the_chat_template_is_found_wherever_it_stands(tmp_path: Path) -> None:
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "several"}]
    assert load_tokenizer(save(tmp_path)).chat_template is None
    assert load_tokenizer(save(tmp_path, {"chat_template": "one"})).chat_template == "one"
    assert load_tokenizer(save(tmp_path, {"chat_template": several})).chat_template == "several"
    both = save(tmp_path, {"chat_template": "one"}, chat_template__jinja="own file")
    assert load_tokenizer(both).chat_template == "own file"


def broken(tmp_path: Path, name: str, text: str) -> Path:
    save(tmp_path)
    (tmp_path / name).write_text(text)
    return tmp_path


def test_a_directory_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json") as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert caught.value.exit_code == 65


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "not JSON"),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"bos_token": "<absent>"}'),
    ],
)
def test_a_broken_file_is_named_in_one_line(tmp_path: Path, name: str, text: str) -> None:
    with pytest.raises((TokenizerError, CheckpointError)) as caught:
        load_tokenizer(broken(tmp_path, name, text))
    assert caught.value.exit_code == 65
    assert "\n" not in str(caught.value)
    assert name in str(caught.value) or "<absent>" in str(caught.value)


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.WordPiece(),
        decoders.Metaspace(),
        decoders.Sequence([decoders.Strip(" ", 1, 0), decoders.Fuse()]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Replace("▁", " "), decoders.Fuse()]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 1)]),
    ],
)
def test_a_decoder_that_gives_tokens_no_bytes_of_their_own_is_refused(tmp_path: Path, decoder: Any) -> None:
    save(tmp_path)
    backend = byte_level_backend().from_file(str(tmp_path / "tokenizer.json"))
    if decoder is None:
        (tmp_path / "tokenizer.json").write_text(json.dumps(json.loads(backend.to_str()) | {"decoder": None}))
    else:
        backend.decoder = decoder
        backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match="decoder"):
        load_tokenizer(tmp_path)


def test_serving_text_needs_no_torch() -> None:
    program = (
        "import sys; from pathlib import Path; import octavo.server.text, octavo.server.template\n"
        "from octavo.server.tokenizer_files import load_tokenizer; load_tokenizer(Path(sys.argv[1])).encode('a')\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, str(locate("smollm2"))], check=True)


def test_special_tokens_are_optional() -> None:
    tokenizer = Tokenizer(byte_level_backend(), eos_token="</s>")
    assert (tokenizer.bos_token, tokenizer.bos_id, tokenizer.eos_token) == (None, None, "</s>")
