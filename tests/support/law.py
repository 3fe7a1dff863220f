"""One law for every request: a stream adds up to the whole answer, and both to the tokens that were generated.

The reference is plain: the bytes of all tokens, decoded at once and cut at the earliest stop string.
"""

# ruff: noqa: RUF001 - characters that look like others are what these texts are for

from collections.abc import Sequence

from hypothesis import strategies as st
from support.live import Live
from support.story_engine import EOS

from octavo.server.tokenizer import Tokenizer

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
    check_usage(whole, last)


def check_usage(whole: dict, last: dict) -> None:
    for usage in (whole["usage"], last["usage"]):
        assert usage["completion_tokens"] == sum(len(choice["token_ids"]) for choice in whole["choices"])
        del usage["prompt_tokens_details"]
    assert last["usage"] == whole["usage"]


def check_completions(live: Live, asked: dict, data: st.DataObject) -> None:
    """Ask for a completion of a text in every way, with stop strings drawn from what it yields."""
    echoed = asked["prompt"] if asked["echo"] else ""
    text = live.completion(**asked)["choices"][0]["text"]
    check_completion(live, asked, draw_stops(data, text.removeprefix(echoed)), echoed)


def check_chats(live: Live, prompt: str, asked: dict, alternatives: int | None, data: st.DataObject) -> None:
    """The same for the answer to a message."""
    asked = {"messages": [{"role": "user", "content": prompt}], **asked}
    if alternatives is not None:
        asked |= {"logprobs": True, "top_logprobs": alternatives}
    texts = [plain_text(live.tokenizer, choice["token_ids"]) for choice in live.chat(**asked)["choices"]]
    stops = draw_stops(data, texts[0])
    whole = live.chat(**asked, stop=stops)
    *chunks, last = live.stream("/v1/chat/completions", **asked, stop=stops, stream_options={"include_usage": True})
    for expected, text in zip(whole["choices"], texts, strict=True):
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
    check_usage(whole, last)
