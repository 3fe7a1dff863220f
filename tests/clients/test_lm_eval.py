"""lm-evaluation-harness: log-likelihoods by echo, and generation, with the server's own tokenizer."""

from typing import Any

import pytest
from support.live import Live

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("default")]

CONTEXTS = [("The capital of France is", " Paris"), ("The capital of France is", " cheese"), ("1, 2, 3,", " 4, 5")]


@pytest.fixture
def model(live: Live) -> Any:
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    return LocalCompletionsAPI(base_url=f"{live.url}/v1/completions", model="smollm2", batch_size=2, max_gen_toks=8)


def instances(kind: str, arguments: list[tuple]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, pair, number) for number, pair in enumerate(arguments)]


def test_log_likelihoods_are_those_of_the_tokens(live: Live, model: Any) -> None:
    assert model.tokenizer_backend == "remote", "the server's own tokenizer was found"
    found = model.loglikelihood(instances("loglikelihood", CONTEXTS))
    for (context, continuation), (logprob, greedy) in zip(CONTEXTS, found, strict=True):
        ids = live.tokenizer.encode(context + continuation)
        count = len(ids) - len(live.tokenizer.encode(context))
        (choice,) = live.completion(prompt=ids, max_tokens=0, echo=True, logprobs=1)["choices"]
        tokens = choice["logprobs"]["token_logprobs"][-count:]
        best = [max(top.values()) for top in choice["logprobs"]["top_logprobs"][-count:]]
        assert logprob == pytest.approx(sum(tokens))
        assert greedy is (tokens == best)
    assert found[0][0] > found[1][0], "Paris is likelier than cheese"


def test_generation_stops_where_it_should(live: Live, model: Any) -> None:
    prompt = "The capital of France is"
    (text,) = model.generate_until(instances("generate_until", [(prompt, {"until": ["."], "max_gen_toks": 12})]))
    expected = live.completion(prompt=prompt, max_tokens=12, temperature=0, stop=["."])["choices"][0]["text"]
    assert text == expected
    assert "Paris" in text
