"""One law for every request: a stream adds up to the whole answer, and both to the tokens that were generated.

The reference is plain: the bytes of all tokens, decoded at once and cut at the earliest stop string.
"""

# ruff: noqa: RUF001 - characters that look like others are what these texts are for

import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.live import Live, live_server, story_command
from support.story_engine import EOS
from support.vocabularies import sentencepiece_metadata

from octavo.server.tokenizer import Tokenizer
from octavo.server.tokenizer_gguf import gguf_tokenizer

PIECES = [
    "a",
    " word",
    "é",
    "e\u0301",
    "你好",
    "世",
    "🌶",
    "🌶\ufe0f",
    "👩\u200d👩\u200d👧",
    "🇫🇷",
    "ह",
    "\u0323",
    "\n",
    "  ",
    "𝔘",
    "ﬁ",
]

prompts = st.lists(st.sampled_from(PIECES), min_size=1, max_size=8).map("".join)
fields = st.fixed_dictionaries(
    {"n": st.integers(1, 3), "max_tokens": st.integers(0, 40), "return_token_ids": st.just(True)}
)
lawful = settings(
    max_examples=30, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


def plain_text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    shown = (token for token in ids if token != EOS and not tokenizer.is_special(token))
    return b"".join(map(tokenizer.token_bytes, shown)).decode("utf-8", "replace")


def cut(text: str, stops: Sequence[str]) -> str:
    found = [text.index(stop) for stop in stops if stop in text]
    return text[: min(found)] if found else text


def draw_stops(data: st.DataObject, text: str) -> list[str]:
    """Some that occur in a text, wherever tokens and characters end in it, and some that do not."""
    stops = []
    for _ in range(data.draw(st.integers(0, 3)) if text else 0):
        start = data.draw(st.integers(0, len(text) - 1))
        stops.append(text[start : start + data.draw(st.integers(1, 6))])
    return [*stops, *data.draw(st.lists(prompts, max_size=1))]


def own(chunks: Sequence[dict], index: int) -> list[dict]:
    return [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]


def check_completion(live: Live, asked: dict, stops: list[str], echoed: str) -> None:
    free = live.completion(**asked)
    whole = live.completion(**asked, stop=stops)
    *chunks, last = live.stream("/v1/completions", **asked, stop=stops, stream_options={"include_usage": True})
    for expected, unstopped in zip(whole["choices"], free["choices"], strict=True):
        text = plain_text(live.tokenizer, unstopped["token_ids"])
        assert unstopped["text"] == echoed + text
        assert expected["text"] == echoed + cut(text, stops)
        assert expected["token_ids"] == unstopped["token_ids"][: len(expected["token_ids"])]
        parts = own(chunks, expected["index"])
        assert "".join(part["text"] for part in parts) == expected["text"]
        assert [token for part in parts for token in part["token_ids"]] == expected["token_ids"]
        assert (parts[-1]["finish_reason"], parts[-1]["stop_reason"]) == (
            expected["finish_reason"],
            expected["stop_reason"],
        )
        if expected["logprobs"] is not None:
            for name, values in expected["logprobs"].items():
                assert [value for part in parts for value in part["logprobs"][name]] == values
    for usage in (whole["usage"], last["usage"]):
        assert usage["completion_tokens"] == sum(len(choice["token_ids"]) for choice in whole["choices"])
        del usage["prompt_tokens_details"]
    assert last["usage"] == whole["usage"]


@lawful
@given(prompts, fields, st.sampled_from([None, 0, 2]), st.booleans(), st.data())
def test_b15_c07_completions_on_the_real_tokenizer(
    live: Live, prompt: str, asked: dict, logprobs: int | None, echo: bool, data: st.DataObject
) -> None:
    asked = {"prompt": prompt, "logprobs": logprobs, "echo": echo, **asked}
    text = live.completion(**asked)["choices"][0]["text"]
    check_completion(live, asked, draw_stops(data, text.removeprefix(prompt if echo else "")), prompt if echo else "")


@lawful
@given(prompts, fields, st.sampled_from([None, 0, 2]), st.data())
def test_b15_c07_chats_on_the_real_tokenizer(
    live: Live, prompt: str, asked: dict, alternatives: int | None, data: st.DataObject
) -> None:
    asked = {"messages": [{"role": "user", "content": prompt}], **asked}
    if alternatives is not None:
        asked |= {"logprobs": True, "top_logprobs": alternatives}
    text = plain_text(live.tokenizer, live.chat(**asked)["choices"][0]["token_ids"])
    stops = draw_stops(data, text)
    whole = live.chat(**asked, stop=stops)
    *chunks, last = live.stream("/v1/chat/completions", **asked, stop=stops, stream_options={"include_usage": True})
    for expected in whole["choices"]:
        assert expected["message"]["content"] == cut(text, stops)
        parts = own(chunks, expected["index"])
        assert "".join(part["delta"].get("content", "") for part in parts) == expected["message"]["content"]
        assert [token for part in parts for token in part.get("token_ids", ())] == expected["token_ids"]
        assert (parts[-1]["finish_reason"], parts[-1]["stop_reason"]) == (
            expected["finish_reason"],
            expected["stop_reason"],
        )
        if alternatives is not None:
            entries = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
            assert entries == expected["logprobs"]["content"]
    for usage in (whole["usage"], last["usage"]):
        assert usage["completion_tokens"] == sum(len(choice["token_ids"]) for choice in whole["choices"])
        del usage["prompt_tokens_details"]
    assert last["usage"] == whole["usage"]


STORIES = 8


@pytest.fixture(scope="module")
def fallback(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server with a SentencePiece tokenizer, around an engine that tells stories full of single bytes."""
    tokenizer = Tokenizer(gguf_tokenizer(sentencepiece_metadata()).backend)
    single = [token for token in range(tokenizer.vocabulary) if len(tokenizer.token_bytes(token)) == 1]
    rng = random.Random(7)
    told = {}
    for marker in range(1000, 1000 + STORIES):
        texts = [tokenizer.encode(rng.choice(PIECES), add_special_tokens=False) for _ in range(12)]
        story = [token for text in texts for token in (*text, *rng.sample(single, rng.randrange(3)))]
        told[marker] = [marker, *(token for token in story if token != EOS)]
    command = story_command(tmp_path_factory.mktemp("fallback"), told)
    with live_server(command=command, tokenizer=tokenizer) as server:
        yield server


@lawful
@given(st.integers(1000, 1000 + STORIES - 1), fields, st.sampled_from([None, 1]), st.data())
def test_b01_b15_completions_on_a_tokenizer_with_byte_fallback(
    fallback: Live, marker: int, asked: dict, logprobs: int | None, data: st.DataObject
) -> None:
    asked = {"prompt": [marker], "logprobs": logprobs, **asked, "max_tokens": 3 * asked["max_tokens"]}
    text = fallback.completion(**asked)["choices"][0]["text"]
    check_completion(fallback, asked, draw_stops(data, text), "")
