"""Structured output on the real default model: whatever ends with "stop" follows what was asked for."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import pytest
from support.live import Live, live_server
from support.schemas import REGEXES, SCHEMAS

from octavo.scheduler.messages import EngineConfig

PROMPT = [{"role": "user", "content": "Answer in JSON."}]


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_server(EngineConfig(model="smollm2", max_model_len=1024)) as server:
        yield server


def at_once(live: Live, requests: list[dict[str, object]]) -> list[dict]:
    with ThreadPoolExecutor(32) as pool:
        return list(pool.map(lambda request: live.chat(**request)["choices"][0], requests))


def schema_format(schema: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def test_what_stops_validates_against_its_schema(live: Live) -> None:
    requests = [
        {"messages": PROMPT, "response_format": schema_format(schema), "max_tokens": 160, "seed": index}
        for index, (_, schema, _) in enumerate(SCHEMAS)
    ]
    stopped = 0
    for (name, schema, _), choice in zip(SCHEMAS, at_once(live, requests), strict=True):
        if choice["finish_reason"] == "stop":
            stopped += 1
            jsonschema.validate(
                json.loads(choice["message"]["content"]), schema, format_checker=jsonschema.FormatChecker()
            )
        else:
            assert choice["finish_reason"] == "length", name
    assert stopped >= 0.8 * len(SCHEMAS)


def test_a_regular_expression_is_matched_to_its_end(live: Live) -> None:
    requests = [
        {"messages": PROMPT, "structured_outputs": {"regex": regex}, "max_tokens": 80, "seed": 1}
        for regex, _ in REGEXES
    ]
    for (regex, _), choice in zip(REGEXES, at_once(live, requests), strict=True):
        if choice["finish_reason"] == "stop" and "\\p" not in regex:
            assert re.fullmatch(regex, choice["message"]["content"])
