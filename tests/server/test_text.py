import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import pytest
import tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.vocabularies import TEXTS, byte_level, sentencepiece_metadata, smollm2
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from octavo.server.text import TextDelta, TextStream
from octavo.server.tokenizer import Tokenizer
from octavo.server.tokenizer_gguf import gguf_tokenizer

PIECES = ["a", "b", "c", "ab", "ba", "aab", "bb", "abc", "ab ", " ", "é", "🌶"]
"""Texts of which few letters make many overlapping tokens and stop strings."""


@cache
def letters() -> Tokenizer:
    """Tokens for each byte, for the pieces of more than one byte, and special tokens <s> and </s>."""
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens += ["".join(part for part, _ in spelled.pre_tokenize_str(piece)) for piece in PIECES if len(piece) > 1]
    backend = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    return Tokenizer(backend)


@cache
def llama() -> Tokenizer:
    return gguf_tokenizer(sentencepiece_metadata())


def few_ids() -> list[int]:
    """The tokens made of PIECES, each of their bytes among them, two bytes that are never valid, and special tokens."""
    tokenizer, bytes_used = letters(), {bytes([byte]) for byte in "abc é🌶".encode() + b"\xff\xc0"}
    wanted = bytes_used | {piece.encode() for piece in PIECES} | {b"<s>", b"</s>"}
    return [i for i in range(tokenizer.vocabulary) if tokenizer.token_bytes(i) in wanted]


def whole_ids() -> list[int]:
    """The tokens of PIECES that are whole characters."""
    return [i for i in few_ids() if letters().token_text(i) in PIECES]


ids_of_letters = st.lists(st.sampled_from(few_ids()), max_size=24)
stops_of_letters = st.lists(st.lists(st.sampled_from(PIECES), min_size=1, max_size=4).map("".join), max_size=4)


@dataclass
class Result:
    """What a stream gave: all text, all tokens, and the deltas that made them."""

    text: str = ""
    offsets: list[int] = field(default_factory=list)
    stopped: str | None = None
    chunks: int = 0
    deltas: list[TextDelta] = field(default_factory=list)


def run(stream: TextStream, chunks: Sequence[Sequence[int]]) -> Result:
    """Feed chunks until a stop string ends the text, then finish."""
    result = Result()
    for chunk in chunks:
        result.chunks += 1
        result.deltas.append(stream.feed(chunk))
        if result.deltas[-1].stopped is not None:
            break
    else:
        result.deltas.append(stream.finish())
    for delta in result.deltas:
        result.text += delta.text
        result.offsets += delta.offsets
        result.stopped = delta.stopped
    return result


def chunked(ids: Sequence[int], cuts: Sequence[int]) -> list[list[int]]:
    """Split ids into chunks, some of them empty, of sizes that repeat `cuts`."""
    chunks, position = [], 0
    while position < len(ids):
        for size in (*cuts, 1):
            chunks.append(list(ids[position : position + size]))
            position += size
    return chunks


def one_by_one(ids: Sequence[int]) -> list[list[int]]:
    return [[i] for i in ids]


def earliest(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """By definition: the stop string that begins first; of those that begin together, the shortest."""
    found = [(text.find(stop), len(stop), stop) for stop in stops if stop in text]
    return (min(found)[0], min(found)[2]) if found else None


def expected(text: str, stops: Sequence[str], include: bool = False) -> str:
    match = earliest(text, stops)
    return text if match is None else text[: match[0] + len(match[1]) * include]


@settings(max_examples=400, deadline=None)
@given(ids=ids_of_letters, cuts=st.lists(st.integers(0, 5), max_size=4), skip=st.booleans())
def test_the_sum_of_all_deltas_is_the_decoded_text(ids: list[int], cuts: list[int], skip: bool) -> None:
    """Cases B01, B04: for every grouping of the tokens, invalid bytes and special tokens included."""
    result = run(TextStream(letters(), skip_special_tokens=skip), chunked(ids, cuts))
    assert result.text == letters().decode(ids, skip)
    assert len(result.offsets) == len(ids)
    assert result.stopped is None


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=30))
def test_any_tokens_of_smollm2_stream_to_their_decoded_text(ids: list[int]) -> None:
    assert run(TextStream(smollm2()), one_by_one(ids)).text == smollm2().decode(ids)


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, llama().vocabulary - 1), max_size=30), skip=st.booleans())
def test_any_tokens_of_sentencepiece_stream_to_their_decoded_text(ids: list[int], skip: bool) -> None:
    assert run(TextStream(llama(), skip_special_tokens=skip), one_by_one(ids)).text == llama().decode(ids, skip)


