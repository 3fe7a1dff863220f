"""One law for every request: a stream adds up to the whole answer, and both to the tokens that were generated.

The reference is plain: the bytes of all tokens, decoded at once and cut at the earliest stop string.
"""

import random
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.law import PIECES, check_chats, check_completion, check_completions, draw_stops, prompts
from support.live import Live, live_server, story_command
from support.story_engine import EOS
from support.vocabularies import sentencepiece_metadata

from octavo.server.tokenizer_gguf import gguf_tokenizer

fields = st.fixed_dictionaries(
    {"n": st.integers(1, 3), "max_tokens": st.integers(0, 40), "return_token_ids": st.just(True)}
)
lawful = settings(
    max_examples=30, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


@lawful
@given(prompts, fields, st.sampled_from([None, 0, 2]), st.booleans(), st.data())
def test_b15_c07_completions_on_the_real_tokenizer(
    live: Live, prompt: str, asked: dict, logprobs: int | None, echo: bool, data: st.DataObject
) -> None:
    check_completions(live, {"prompt": prompt, "logprobs": logprobs, "echo": echo, **asked}, data)


@lawful
@given(prompts, fields, st.sampled_from([None, 0, 2]), st.data())
def test_b15_c07_chats_on_the_real_tokenizer(
    live: Live, prompt: str, asked: dict, alternatives: int | None, data: st.DataObject
) -> None:
    check_chats(live, prompt, asked, alternatives, data)


STORIES = 8


@pytest.fixture(scope="module")
def fallback(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server with a SentencePiece tokenizer, around an engine that tells stories full of single bytes."""
    tokenizer = gguf_tokenizer(sentencepiece_metadata())
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
