import math

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.live import Live

Stories = dict[str, tuple[int, list[int], str]]


def test_a_completion_has_the_documented_shape(live: Live, stories: Stories) -> None:
    marker, tokens, text = stories["plain"]
    answer = live.completion(prompt=[marker], max_tokens=100)
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["system_fingerprint"].startswith("fp_")
    (choice,) = answer["choices"]
    assert choice["text"] == text
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] is None
    assert choice["logprobs"] is None
    assert answer["usage"]["prompt_tokens"] == 1
    assert answer["usage"]["completion_tokens"] == len(tokens) + 1, "the EOS counts"
    assert answer["usage"]["total_tokens"] == len(tokens) + 2


def test_the_limit_on_new_tokens_is_sixteen_unless_given(live: Live, stories: Stories) -> None:
    marker, tokens, _ = stories["plain"]
    for fields in ({}, {"max_tokens": None}):
        answer = live.completion(prompt=[marker], **fields)
        assert answer["usage"]["completion_tokens"] == 16
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["choices"][0]["text"] == live.tokenizer.decode(tokens[:16])


def test_the_four_spellings_of_a_prompt(live: Live, stories: Stories) -> None:
    plain, emoji = stories["plain"], stories["emoji"]
    text = live.tokenizer.decode([plain[0]])
    assert live.completion(prompt=text, max_tokens=100)["choices"][0]["text"] == plain[2]
    assert live.completion(prompt=[plain[0]], max_tokens=100)["choices"][0]["text"] == plain[2]
    several = live.completion(prompt=[text, live.tokenizer.decode([emoji[0]])], max_tokens=100)
    assert [choice["text"] for choice in several["choices"]] == [plain[2], emoji[2]]
    assert [choice["index"] for choice in several["choices"]] == [0, 1]
    lists = live.completion(prompt=[[plain[0]], [emoji[0]]], max_tokens=100)
    assert [choice["text"] for choice in lists["choices"]] == [plain[2], emoji[2]]
    assert lists["usage"]["prompt_tokens"] == 2


def test_choices_of_several_prompts_are_numbered_prompt_by_prompt(live: Live, stories: Stories) -> None:
    plain, emoji = stories["plain"], stories["emoji"]
    answer = live.completion(prompt=[[plain[0]], [emoji[0]]], n=2, max_tokens=100)
    assert [choice["text"] for choice in answer["choices"]] == [plain[2], plain[2], emoji[2], emoji[2]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == 2, "a prompt counts once, however many choices continue it"
    assert answer["usage"]["completion_tokens"] == 2 * (len(plain[1]) + 1 + len(emoji[1]) + 1)


def test_b01_split_characters_never_reach_a_client_broken(live: Live, stories: Stories) -> None:
    marker, _, text = stories["emoji"]
    chunks = live.stream("/v1/completions", prompt=[marker], max_tokens=200)
    pieces = [chunk["choices"][0]["text"] for chunk in chunks]
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)
    assert "".join(pieces) == text


@pytest.mark.parametrize(
    ("stop", "expected", "reason"),
    [
        (["\nObservation:"], "Thought: dolor sit amet", "\nObservation:"),
        ("lo", "Thought: do", "lo"),
        (["it am"], "Thought: dolor s", "it am"),
        (["DEFGHIJ"], "Thought: dolor sit amet\nObservation: it ambles. ABC", "DEFGHIJ"),
        (["zzz", "amet", "dolor sit"], "Thought: ", "dolor sit"),
        (["never"], None, None),
        (["HIJK", "IJ"], "Thought: dolor sit amet\nObservation: it ambles. ABCDEFGH", "IJ"),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_b04_b05_b09_text_is_cut_exactly_before_the_first_stop_string(
    live: Live, stories: Stories, stop: object, expected: str | None, reason: str | None, streamed: bool
) -> None:
    marker, _, text = stories["stops"]
    fields = {"prompt": [marker], "max_tokens": 100, "stop": stop}
    if streamed:
        chunks = live.stream("/v1/completions", **fields)
        got = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        final = chunks[-1]["choices"][0]
    else:
        final = live.completion(**fields)["choices"][0]
        got = final["text"]
    assert got == (text if expected is None else expected)
    assert final["finish_reason"] == "stop"
    assert final["stop_reason"] == reason


def test_a_stop_string_is_shown_if_asked(live: Live, stories: Stories) -> None:
    marker, _, _ = stories["stops"]
    choice = live.completion(prompt=[marker], max_tokens=100, stop="sit", include_stop_str_in_output=True)["choices"][0]
    assert choice["text"] == "Thought: dolor sit"


def test_a_stop_token_ends_the_text_before_it(live: Live, stories: Stories) -> None:
    marker, tokens, _ = stories["plain"]
    answer = live.completion(prompt=[marker], max_tokens=100, stop_token_ids=[tokens[5]])
    (choice,) = answer["choices"]
    end = tokens.index(tokens[5])
    assert choice["text"] == live.tokenizer.decode(tokens[:end])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", tokens[5])
    assert answer["usage"]["completion_tokens"] == end + 1


def test_b07_b10_chunks_have_text_and_a_null_finish_reason_until_the_last(live: Live, stories: Stories) -> None:
    marker, _, _ = stories["stops"]
    chunks = live.stream("/v1/completions", prompt=[marker], max_tokens=100, stop=["x" * 20])
    assert all(chunk["object"] == "text_completion" for chunk in chunks)
    assert all(chunk["choices"][0]["text"] for chunk in chunks[:-1])
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["system_fingerprint"]) for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)


