"""One request neither stops nor starves the server: what has done so to others."""

import json
import math

import httpx
import pytest
from support.attacked import Attacked
from support.live import NO_TLS
from support.scripted_engine import VOCABULARY

HUGE = 10**9
FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
USER = [{"role": "user", "content": "a"}]

REFUSED: dict[str, list[dict[str, object]]] = {
    "cve_2026_34756_cve_2024_8939_choices": [{"n": HUGE}, {"n": 17}, {"best_of": HUGE}, {"n": -1}],
    "cve_2026_73559_prompts": [{"prompt": [[5]] * 100_000}, {"prompt": ["a"] * 65}],
    "cve_2024_8768_empty_prompts": [{"prompt": []}, {"prompt": [[]]}, {"prompt": [[5], []]}],
    "cve_2026_114051_more_at_least_than_at_most": [
        {"min_tokens": HUGE, "max_tokens": None},
        {"min_tokens": 5, "max_tokens": 4},
        {"min_tokens": 2**70},
    ],
    "cve_2026_116181_stop_ids": [
        {"stop_token_ids": [wrong]} for wrong in (-1, VOCABULARY, 2**31, 2**63, 10**30, True, 1.5, "1", None)
    ],
    "cve_2026_93840_cve_2026_93989_ids_that_only_the_tokenizer_has": [
        {"allowed_token_ids": [VOCABULARY]},
        {"allowed_token_ids": [-1]},
        {"logit_bias": {str(VOCABULARY): 1}},
        {"logit_bias": {"-1": 1}},
        {"prompt": [VOCABULARY]},
    ],
    "cve_2026_116173_alternatives": [{"logprobs": 129}, {"logprobs": -1}, {"prompt_logprobs": 129}],
    "cve_2026_55574_pysec_2026_3933_expressions": [
        {"structured_outputs": {"regex": "((x{1,1000}){1,1000}){1,1000}"}},
        {"structured_outputs": {"regex": "(" * 5000}},
    ],
    "cve_2026_105757_cve_2025_48942_cve_2025_48943_cve_2025_48944_grammars": [
        {"structured_outputs": {"regex": "["}},
        {"structured_outputs": {"json": {"type": "unheard of"}}},
        {"structured_outputs": {"json": {"type": "string", "pattern": "("}}},
        {"structured_outputs": {"grammar": "root ::= root root"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#/nowhere"}}}},
    ],
    "cve_2026_21869_negative_numbers": [{"max_tokens": -1}, {"top_k": -2}, {"min_tokens": -1}],
}


def test_each_class_has_a_name_of_its_own() -> None:
    assert len(REFUSED) == len({name.partition("_p")[0] for name in REFUSED})


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_too_much_is_refused_before_the_engine_hears_of_it(attacked: Attacked, name: str) -> None:
    engine, started = attacked.daemon.engine(), started_requests(attacked)
    for fields in REFUSED[name]:
        response = attacked.post("/v1/completions", **{"prompt": [5], **fields})
        assert response.status_code == 400, (fields, response.text)
        assert response.json()["error"]["param"] in {None, *fields, "prompt"}
    assert attacked.daemon.engine() == engine
    assert started_requests(attacked) == started
    assert attacked.answers()


def started_requests(attacked: Attacked) -> str:
    lines = httpx.get(f"{attacked.url}/metrics").text.splitlines()
    return next(line for line in lines if line.startswith("octavo_request_started_total"))


@pytest.mark.parametrize("field", FLOATS)
@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999", '"nan"', "-1e308"])
def test_numbers_that_are_none_are_refused_cve_2026_54235(attacked: Attacked, field: str, literal: str) -> None:
    body = f'{{"model": "smollm2", "prompt": [5], "max_tokens": 1, "{field}": {literal}}}'
    kind = {"content-type": "application/json"}
    refused = httpx.post(f"{attacked.url}/v1/completions", content=body, headers=kind, verify=NO_TLS)
    assert refused.status_code == 400, refused.text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_the_other_routes_refuse_the_same_cve_2026_116173_pysec_2026_3933(attacked: Attacked, path: str) -> None:
    """Fixes that were made for one route have missed others before."""
    prompt = {"input": "a"} if path.endswith("responses") else {"messages": USER}
    for wrong in ({"top_logprobs": 129}, {"stop_token_ids": [VOCABULARY]}, {"n": HUGE}, {"temperature": math.inf}):
        body = json.dumps({"model": "smollm2", "max_tokens": 1, **prompt, **wrong})
        kind = {"content-type": "application/json"}
        assert httpx.post(attacked.url + path, content=body, headers=kind, verify=NO_TLS).status_code == 400, wrong
