"""Bad input: one clear line, nothing lost. After every refusal an ordinary request succeeds on the same engine."""

import json

import httpx
import pytest
from support.live import Live

CONTEXT = 2048
VOCABULARY = 49_152


def ordinary(live: Live) -> None:
    assert live.completion(prompt="ordinary", max_tokens=2)["usage"]["completion_tokens"] == 2


def refused(live: Live, path: str, body: object, param: str | None, status: int = 400, said: str = "") -> dict:
    """Post what is refused. said: what the message may repeat of the names of models."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = httpx.post(live.url + path, content=data, headers={"Content-Type": "application/json"}, timeout=30)
    assert response.status_code == status, response.text
    assert len(response.content) < 4096, "A16: an error does not echo its input"
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    assert "\n" not in error["message"]
    assert "Traceback" not in error["message"]
    own = error["message"].replace(said, "").replace("/v1/completions", "").replace("application/json", "")
    assert "/" not in own
    ordinary(live)
    return error


@pytest.mark.parametrize(
    ("field", "raw"),
    [
        ("temperature", "NaN"),
        ("temperature", "Infinity"),
        ("temperature", "-Infinity"),
    ],
)
def test_a04_literals_that_are_no_json_are_refused(live: Live, field: str, raw: str) -> None:
    body = f'{{"model":"smollm2","prompt":"a","{field}":{raw}}}'.encode()
    assert refused(live, "/v1/completions", body, None)["code"] == "invalid_json"


FLOATS = [
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
]


@pytest.mark.parametrize("field", FLOATS)
@pytest.mark.parametrize("raw", ["1e999", "-1e999", "999999.0", "-3", '"1"', "true", "[]"])
def test_a04_a06_numbers_out_of_range_are_refused_by_name(live: Live, field: str, raw: str) -> None:
    body = f'{{"model":"smollm2","prompt":"a","{field}":{raw}}}'.encode()
    response = httpx.post(
        live.url + "/v1/completions", content=body, headers={"Content-Type": "application/json"}, timeout=30
    )
    assert response.status_code == 400
    assert response.json()["error"]["param"] in (field, None)
    if "999" not in raw or raw == "999999.0":
        assert response.json()["error"]["param"] == field


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 5_000_000}, "n"),
        ({"n": 0}, "n"),
        ({"n": 1.5}, "n"),
        ({"logprobs": 1_000_000_000}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"min_tokens": 1_000_000_000}, "min_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": 7}, "stop"),
        ({"stop_token_ids": [VOCABULARY]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [2**63]}, "stop_token_ids"),
        ({"logit_bias": {"191222": -100, "99999999": 5}}, "logit_bias"),
        ({"logit_bias": {"abc": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 1000}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"best_of": 3}, "best_of"),
        ({"stream": "yes"}, "stream"),
        ({"echo": 1}, "echo"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"priority": 2**31}, "priority"),
        ({"priority": 0.5}, "priority"),
    ],
)
def test_a08_a10_bad_values_are_refused_by_name(live: Live, fields: dict, param: str) -> None:
    refused(live, "/v1/completions", {"model": "smollm2", "prompt": "a", **fields}, param)


@pytest.mark.parametrize(
    "prompt",
    [[1, 2, VOCABULARY], [-1], [5279552648203111001], [[1], [VOCABULARY]], [1.5], [True], [[None] * 4000], [1, "a"]],
)
def test_a09_token_ids_that_do_not_exist_are_refused(live: Live, prompt: object) -> None:
    refused(live, "/v1/completions", {"model": "smollm2", "prompt": prompt}, "prompt")


LARGE = "x" * 100_000


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": [[None] * 4000]},
        {"prompt": [[LARGE]]},
        {"prompt": "a", "stop": [None] * 4000},
        {"prompt": "a", "stop": [LARGE]},
        {"prompt": "a", "temperature": LARGE},
        {"prompt": "a", "logit_bias": {LARGE: 1}},
        {"prompt": "a", "logit_bias": {"5": LARGE}},
        {"prompt": "a", "n": int("9" * 4000)},
        {"prompt": "a", "stream_options": {LARGE: 1}, "stream": False},
        {"prompt": "a", "bad_words": [{LARGE: LARGE}] * 10},
        {"prompt": "a", "model": LARGE},
        {"prompt": LARGE * 3},
        {"messages": [{"role": LARGE, "content": None}] * 20},
        {"messages": [{"role": "user", "content": [{"type": LARGE}]}]},
        {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {LARGE: [1]}},
        {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {LARGE: "a", "tools": LARGE}},
    ],
)
def test_a16_an_error_is_short_however_large_the_input(live: Live, fields: dict) -> None:
    path = "/v1/completions" if "prompt" in fields else "/v1/chat/completions"
    response = httpx.post(live.url + path, json={"model": "smollm2", **fields}, timeout=30)
    assert response.status_code in (400, 404)
    assert len(response.content) < 1024
    assert "xxxx" not in response.text
    ordinary(live)


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], None])
def test_a12_an_empty_prompt_is_refused(live: Live, prompt: object) -> None:
    refused(live, "/v1/completions", {"model": "smollm2", "prompt": prompt}, "prompt")


def test_a12_a_missing_prompt_is_refused(live: Live) -> None:
    error = refused(live, "/v1/completions", {"model": "smollm2"}, "prompt")
    assert error["code"] == "missing_required_parameter"


def test_a15_a_giant_list_of_prompts_is_refused(live: Live) -> None:
    refused(live, "/v1/completions", {"model": "smollm2", "prompt": ["a"] * 100_000}, "prompt")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("suffix", "end"),
        ("guided_json", {"type": "object"}),
        ("use_beam_search", True),
        ("logprob_token_ids", [5]),
        ("repeat_penalty", 1.1),
        ("n_predict", 5),
        ("options", {"num_ctx": 2048}),
    ],
)
def test_a17_what_is_not_built_is_refused_not_ignored(live: Live, field: str, value: object) -> None:
    for path, prompt in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        error = refused(live, path, {"model": "smollm2", **prompt, field: value}, field)
        assert error["code"] == "unsupported_parameter"


def test_harmless_and_neutral_fields_are_ignored(live: Live) -> None:
    extra = {"user": "me", "metadata": {"a": "b"}, "store": True, "suffix": None, "tools": [], "unknown": 1}
    live.completion(prompt="a", max_tokens=1, **extra)
    live.chat(messages=[{"role": "user", "content": "a"}], max_tokens=1, response_format={"type": "text"}, **extra)


@pytest.mark.parametrize("stream", [False, True])
def test_a22_a23_a_prompt_beyond_the_context_is_refused_with_both_numbers(live: Live, stream: bool) -> None:
    for length in (CONTEXT, CONTEXT + 1):
        body = {"model": "smollm2", "prompt": [5] * length, "stream": stream}
        error = refused(live, "/v1/completions", body, "prompt")
        assert error["code"] == "context_length_exceeded"
        assert str(CONTEXT) in error["message"]
        assert str(length) in error["message"]
    fits = live.completion(prompt=[5] * (CONTEXT - 1))
    assert fits["usage"]["completion_tokens"] == 1
    assert fits["choices"][0]["finish_reason"] == "length"


def test_a_completion_that_could_leave_the_context_is_refused(live: Live) -> None:
    body = {"model": "smollm2", "prompt": [5] * 2000, "max_tokens": 49}
    assert refused(live, "/v1/completions", body, "max_tokens")["code"] == "context_length_exceeded"
    assert live.completion(prompt=[5] * 2000, max_tokens=48)["usage"]["total_tokens"] == CONTEXT


def test_a26_a_conversation_beyond_the_context_is_refused(live: Live) -> None:
    body = {"model": "smollm2", "messages": [{"role": "user", "content": "word " * 3000}]}
    assert refused(live, "/v1/chat/completions", body, "messages")["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"", 400),
        (b"[]", 400),
        (b'"text"', 400),
        (b'{"model":"smollm2","prompt":"\xff"}', 400),
        (b'{"model":"smollm2","prompt":"\\ud800"}', 400),
        (b"[" * 100_000, 400),
        (b'{"a":' * 100_000, 400),
        (b'{"model":"smollm2","prompt":"' + b"a" * (5 * 1024 * 1024) + b'"}', 413),
    ],
)
def test_a30_malformed_bodies_are_refused(live: Live, body: bytes, status: int) -> None:
    refused(live, "/v1/completions", body, None, status)


def test_a30_a_body_sent_in_pieces_is_measured_too(live: Live) -> None:
    def pieces() -> object:
        yield b'{"model":"smollm2","prompt":"'
        for _ in range(100):
            yield b"a" * 65_536

    headers = {"Content-Type": "application/json"}
    response = httpx.post(f"{live.url}/v1/completions", content=pieces(), headers=headers, timeout=30)
    assert response.status_code == 413
    ordinary(live)


def test_a30_another_media_type_is_refused(live: Live) -> None:
    response = httpx.post(f"{live.url}/v1/completions", content=b"{}", headers={"Content-Type": "text/plain"})
    assert response.status_code == 415
    assert "Content-Type: application/json" in response.json()["error"]["message"]


def test_an_unknown_model_route_or_method_has_the_same_shape(live: Live) -> None:
    for model in ("other", "../../etc/passwd", "a\x00b", ""):
        said = f"The model {model!r} is not served here; served: 'smollm2', 'alias/with-slash'."
        error = refused(live, "/v1/completions", {"model": model, "prompt": "a"}, "model", 404, said)
        assert (error["code"], error["message"]) == ("model_not_found", said)
    assert httpx.get(f"{live.url}/v1/models/other").json()["error"]["code"] == "model_not_found"
    said = f"The model {'m' * 64!r} is not served here; served: 'smollm2', 'alias/with-slash'."
    assert refused(live, "/v1/completions", {"model": "m" * 500, "prompt": "a"}, "model", 404, said)["message"] == said
    unknown = httpx.get(f"{live.url}/nowhere")
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "invalid_request_error")
    method = httpx.get(f"{live.url}/v1/completions")
    assert method.status_code == 405
    assert method.headers["allow"] == "POST"


def test_a03_a_request_id_is_echoed_only_if_it_is_harmless(live: Live) -> None:
    given = httpx.get(f"{live.url}/version", headers={"X-Request-Id": "abc-1.2:3"})
    assert given.headers["x-request-id"] == "abc-1.2:3"
    for harmful in ("a" * 129, "a b", "<script>"):
        response = httpx.get(f"{live.url}/version", headers={"X-Request-Id": harmful})
        assert response.headers["x-request-id"] != harmful


def test_a01_equal_request_ids_do_not_meet(live: Live) -> None:
    answers = [live.completion(prompt="Tell", max_tokens=20, request_id="id", seed=1) for _ in range(2)]
    assert answers[0]["choices"][0]["text"] == answers[1]["choices"][0]["text"]
    assert answers[0]["id"] != answers[1]["id"]


def test_the_openapi_document_describes_the_bodies(live: Live) -> None:
    document = httpx.get(f"{live.url}/openapi.json").json()
    assert document["paths"].keys() >= {"/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics"}
    schemas = document["components"]["schemas"]
    assert {"CompletionRequest", "ChatRequest", "Message"} <= schemas.keys()
    assert "#/$defs" not in json.dumps(document)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [5, VOCABULARY]}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"allowed_token_ids": 5}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": [" "], "allowed_token_ids": [5]}, "bad_words"),
        ({"bad_words": "word"}, "bad_words"),
        ({"bad_words": ["a"] * 129}, "bad_words"),
        ({"bad_words": ["x1y2z3" * 40] * 20}, "bad_words"),
        ({"bad_words": ["the"], "allowed_token_ids": "THE"}, "bad_words"),
    ],
)
def test_restrictions_that_make_no_sense_are_refused(live: Live, fields: dict, param: str) -> None:
    if fields.get("allowed_token_ids") == "THE":
        fields = fields | {"allowed_token_ids": live.tokenizer.encode("the", add_special_tokens=False)}
    refused(live, "/v1/completions", {"model": "smollm2", "prompt": "a", **fields}, param)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": "5"}, "Invalid 'max_tokens': it must be an integer, not a string."),
        ({"max_tokens": 5.5}, "Invalid 'max_tokens': it must be an integer, not 5.5."),
        ({"temperature": 3}, "Invalid 'temperature': it must be at most 2, not 3."),
        ({"temperature": True}, "Invalid 'temperature': it must be a number, not true."),
        ({"n": 17}, "Invalid 'n': it must be at most 16, not 17."),
        ({"echo": "yes"}, "Invalid 'echo': it must be true or false, not a string."),
        ({"repetition_penalty": 0}, "Invalid 'repetition_penalty': it must be more than 0, not 0."),
        ({"stop": ["a"] * 17}, "Invalid 'stop': it must be at most 16 items, not 17."),
        ({"stop": [""]}, "Invalid 'stop[0]': it must be at least 1 characters, not 0."),
        ({"cache_salt": "x" * 300}, "Invalid 'cache_salt': it must be at most 256 characters, not 300."),
        ({"truncation_side": "middle"}, "Invalid 'truncation_side': it must be 'left' or 'right', not this string."),
        ({"stream_options": 5}, "Invalid 'stream_options': it must be an object, not 5."),
        (
            {"response_format": {"type": "text", "x": 1}},
            "Invalid 'response_format.x': this server knows no such field.",
        ),
        ({"logit_bias": {"a": 1}}, "Invalid 'logit_bias': keys must be token ids, for example {\"50256\": -100}."),
    ],
)
def test_a_message_names_the_field_what_it_takes_and_what_it_got(live: Live, fields: dict, message: str) -> None:
    response = live.post("/v1/completions", **{"prompt": "a", **fields})
    assert (response.status_code, response.json()["error"]["message"]) == (400, message)
