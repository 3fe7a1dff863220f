"""Fields of vLLM's that clients send beside OpenAI's."""

from typing import Any

import pytest
from support.live import Live
from support.story_engine import EOS

from octavo.server.client import EngineClient
from octavo.server.generation import Generation

Stories = dict[str, tuple[int, list[int], str]]
USER = {"role": "user", "content": "Say something."}


def test_token_ids_of_a_completion_include_those_without_text(live: Live, stories: Stories) -> None:
    marker, tokens, _ = stories["emoji"]
    (choice,) = live.completion(prompt=[marker], max_tokens=200, return_token_ids=True)["choices"]
    assert choice["token_ids"] == [*tokens, EOS]
    assert choice["prompt_token_ids"] == [marker]
    (plain,) = live.completion(prompt=[marker], max_tokens=1)["choices"]
    assert not {"token_ids", "prompt_token_ids", "prompt_logprobs"} & plain.keys()


@pytest.mark.parametrize("stop", [None, "dolor", "\nObservation:"])
def test_token_ids_of_a_stream_are_those_of_the_whole_answer(live: Live, stories: Stories, stop: str | None) -> None:
    prompts = [[stories["stops"][0]], [stories["emoji"][0]]]
    fields = {"prompt": prompts, "n": 2, "max_tokens": 200, "stop": stop, "return_token_ids": True}
    whole = live.completion(**fields)
    chunks = [chunk["choices"][0] for chunk in live.stream("/v1/completions", **fields)]
    for expected in whole["choices"]:
        own = [choice for choice in chunks if choice["index"] == expected["index"]]
        assert [token for choice in own for token in choice["token_ids"]] == expected["token_ids"]
        assert [choice["prompt_token_ids"] for choice in own] == [prompts[expected["index"] // 2]] + [None] * (
            len(own) - 1
        )
    generated = sum(len(choice["token_ids"]) for choice in whole["choices"])
    assert generated == whole["usage"]["completion_tokens"]


def test_token_ids_of_a_chat_stand_beside_each_choice(live: Live) -> None:
    fields = {"messages": [USER], "max_tokens": 9, "n": 2, "return_token_ids": True}
    whole = live.chat(**fields)
    assert len(whole["prompt_token_ids"]) == whole["usage"]["prompt_tokens"]
    first, *others = live.stream("/v1/chat/completions", **fields)
    assert first["prompt_token_ids"] == whole["prompt_token_ids"]
    assert not any("prompt_token_ids" in chunk for chunk in others)
    for expected in whole["choices"]:
        assert len(expected["token_ids"]) == 9
        own = [chunk["choices"][0] for chunk in others if chunk["choices"][0]["index"] == expected["index"]]
        assert [token for choice in own for token in choice.get("token_ids", ())] == expected["token_ids"]


def test_tokens_can_be_named_by_their_numbers(live: Live, stories: Stories) -> None:
    marker, tokens, _ = stories["plain"]
    (choice,) = live.completion(prompt=[marker], max_tokens=5, logprobs=2, echo=True, return_tokens_as_token_ids=True)[
        "choices"
    ]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in (marker, *tokens[:5])]
    assert all(name.startswith("token_id:") for top in choice["logprobs"]["top_logprobs"][1:] for name in top)
    (choice,) = live.chat(
        messages=[USER], max_tokens=3, logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True
    )["choices"]
    for entry in choice["logprobs"]["content"]:
        token = int(entry["token"].removeprefix("token_id:"))
        assert bytes(entry["bytes"]) == live.tokenizer.token_bytes(token)


def test_c04_prompt_logprobs_are_those_of_an_echo_with_ids_and_ranks(live: Live) -> None:
    prompt = [5, 900, 901, 17, 900]
    (choice,) = live.completion(prompt=prompt, max_tokens=1, echo=True, logprobs=1, prompt_logprobs=3)["choices"]
    first, *entries = choice["prompt_logprobs"]
    assert first is None
    assert len(entries) == len(prompt) - 1
    echoed = choice["logprobs"]["token_logprobs"][1 : len(prompt)]
    for token, entry, logprob in zip(prompt[1:], entries, echoed, strict=True):
        own = entry[str(token)]
        assert (own["logprob"], own["decoded_token"]) == (logprob, live.tokenizer.token_text(token))
        likeliest = {value["rank"]: value["logprob"] for value in entry.values()}
        assert set(range(1, 4)) <= likeliest.keys()
        assert [likeliest[rank] for rank in sorted(likeliest)] == sorted(likeliest.values(), reverse=True)
        assert len(entry) == len(likeliest) == 3 + (own["rank"] > 3)
    assert all(len(top) <= 2 for top in choice["logprobs"]["top_logprobs"][1:]), "an echo shows what logprobs asks for"


def test_prompt_logprobs_of_a_chat_stand_beside_the_choices(live: Live) -> None:
    answer = live.chat(messages=[USER], max_tokens=1, prompt_logprobs=0)
    assert answer["prompt_logprobs"][0] is None
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert all(len(entry) == 1 for entry in answer["prompt_logprobs"][1:])
    refused = live.post("/v1/chat/completions", messages=[USER], prompt_logprobs=1, stream=True)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")


def test_a26_usage_counts_what_is_left_of_a_truncated_prompt(live: Live) -> None:
    answer = live.completion(prompt=[5] * 3000, truncate_prompt_tokens=100, max_tokens=2)
    assert answer["usage"]["prompt_tokens"] == 100
    text = "the cat sat on the mat. " * 50
    ids = live.tokenizer.encode(text)
    (choice,) = live.completion(prompt=text, truncate_prompt_tokens=20, max_tokens=0, echo=True)["choices"]
    assert choice["text"] == live.tokenizer.decode(ids[-20:])


def test_priority_reaches_the_engine(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []
    submit = EngineClient.submit

    def noting(self: EngineClient, *arguments: Any, **keywords: Any) -> Generation:
        generation = submit(self, *arguments, **keywords)
        sent.append(generation.submission.priority)
        return generation

    monkeypatch.setattr(EngineClient, "submit", noting)
    for priority in (-7, 3, None):
        live.completion(prompt="a", max_tokens=1, priority=priority)
    live.chat(messages=[USER], max_tokens=1)
    assert sent == [-7, 3, 0, 0]