@pytest.mark.parametrize(
    "tokenizer", [byte_level(), llama(), smollm2()], ids=["byte-level", "sentencepiece", "smollm2"]
)
def test_texts_survive_the_way_through_tokens(tokenizer: Tokenizer) -> None:
    """Cases B01, C07."""
    for text in TEXTS:
        result = run(TextStream(tokenizer), one_by_one(tokenizer.encode(text, add_special_tokens=False)))
        assert result.text == text
        assert all("\ufffd" not in delta.text for delta in result.deltas)


@settings(max_examples=400, deadline=None)
@given(
    ids=ids_of_letters,
    stops=stops_of_letters,
    cuts=st.lists(st.integers(0, 5), max_size=4),
    include=st.booleans(),
    skip=st.booleans(),
)
def test_a_text_ends_at_the_earliest_stop_string(
    ids: list[int], stops: list[str], cuts: list[int], include: bool, skip: bool
) -> None:
    """Cases B04, B05, B09: the same for every grouping of the tokens, and as searching the whole text would say."""
    whole = letters().decode(ids, skip)
    match = earliest(whole, stops)
    streams = [TextStream(letters(), stops, include_stop=include, skip_special_tokens=skip) for _ in range(2)]
    results = [run(streams[0], chunked(ids, cuts)), run(streams[1], one_by_one(ids))]
    for result in results:
        assert result.text == expected(whole, stops, include)
        assert result.stopped == (None if match is None else match[1])
    assert results[0].offsets == results[1].offsets


@st.composite
def stopping(draw: st.DrawFn, ids: st.SearchStrategy[list[int]]) -> tuple[list[int], list[str]]:
    """Ids, and stop strings of which one occurs in their text."""
    tokens = draw(ids)
    text = letters().decode(tokens)
    assume(text)
    begin = draw(st.integers(0, len(text) - 1))
    stop = text[begin : begin + draw(st.integers(1, 5))]
    return tokens, [*draw(stops_of_letters), stop]


def known(ids: Sequence[int]) -> str:
    """The characters that are certain after these tokens."""
    data = b"".join(letters().token_bytes(i) for i in ids if not letters().is_special(i))
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data)


def is_certain(text: str, stops: Sequence[str]) -> bool:
    """Whether the earliest stop string is in the text, and none that begins before it can still be completed."""
    match = earliest(text, stops)
    return match is not None and not any(stop.startswith(text[p:]) for stop in stops for p in range(match[0]))


@settings(max_examples=400, deadline=None)
@given(case=stopping(st.lists(st.sampled_from(few_ids()), min_size=1, max_size=24)))
def test_a_stream_goes_no_further_than_it_must_to_be_sure(case: tuple[list[int], list[str]]) -> None:
    """Case B15: the tokens counted end with the one that makes the stop string certain, whatever comes with it."""
    ids, stops = case
    texts = {n: known(ids[:n]) for n in range(len(ids) + 1)}
    certain = [n for n, text in texts.items() if any(is_certain(text[:end], stops) for end in range(len(text) + 1))]
    assert run(TextStream(letters(), stops), one_by_one(ids)).chunks == min([*certain, len(ids)])


@settings(max_examples=400, deadline=None)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=12).map("".join), stops=stops_of_letters)
def test_text_is_held_only_while_it_can_begin_a_stop_string_or_a_character(pieces: str, stops: list[str]) -> None:
    """Each byte is a token here, so that every border is met."""
    byte_ids = {letters().token_bytes(i): i for i in range(letters().vocabulary)}
    stream, shown = TextStream(letters(), stops), ""
    for count, byte in enumerate(pieces.encode(), 1):
        delta = stream.feed([byte_ids[bytes([byte])]])
        shown += delta.text
        if delta.stopped is not None:
            return
        known = pieces.encode()[:count].decode("utf-8", "ignore")
        begun = [p for p in range(len(known)) if any(stop.startswith(known[p:]) for stop in stops)]
        match = earliest(known, stops)
        assert shown == known[: min([*begun, *([match[0]] if match else []), len(known)])]


