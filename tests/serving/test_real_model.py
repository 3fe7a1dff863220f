"""The whole daemon on the real default model: HTTP, scheduler, cache, kernels and tokenizer together."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from support.live import Live, live_server

from octavo.scheduler.messages import EngineConfig

PROMPTS = [
    "Once upon a time",
    "def fibonacci(n):\n    ",
    "Die Hauptstadt von Frankreich ist",
    "1, 2, 3, 4, 5,",
    "🌍🌎🌏 means",
    "the cat sat on the mat. " * 12,
    "你好世界",
    "SELECT name, price FROM",
]


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_server(EngineConfig(model="smollm2", max_model_len=2048)) as server:
        yield server


def varied_requests(count: int) -> list[dict[str, object]]:
    """Requests of different lengths, each with sampling settings of its own."""
    rng = random.Random(20)
    settings: list[dict[str, object]] = [
        {"temperature": 0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 40},
        {"temperature": 1.0, "min_p": 0.05, "repetition_penalty": 1.2},
        {"temperature": 0.9, "presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"temperature": 0, "logit_bias": {"284": 5, "28": -100}},
        {"temperature": 1.0, "min_tokens": 8, "stop_token_ids": [28, 30]},
        {"temperature": 0.5, "stop": [".", "\n\n"]},
    ]
    return [
        {
            "prompt": PROMPTS[rng.randrange(len(PROMPTS))] + " " * rng.randrange(3),
            "max_tokens": rng.randrange(4, 32),
            "seed": rng.randrange(2**62),
            "logprobs": rng.choice([None, 2]),
            **settings[index % len(settings)],
        }
        for index in range(count)
    ]


def at_once(live: Live, requests: list[dict[str, object]]) -> list[dict]:
    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(lambda request: live.completion(**request)["choices"][0], requests))


def test_c12_c16_each_of_32_requests_gets_what_it_gets_alone(live: Live) -> None:
    requests = varied_requests(32)
    together = at_once(live, requests)
    for request, choice in zip(requests, together, strict=True):
        alone = live.completion(**request)["choices"][0]
        assert alone == choice, "text, log-probabilities and reasons, bit for bit"


@pytest.mark.parametrize("admission", ["optimistic", "reserve"])
def test_a_pool_too_small_for_the_load_changes_nothing(live: Live, admission: str) -> None:
    requests = [
        {"prompt": PROMPTS[index % len(PROMPTS)], "max_tokens": 48, "seed": index, "ignore_eos": True}
        for index in range(8)
    ]
    config = EngineConfig(model="smollm2", max_model_len=192, kv_blocks=14, admission=admission)
    with live_server(config) as small:
        crowded = at_once(small, requests)
        assert (small.metric("octavo_preemptions_total") > 0) == (admission == "optimistic")
        assert small.metric('octavo_kv_blocks{state="used"}') == 0
    assert all(choice["finish_reason"] == "length" for choice in crowded)
    assert crowded == at_once(live, requests)


def test_c15_a_prefix_found_in_the_cache_changes_nothing(live: Live) -> None:
    request = {"prompt": "A common beginning. " * 20, "max_tokens": 12, "seed": 3, "logprobs": 1}
    cold, warm = live.completion(**request), live.completion(**request)
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert cold["choices"] == warm["choices"]
    salted = live.completion(**request, cache_salt="tenant")
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_the_official_client_chats_and_streams(live: Live) -> None:
    question = {"role": "user", "content": "What is the capital of France?"}
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(model="smollm2", messages=[question], temperature=0, max_tokens=30)
        text = answer.choices[0].message.content
        assert text is not None
        assert "Paris" in text
        stream = client.chat.completions.create(
            model="smollm2", messages=[question], temperature=0, max_tokens=30, stream=True
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text
        completion = client.completions.create(model="smollm2", prompt="The sky is", temperature=0, max_tokens=8)
        chunks = client.completions.create(
            model="smollm2", prompt="The sky is", temperature=0, max_tokens=8, stream=True
        )
        assert "".join(chunk.choices[0].text for chunk in chunks) == completion.choices[0].text


def test_c13_choices_of_one_request_differ_by_seed_and_can_be_replayed(live: Live) -> None:
    request = {"prompt": "My favourite animal is", "max_tokens": 12, "temperature": 1.2}
    several = live.completion(**request, n=4, seed=5)["choices"]
    assert len({choice["text"] for choice in several}) > 1
    for choice in several:
        again = live.completion(**request, seed=choice["seed"])["choices"][0]
        assert again["text"] == choice["text"]


def test_c10_a_tiny_temperature_is_greedy(live: Live) -> None:
    greedy = live.completion(prompt="The sky is", temperature=0, max_tokens=8)["choices"][0]["text"]
    for temperature in (1e-4, 1e-5, 1e-8):
        assert (
            live.completion(prompt="The sky is", temperature=temperature, max_tokens=8)["choices"][0]["text"] == greedy
        )


def test_only_allowed_tokens_are_sampled_and_no_forbidden_word_is_written(live: Live) -> None:
    numbers = [live.tokenizer.encode(str(digit), add_special_tokens=False)[0] for digit in range(10)]
    for stream in ({"temperature": 0}, {"temperature": 1.5, "seed": 4}):
        choice = live.completion(prompt="1, 2, 3", max_tokens=12, allowed_token_ids=numbers, **stream)["choices"][0]
        assert choice["text"].isdigit()
    request = {"prompt": "The capital of France is", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    free = live.completion(**request)["choices"][0]["text"]
    assert " Paris" in free
    bound = live.completion(**request, bad_words=["Paris"])["choices"][0]["text"]
    assert "Paris" not in bound
    assert bound[: free.index(" Paris")] == free[: free.index(" Paris")], "nothing changes before the word"