def test_b13_usage_comes_once_and_only_if_asked(live: Live, stories: Stories) -> None:
    marker, tokens, _ = stories["plain"]
    options = {"include_usage": True}
    *others, last = live.stream("/v1/completions", prompt=[marker], max_tokens=100, stream_options=options)
    assert all(chunk["usage"] is None for chunk in others)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == len(tokens) + 1
    refused = live.post("/v1/completions", prompt=[marker], stream_options=options)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream_options")


def test_c03_c04_echo_with_logprobs_describes_every_token(live: Live, stories: Stories) -> None:
    prompt = "\n1. Carol has 20"
    answer = live.completion(prompt=prompt, echo=True, logprobs=1, max_tokens=5)
    (choice,) = answer["choices"]
    logprobs = choice["logprobs"]
    lengths = {len(values) for values in logprobs.values()}
    assert lengths == {answer["usage"]["total_tokens"]}
    assert choice["text"].startswith(prompt)
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])
    assert all(1 <= len(top) <= 2 for top in logprobs["top_logprobs"][1:])
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        if not token.startswith("bytes:"):
            assert choice["text"].startswith(token, offset)


def test_a14_scoring_alone_generates_nothing(live: Live) -> None:
    answer = live.completion(prompt="The answer is", echo=True, logprobs=5, max_tokens=0)
    (choice,) = answer["choices"]
    assert choice["text"] == "The answer is"
    assert choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["tokens"]) == answer["usage"]["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == 0
    bare = live.completion(prompt="The answer is", max_tokens=0)
    assert bare["choices"][0]["text"] == ""


def test_c08_logprobs_of_a_completion_have_four_equal_lists(live: Live, stories: Stories) -> None:
    marker, tokens, text = stories["emoji"]
    (choice,) = live.completion(prompt=[marker], max_tokens=200, logprobs=3)["choices"]
    assert choice["text"] == text, "asking for log-probabilities changes no text (C07)"
    assert {len(values) for values in choice["logprobs"].values()} == {len(tokens)}
    assert choice["logprobs"]["text_offset"] == sorted(choice["logprobs"]["text_offset"])
    assert all(math.isfinite(value) for value in choice["logprobs"]["token_logprobs"])


def test_logprobs_of_a_stream_are_those_of_the_whole_answer(live: Live, stories: Stories) -> None:
    marker, _, _ = stories["emoji"]
    fields = {"prompt": [marker], "max_tokens": 200, "logprobs": 2, "echo": True}
    whole = live.completion(**fields)["choices"][0]["logprobs"]
    streamed: dict[str, list] = {name: [] for name in whole}
    for chunk in live.stream("/v1/completions", **fields):
        for name, values in chunk["choices"][0]["logprobs"].items():
            streamed[name] += values
    assert streamed == whole


def test_seeds_are_reported_and_can_be_sent_back(live: Live, stories: Stories) -> None:
    marker, _, _ = stories["plain"]
    response = live.post("/v1/completions", prompt=[marker], n=2)
    first, second = (choice["seed"] for choice in response.json()["choices"])
    assert response.headers["x-octavo-seed"] == str(first)
    assert first != second
    assert live.post("/v1/completions", prompt=[marker], seed=second).json()["choices"][0]["seed"] == second


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prompt=st.lists(st.integers(0, 49_151).filter(lambda token: token not in (777, 778)), min_size=1, max_size=20),
    stop=st.lists(st.text(alphabet="aeiost \n", min_size=1, max_size=2), max_size=3),
    n=st.integers(1, 3),
    logprobs=st.sampled_from([None, 0, 2]),
    echo=st.booleans(),
    max_tokens=st.integers(0, 40),
)
def test_b15_a_stream_adds_up_to_the_whole_answer(
    live: Live, prompt: list[int], stop: list[str], n: int, logprobs: int | None, echo: bool, max_tokens: int
) -> None:
    """Law of cases B and C: the same text, the same log-probabilities, the same counts."""
    fields = {"prompt": prompt, "stop": stop, "n": n, "echo": echo, "max_tokens": max_tokens, "seed": 7}
    if logprobs is not None:
        fields["logprobs"] = logprobs
    whole = live.completion(**fields)
    *chunks, last = live.stream("/v1/completions", stream_options={"include_usage": True}, **fields)
    for expected in whole["choices"]:
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == expected["index"]]
        assert "".join(choice["text"] for choice in own) == expected["text"]
        assert own[-1]["finish_reason"] == expected["finish_reason"]
        if logprobs is not None:
            tokens = [token for choice in own for token in choice["logprobs"]["tokens"]]
            assert tokens == expected["logprobs"]["tokens"]
    cached = [answer["usage"].pop("prompt_tokens_details") for answer in (whole, last)]
    assert all(0 <= details["cached_tokens"] <= len(prompt) for details in cached)
    assert last["usage"] == whole["usage"]


def test_the_official_client_reads_completions_and_streams(live: Live, stories: Stories) -> None:
    marker, _, text = stories["plain"]
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.completions.create(model="smollm2", prompt=[marker], max_tokens=100, logprobs=1)
        assert answer.choices[0].text == text
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == 1
        stream = client.completions.create(model="smollm2", prompt=[marker], max_tokens=100, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == text
        assert [model.id for model in client.models.list()] == ["smollm2", "alias/with-slash"]
        assert client.models.retrieve("alias/with-slash").id == "alias/with-slash"
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other", prompt="a")
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.completions.create(model="smollm2", prompt="a", temperature=3)


def test_a29_the_model_list_is_stable_and_shows_no_path(live: Live) -> None:
    first, second = (httpx.get(f"{live.url}/v1/models").json() for _ in range(2))
    assert first == second
    assert first["object"] == "list"
    for entry in first["data"]:
        assert entry.keys() == {"id", "object", "created", "owned_by", "max_model_len"}
