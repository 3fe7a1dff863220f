"""Grammars that explode: refused where that shows early; else their own request ends, and says why."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from support.live import Live, engine_pid

HEAD = "q0" * 70
"""So far a trial does not go."""
EXPLODING = {
    "a chain of ambiguous lists": 'a: b a | b\nb: c b | c\nc: d c | d\nd: "x" d | "x"',
    "lists of lists of lists": 'a: b+\nb: c+\nc: d+\nd: "x"+ | a "x"',
    "parts that are wholes, and optional": 'a: b? b? b? b?\nb: a | "x"',
    "counts of counts": 'a: b{1,100}\nb: c{1,100}\nc: "x" | "xx"',
}


def asked(rules: str, **more: Any) -> dict[str, Any]:
    grammar = f'start: "{HEAD}" a\n{rules}'
    return {
        "prompt": [5, 6, 7],
        "max_tokens": 1900,
        "min_tokens": 1800,
        "structured_outputs": {"grammar": grammar},
        **more,
    }


@pytest.mark.parametrize("rules", EXPLODING.values(), ids=EXPLODING)
def test_f02_what_explodes_at_once_is_refused_by_its_field(live: Live, rules: str) -> None:
    response = live.post("/v1/completions", **asked(rules, structured_outputs={"grammar": f"start: a\n{rules}"}))
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("structured_outputs", "invalid_value")
    assert live.completion(prompt=[5], max_tokens=2)["usage"]["completion_tokens"] == 2


def test_f02_what_explodes_on_the_way_ends_its_own_request_and_names_the_field(live: Live) -> None:
    neighbours = [{"prompt": [9, number], "max_tokens": 60} for number in range(4)]
    neighbours.append(asked('a: "x"+', max_tokens=180, min_tokens=0))
    alone = [live.completion(**request)["choices"][0]["text"] for request in neighbours]
    process = engine_pid(live.service.client)
    with ThreadPoolExecutor(8) as pool:
        failing = [pool.submit(live.post, "/v1/completions", **asked(rules)) for rules in EXPLODING.values()]
        others = list(pool.map(lambda request: live.completion(**request)["choices"][0]["text"], neighbours))
    assert others == alone
    for answer in failing:
        response = answer.result()
        assert response.status_code == 400, response.text[:300]
        error = response.json()["error"]
        assert (error["param"], error["code"]) == ("structured_outputs", "grammar_failed")
        assert error["message"].startswith("Invalid 'structured_outputs': the grammar cannot be followed any further")
        assert len(error["message"]) < 500
    assert engine_pid(live.service.client) == process
    assert live.service.client.live == 0


def test_f02_in_a_stream_the_text_so_far_comes_before_the_error(live: Live) -> None:
    texts: list[str] = []
    (rules, *_) = EXPLODING.values()
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        fields = asked(rules)
        extra = {name: fields.pop(name) for name in ("structured_outputs", "min_tokens")}
        stream = client.completions.create(model="smollm2", stream=True, extra_body=extra, **fields)
        with pytest.raises(openai.APIError) as found:
            texts.extend(chunk.choices[0].text for chunk in stream)
    assert "".join(texts).startswith(HEAD + "x")
    assert (found.value.code, found.value.param) == ("grammar_failed", "structured_outputs")