@settings(max_examples=400, deadline=None)
@given(ids=ids_of_letters, stops=stops_of_letters, include=st.booleans(), skip=st.booleans())
def test_tokens_come_with_their_text(ids: list[int], stops: list[str], include: bool, skip: bool) -> None:
    """Case C03: a token is told once its text is shown; its offset is where that text stands."""
    stream = TextStream(letters(), stops, include_stop=include, skip_special_tokens=skip)
    result, shown, told = run(stream, one_by_one(ids)), "", 0
    for delta in result.deltas:
        shown += delta.text
        assert delta.text or not delta.offsets or delta is result.deltas[-1]
        for offset in delta.offsets:
            token = ids[told]
            text = "" if skip and letters().is_special(token) else letters().token_text(token)
            if not text.startswith("bytes:"):
                assert shown.startswith(text, offset) or (result.stopped and text.startswith(shown[offset:]))
            told += 1
    assert result.offsets == sorted(result.offsets)
    assert told == len(ids) or result.stopped is not None


@settings(max_examples=300, deadline=None)
@given(case=stopping(st.lists(st.sampled_from(whole_ids()), min_size=1, max_size=24)))
def test_tokens_wholly_behind_the_cut_are_not_told(case: tuple[list[int], list[str]]) -> None:
    ids, stops = case
    result = run(TextStream(letters(), stops), one_by_one(ids))
    begins = [len(letters().decode(ids[:i])) for i in range(len(ids))]
    assert result.offsets == [begin for begin in begins if begin < len(result.text)]


def ids(text: str) -> list[int]:
    return smollm2().encode(text, add_special_tokens=False)


def test_a_character_split_over_tokens_comes_whole() -> None:
    """Case B01."""
    stream = TextStream(smollm2())
    tokens = ids("🌶ďáb")
    assert len(tokens) > 4
    deltas = [stream.feed([token]).text for token in tokens]
    assert [text for text in deltas if text] == ["🌶", "ď", "á", "b"]


def test_a_token_waits_for_the_character_that_it_begins() -> None:
    stream, begun = TextStream(smollm2()), ids("🌶")
    assert stream.feed([*ids("a"), *begun[:-1]]) == TextDelta("a", (0,))
    assert stream.feed(begun[-1:]) == TextDelta("🌶", (1,) * len(begun))


def test_no_part_of_a_stop_string_is_shown_before_it_is_complete() -> None:
    """Case B04."""
    result = run(TextStream(smollm2(), ["DEFGHIJ"]), [ids(part) for part in ("DEF", "G", "HI", "J")])
    assert (result.text, result.stopped) == ("", "DEFGHIJ")
    assert [delta.text for delta in result.deltas] == [""] * 4


@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("Thought: x\nObservation: y", "\nObservation:", "Thought: x"),
        ("dolor", "lo", "do"),
        ("dolor sit amet", "it am", "dolor s"),
        ("1, 2, 3, 4, 5, 6, 7, 8", "7", "1, 2, 3, 4, 5, 6, "),
    ],
)
def test_stop_strings_need_no_token_borders(text: str, stop: str, shown: str) -> None:
    """Cases B05, B09."""
    result = run(TextStream(smollm2(), [stop]), one_by_one(ids(text)))
    assert (result.text, result.stopped) == (shown, stop)


@pytest.mark.parametrize(
    ("stops", "text", "shown", "stopped"),
    [
        (["abcd", "bc"], "xabcd", "x", "abcd"),
        (["abcd", "bc"], "xabce", "xa", "bc"),
        (["abcd", "bc"], "xabc", "xa", "bc"),
        (["ab", "abc"], "xabc", "x", "ab"),
        (["abc", "ab"], "xabc", "x", "ab"),
        (["aab"], "aaab", "a", "aab"),
        (["abac"], "ababac", "ab", "abac"),
    ],
)
def test_which_stop_string_wins(stops: list[str], text: str, shown: str, stopped: str) -> None:
    result = run(TextStream(smollm2(), stops), one_by_one([ids(char)[0] for char in text]))
    assert (result.text, result.stopped) == (shown, stopped)


