"""Routes that tell without computing."""

import httpx
import pytest
from support.live import Live

from octavo.model.memory import block_norms
from octavo.server import protocol

USER = {"role": "user", "content": "Say something."}


def ask(live: Live, path: str, **fields: object) -> httpx.Response:
    return httpx.post(live.url + path, json=fields, timeout=60)


def test_a_text_becomes_the_tokens_it_would_be_as_a_prompt(live: Live) -> None:
    text = "Hello 🌶 world"
    answer = ask(live, "/tokenize", prompt=text, return_token_strs=True).json()
    assert answer["tokens"] == live.tokenizer.encode(text)
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 2048
    assert answer["token_strs"] == [live.tokenizer.token_text(token) for token in answer["tokens"]]
    plain = ask(live, "/tokenize", model="smollm2", prompt=text, add_special_tokens=False).json()
    assert plain["tokens"] == live.tokenizer.encode(text, add_special_tokens=False)
    assert plain["token_strs"] is None
    assert ask(live, "/tokenize", prompt="").json()["tokens"] == live.tokenizer.encode("")


def test_a_conversation_becomes_the_tokens_of_its_prompt(live: Live) -> None:
    count = live.chat(messages=[USER], max_tokens=1)["usage"]["prompt_tokens"]
    answer = ask(live, "/tokenize", messages=[USER]).json()
    assert answer["count"] == count
    open_ended = ask(live, "/tokenize", messages=[USER], add_generation_prompt=False).json()
    assert open_ended["tokens"] == answer["tokens"][: open_ended["count"]]
    assert open_ended["count"] < count


def test_tokens_become_their_text_special_ones_included(live: Live) -> None:
    tokens = ask(live, "/tokenize", messages=[USER]).json()["tokens"]
    text = ask(live, "/detokenize", model="smollm2", tokens=tokens).json()["prompt"]
    assert live.service.template is not None
    assert text == live.service.template.render([USER])
    assert ask(live, "/detokenize", tokens=[]).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [USER], "chat_template": "{{ 1 }}"}, "chat_template"),
        ("/tokenize", {"messages": [USER], "chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs"),
        ("/tokenize", {"messages": [USER], "chat_template_kwargs": {"a": [1]}}, "chat_template_kwargs"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [49_152]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [1.0]}, "tokens"),
        ("/detokenize", {"tokens": [5] * 2049}, "tokens"),
    ],
)
def test_bad_fields_are_refused_by_name(live: Live, path: str, fields: dict, param: str) -> None:
    response = ask(live, path, **fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_an_unknown_model_is_not_found(live: Live) -> None:
    for path, fields in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})):
        assert ask(live, path, model="other", **fields).status_code == 404
    assert ask(live, "/v1/completions/render", model="other", prompt="a").status_code == 404


def test_a_completion_is_rendered_as_the_engine_would_get_it(live: Live) -> None:
    before = live.metric("octavo_request_started_total")
    rendered = ask(
        live,
        "/v1/completions/render",
        model="smollm2",
        prompt=["a b", "c"],
        n=2,
        max_tokens=7,
        stop="x",
        cache_salt="s",
    ).json()
    assert [item["token_ids"] for item in rendered] == [live.tokenizer.encode("a b"), live.tokenizer.encode("c")]
    assert len({item["request_id"] for item in rendered}) == 2
    for item in rendered:
        assert (item["model"], item["stream"], item["cache_salt"]) == ("smollm2", False, "s")
        sampling = item["sampling_params"]
        assert (sampling["n"], sampling["max_tokens"], sampling["stop"], sampling["seed"]) == (2, 7, ["x"], None)
    assert live.metric("octavo_request_started_total") == before, "nothing ran"
    refused = ask(live, "/v1/completions/render", model="smollm2", prompt=[5] * 3000)
    assert refused.json()["error"]["code"] == "context_length_exceeded"


def test_a_conversation_is_rendered_as_the_engine_would_get_it(live: Live) -> None:
    rendered = ask(live, "/v1/chat/completions/render", model="smollm2", messages=[USER], seed=5).json()
    assert rendered["token_ids"] == ask(live, "/tokenize", messages=[USER]).json()["tokens"]
    assert rendered["sampling_params"]["max_tokens"] == 2048 - len(rendered["token_ids"])
    assert rendered["sampling_params"]["seed"] == 5


def test_info_tells_what_runs_and_agrees_with_the_metrics(live: Live) -> None:
    info = httpx.get(f"{live.url}/info").json()
    assert info.keys() == {"version", "device", "model", "limits", "memory", "requests"}
    assert info["version"] == httpx.get(f"{live.url}/version").json()["version"]
    assert info["model"]["id"] == "smollm2"
    assert info["model"]["aliases"] == ["alias/with-slash"]
    assert info["model"]["fingerprint"] == live.completion(prompt="a", max_tokens=1)["system_fingerprint"]
    assert info["limits"]["max_model_len"] == 2048
    assert info["limits"]["n"] == protocol.MAX_CHOICES
    kv = info["memory"]["kv"]
    assert kv["blocks"] == kv["used"] + kv["cached"] + kv["free"]
    assert info["memory"]["budget"] == live.metric("octavo_memory_budget_bytes")
    for bucket in info["memory"]["buckets"]:
        assert bucket["planned"] >= bucket["allocated"] >= 0
    assert info["requests"].keys() == {"running", "waiting"}


def test_the_block_of_info_adds_up_to_the_model(live: Live) -> None:
    model, config = httpx.get(f"{live.url}/info").json()["model"], live.service.config
    block = sum(matrix["parameters"] for matrix in model["block"])
    assert all(matrix["parameters"] == matrix["inputs"] * matrix["outputs"] for matrix in model["block"])
    embedding = config.vocabulary * config.width
    # SmolLM2-135M has tied embeddings, no biases, and one norm after its 30 blocks.
    assert model["layers"] * (block + block_norms(config)) + embedding + config.width == 134_515_008
