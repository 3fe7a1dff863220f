"""Structured output on the real default model: whatever ends with "stop" follows what was asked for."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field
from support.live import Live, live_server
from support.schemas import COLOUR, FURTHER, POINT, REGEXES, SCHEMAS, array, record

from octavo.scheduler.messages import EngineConfig

PROMPT = [{"role": "user", "content": "Answer in JSON."}]
POINTS = record(points=array(POINT, minItems=2, maxItems=3), colour=COLOUR)


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_server(EngineConfig(model="smollm2", max_model_len=1024)) as server:
        yield server


def at_once(live: Live, requests: list[dict[str, Any]]) -> list[dict]:
    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(lambda request: live.chat(**request)["choices"][0], requests))


def following(schema: object, **fields: object) -> dict[str, Any]:
    """A request for an answer that follows a schema."""
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    return {"messages": PROMPT, "response_format": wanted, "max_tokens": 120, "seed": 1, **fields}


def validate(choice: dict[str, Any], schema: dict[str, Any]) -> None:
    instance = json.loads(choice["message"]["content"])
    jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker()).validate(instance)


def test_the_schemas_of_the_tests_accept_what_they_should() -> None:
    for _, schema, instance in SCHEMAS:
        jsonschema.Draft202012Validator(schema).validate(instance)


def test_what_stops_validates_against_its_schema(live: Live) -> None:
    schemas = [schema for _, schema, _ in SCHEMAS] + FURTHER
    assert len(schemas) >= 60
    answers = at_once(live, [following(schema, seed=index) for index, schema in enumerate(schemas)])
    stopped = 0
    for schema, choice in zip(schemas, answers, strict=True):
        if choice["finish_reason"] == "stop":
            validate(choice, schema)
            stopped += 1
        else:
            assert choice["finish_reason"] == "length", schema
    assert stopped >= 0.85 * len(schemas)


def test_regular_expressions_choices_and_grammars_are_followed_to_their_end(live: Live) -> None:
    outputs: list[tuple[dict[str, Any], str]] = [
        ({"regex": regex}, regex) for regex, _ in REGEXES if "\\p" not in regex
    ]
    outputs += [
        ({"choice": ["yes", "no", 'it "depends"\n']}, 'yes|no|it "depends"\n'),
        ({"grammar": 'start: "a" item+ "z"\nitem: /[0-9]/ | "-"'}, "a[0-9-]+z"),
        ({"grammar": 'root ::= "x" [0-9] [0-9]? "y"'}, "x[0-9][0-9]?y"),
    ]
    requests = [{"messages": PROMPT, "structured_outputs": wanted, "max_tokens": 50} for wanted, _ in outputs]
    stopped = 0
    for (wanted, pattern), choice in zip(outputs, at_once(live, requests), strict=True):
        if choice["finish_reason"] == "stop":
            assert re.fullmatch(pattern, choice["message"]["content"]), wanted
            stopped += 1
    assert stopped >= 4


def test_json_object_is_an_object(live: Live) -> None:
    request = {"messages": PROMPT, "response_format": {"type": "json_object"}, "max_tokens": 60, "temperature": 0.5}
    for choice in at_once(live, [{**request, "seed": seed} for seed in range(8)]):
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["message"]["content"]), dict)
        assert choice["message"]["content"].startswith("{")


def test_f02_white_space_is_bounded(live: Live) -> None:
    (choice,) = live.chat(**following(POINTS, logit_bias={"198": 50, "216": 50, "256": 50}))["choices"]
    assert "  " not in choice["message"]["content"]
    assert "\n" not in choice["message"]["content"]


def test_a_stream_several_choices_and_a_completion_follow_as_well(live: Live) -> None:
    request = following(POINTS, n=3, temperature=1.2)
    whole = live.chat(**request)["choices"]
    texts = ["", "", ""]
    for chunk in live.stream("/v1/chat/completions", **request):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or ""
    assert texts == [choice["message"]["content"] for choice in whole]
    assert len(set(texts)) > 1
    for choice in whole:
        assert choice["finish_reason"] == "stop"
        validate(choice, POINTS)
    (raw,) = live.completion(prompt="A colour:", structured_outputs={"choice": [" red", " blue"]})["choices"]
    assert raw["text"] in (" red", " blue")


def test_the_clients_own_stop_ends_an_answer_where_it_says(live: Live) -> None:
    (choice,) = live.chat(**following(POINTS, stop=['"points"']))["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", '"points"')
    assert choice["message"]["content"] == "{"


def test_min_tokens_and_biases_bend_to_the_grammar(live: Live) -> None:
    choice = live.chat(messages=PROMPT, structured_outputs={"choice": ["a", "b"]}, min_tokens=20, max_tokens=30)
    assert choice["choices"][0]["message"]["content"] in ("a", "b")
    letters = live.chat(messages=PROMPT, structured_outputs={"regex": "[a-z]*"}, min_tokens=20, max_tokens=40)
    assert letters["usage"]["completion_tokens"] >= 20
    assert re.fullmatch("[a-z]*", letters["choices"][0]["message"]["content"])
    forced = live.tokenizer.encode("!", add_special_tokens=False)[0]
    (choice,) = live.chat(**following(COLOUR, logit_bias={str(forced): 100}))["choices"]
    validate(choice, COLOUR)


def test_neighbours_prefixes_and_preemption_change_nothing(live: Live) -> None:
    requests = [following(POINTS, seed=seed, temperature=1.0, max_tokens=60) for seed in range(4)]
    requests.append({"messages": PROMPT, "max_tokens": 60, "seed": 1, "ignore_eos": True})
    alone = [live.chat(**request)["choices"][0] for request in requests]
    assert at_once(live, requests) == alone
    with live_server(EngineConfig(model="smollm2", max_model_len=256, kv_blocks=16)) as small:
        assert at_once(small, requests) == alone
        assert small.metric("octavo_preemptions_total") > 0


class Answer(BaseModel):
    """What a client wants parsed."""

    colour: Literal["red", "green"]
    count: Annotated[int, Field(ge=0, le=99)]
    note: None = None


ANSWER = {"name": "answer", "schema": {**record(colour=COLOUR, note={"const": None}), "description": "é\n"}}


def test_responses_follow_their_text_format(live: Live) -> None:
    asked: dict[str, Any] = {"model": "smollm2", "input": "Answer in JSON.", "max_output_tokens": 60}
    formats: list[Any] = [
        {"type": "json_schema", "strict": True, "description": "d", **ANSWER},
        {"type": "json_object"},
        {"type": "text"},
    ]
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        for wanted in formats:
            whole = client.responses.create(**asked, text={"format": wanted}, temperature=0)
            with client.responses.stream(**asked, text={"format": wanted}, temperature=0) as stream:
                final = list(stream)[-1].response
            body = {name: value for name, value in wanted.items() if name != "type"}
            chat = {"type": wanted["type"], **({"json_schema": body} if body else {})}
            (choice,) = live.chat(messages=PROMPT, response_format=chat, max_tokens=60, temperature=0)["choices"]
            assert final.output_text == whole.output_text == choice["message"]["content"]
            assert whole.text.format.model_dump(by_alias=True, exclude_unset=True) == wanted
            assert final.text == whole.text
            if wanted is formats[0]:
                assert (whole.status, final.status) == ("completed", "completed")
                jsonschema.validate(json.loads(whole.output_text), ANSWER["schema"])
        parsed = client.responses.parse(**asked, text_format=Answer).output_parsed
        assert isinstance(parsed, Answer)
        with client.responses.stream(**asked, text_format=Answer) as stream:
            assert isinstance(stream.get_final_response().output_parsed, Answer)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}}, "response_format"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"),
        ({"structured_outputs": {"choice": [""]}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
        ({"structured_outputs": {"regex": "a"}, "bad_words": ["a"]}, "bad_words"),
        ({"structured_outputs": {"regex": "x" * 300_000}}, "structured_outputs"),
    ],
)
def test_a17_what_cannot_be_meant_is_refused(live: Live, fields: dict[str, Any], param: str) -> None:
    answer = live.post("/v1/chat/completions", messages=PROMPT, max_tokens=4, **fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert live.chat(messages=PROMPT, max_tokens=1)["usage"]["completion_tokens"] == 1