def test_the_stop_string_can_be_kept() -> None:
    """Case B09."""
    result = run(TextStream(smollm2(), ["it am"], include_stop=True), one_by_one(ids("dolor sit amet")))
    assert result.text == "dolor sit am"


def test_while_text_is_held_nothing_is_delivered() -> None:
    """Case B07."""
    stop = "x" * 20
    stream = TextStream(smollm2(), [stop])
    letter = ids("x")[0]
    assert [stream.feed([letter]) for _ in range(19)] == [TextDelta()] * 19
    assert stream.finish() == TextDelta("x" * 19, tuple(range(19)))


def test_after_a_stop_string_nothing_comes() -> None:
    stream = TextStream(smollm2(), ["b"])
    assert stream.feed(ids("a") + ids("b") + ids("c")).text == "a"
    for delta in (stream.feed(ids("d")), stream.finish(), stream.finish()):
        assert (delta.text, delta.offsets, delta.stopped) == ("", (), "b")


def test_an_unfinished_character_at_the_end_is_replaced() -> None:
    stream = TextStream(smollm2())
    assert stream.feed(ids("🌶")[:-1]).text == ""
    assert stream.finish() == TextDelta("\ufffd", (0,) * (len(ids("🌶")) - 1))
    assert stream.finish() == TextDelta()


def test_special_tokens_do_not_part_the_bytes_of_a_character() -> None:
    first, *rest = ids("🌶")
    end = smollm2().special_id("<|im_end|>")
    assert run(TextStream(smollm2()), one_by_one([first, end, *rest])).text == "🌶"
    shown = run(TextStream(smollm2(), skip_special_tokens=False), one_by_one([first, end, *rest])).text
    assert shown == smollm2().decode([first, end, *rest], skip_special_tokens=False)
    assert shown.startswith("\ufffd<|im_end|>\ufffd")


def test_a_stop_string_can_be_a_shown_special_token() -> None:
    tokens = ids("Hi<|im_end|>there")
    assert run(TextStream(smollm2(), ["<|im_end|>"]), one_by_one(tokens)).text == "Hithere"
    result = run(TextStream(smollm2(), ["<|im_end|>"], skip_special_tokens=False), one_by_one(tokens))
    assert (result.text, result.stopped) == ("Hi", "<|im_end|>")


def test_the_first_space_of_sentencepiece_is_dropped_unless_text_goes_before() -> None:
    prompt, answer = (llama().encode(text, add_special_tokens=False) for text in ("the dog", "and the dog"))
    assert run(TextStream(llama()), one_by_one(answer)).text == "and the dog"
    continued = run(TextStream(llama(), continuing=True), one_by_one(answer)).text
    assert "the dog" + continued == llama().decode([*prompt, *answer]) == "the dog and the dog"


@pytest.mark.parametrize("stops", [[""], ["a", ""]])
def test_an_empty_stop_string_is_refused(stops: list[str]) -> None:
    with pytest.raises(ValueError, match="empty"):
        TextStream(smollm2(), stops)


def test_what_is_kept_does_not_grow_with_the_text() -> None:
    stops = ["never said", "a" * 30 + "b", "\n\n\n"]
    stream, sizes = TextStream(smollm2(), stops), []
    for token in (ids("the a") + [ids("aaaa")[0]] * 6 + ids(" 🌶\n\n")) * 500:
        stream.feed([token])
        sizes.append((len(stream._held), len(stream._spans)))
    assert stream._released > 10_000
    assert max(size for size, _ in sizes) <= 31
    assert max(spans for _, spans in sizes) <= 31


def test_a_repetitive_stop_string_costs_the_same_for_each_character() -> None:
    """Falling back never takes more steps than characters were matched, so their sum is bounded by the text."""
    stop = "a" * 500 + "b"
    stream = TextStream(smollm2(), [stop])
    automaton = stream._finder._automata[0]
    reads = CountingList(automaton._shorter)
    automaton._shorter = reads
    stream.feed(ids("a")[:1] * 5000 + ids("c") + ids("a")[:1] * 5000)
    assert reads.count_of_reads <= 2 * 10_001


class CountingList(list[int]):
    count_of_reads = 0

    def __getitem__(self, index: int) -> int:  # type: ignore[override]
        self.count_of_reads += 1
        return super().__getitem__(index)
