"""F1: an engine that dies in the middle of an answer that has a form to keep: a schema, a call, a stop string."""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from support.checkpoints import tiny_model
from support.live import Live, answer, live_server, story_command
from support.schemas import COLOUR, POINT, array, record
from support.vocabularies import smollm2

from octavo.scheduler.messages import EngineConfig
from octavo.server.revival import RestartPolicy
from octavo.server.spawning import ENGINE_COMMAND

OFTEN = RestartPolicy(deaths=1000, delays=(0.0,))
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
POINTS = record(points=array(POINT, minItems=2, maxItems=3), colour=COLOUR)
MESSAGES = [{"role": "user", "content": "Where?"}]
TOOL = {"type": "function", "function": {"name": "draw", "parameters": POINTS}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "points", "schema": POINTS}}
FORMS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": MESSAGES, "response_format": SCHEMA}),
    (CHAT, {"messages": MESSAGES, "response_format": SCHEMA, "n": 3, "seed": 7, "temperature": 1.2, "logprobs": True}),
    (CHAT, {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "required"}),
    (CHAT, {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "required", "seed": 3, "temperature": 1.0}),
    (TEXT, {"prompt": [5, 6], "structured_outputs": {"regex": "([a-z]{3,6} ){8}"}, "logprobs": 3}),
    (TEXT, {"prompt": [5, 7], "structured_outputs": {"regex": "[0-9 ]*"}, "min_tokens": 30, "max_tokens": 30}),
    (TEXT, {"prompt": [5, 8], "n": 3, "seed": 11, "temperature": 1.0, "logprobs": 2, "echo": True, "max_tokens": 30}),
    (TEXT, {"prompt": [5, 9], "bad_words": [" the", "a"], "min_tokens": 20, "max_tokens": 30}),
]


def whole(live: Live, path: str, fields: dict[str, Any]) -> list[dict[str, Any]]:
    response = live.post(path, **{"max_tokens": 80, "seed": 5, **fields})
    assert response.status_code == 200, response.text
    return response.json()["choices"]


def joined(before: Any, more: Any) -> Any:
    """What two parts of a streamed choice are together: texts and lists one after the other."""
    if isinstance(before, dict) and isinstance(more, dict):
        return {name: joined(before.get(name), more.get(name)) for name in before | more}
    if isinstance(before, list) and before and isinstance(before[0], dict) and "index" in before[0]:
        calls = {call["index"]: call for call in before}
        for call in more or ():
            calls[call["index"]] = joined(calls.get(call["index"]), call)
        return list(calls.values())
    if isinstance(before, str | list) and isinstance(more, str | list):
        return before + more
    return before if more is None else more


def streamed(live: Live, path: str, fields: dict[str, Any]) -> dict[int, Any]:
    """A stream's choices, each in one piece, but for the ids of calls."""
    found: dict[int, Any] = {}
    for chunk in live.stream(path, **{"max_tokens": 80, "seed": 5, **fields}):
        for choice in chunk["choices"]:
            index = choice["index"]
            constant = {"index": index, "seed": choice.get("seed")}
            found[index] = joined(found.get(index), choice) | constant
    return json.loads(json.dumps(found), object_hook=without_id)


def without_id(value: dict[str, Any]) -> dict[str, Any]:
    return {name: entry for name, entry in value.items() if name not in ("id", "type", "role")}


def answers(live: Live, *, stream: bool) -> list[object]:
    ask = streamed if stream else whole
    with ThreadPoolExecutor(len(FORMS)) as pool:
        found = list(pool.map(lambda form: ask(live, *form), FORMS))
    return json.loads(json.dumps(found), object_hook=without_id)


def deaths(steps: Sequence[int]) -> tuple[str, ...]:
    """Each engine is killed before its step of this number."""
    return tuple(f"engine-killed:step={step}:life={life}" for life, step in enumerate(steps))


def keep_their_form(config: EngineConfig, command: Sequence[str], steps: Sequence[int], *, stream: bool) -> None:
    with live_server(config, command=command) as undisturbed:
        expected = answers(undisturbed, stream=stream)
        bodies = [body for form in FORMS[:4] for body in whole(undisturbed, *form)]
    dying = msgspec.structs.replace(config, fault=deaths(steps))
    with live_server(dying, command=command, policy=OFTEN) as live:
        assert answers(live, stream=stream) == expected
        assert live.metric("octavo_engine_restarts_total") == len(steps)
        assert live.metric("octavo_requests_resumed_total") > len(steps)
    for message in (body["message"] for body in bodies):
        calls = [call["function"]["arguments"] for call in message.get("tool_calls") or ()]
        jsonschema.validate(json.loads(calls[0] if calls else message["content"]), POINTS)


def test_f1_every_form_of_a_stream_outlives_the_engines_of_a_tiny_model(tmp_path: Path) -> None:
    tiny_model(tmp_path, "llama", vocabulary=49_152, max_context=512)
    config = EngineConfig(model=str(tmp_path), dtype="float32")
    keep_their_form(config, ENGINE_COMMAND, [9, 14], stream=True)


def test_f1_every_form_of_a_whole_answer_outlives_several_engines(tmp_path: Path) -> None:
    keep_their_form(EngineConfig(model="smollm2"), story_command(tmp_path, {}), [5, 6, 9], stream=False)


TEXT_WITH_STOP = "One two three STOP here and now"
MARKER = 900
"""Begins the story of this text, whose tokens are one, two, three, ST, OP, here, and, now."""


@pytest.mark.parametrize(("step", "stream"), [(5, True), (6, False), (7, True)])
def test_f1_a_stop_string_in_whose_midst_an_engine_dies_still_ends_the_answer(
    tmp_path: Path, step: int, stream: bool
) -> None:
    story = [MARKER, *smollm2().encode(TEXT_WITH_STOP, add_special_tokens=False)]
    assert len(story) == 9
    config = EngineConfig(model="smollm2", fault=deaths([step]))
    with live_server(config, command=story_command(tmp_path, {MARKER: story}), policy=OFTEN) as live:
        text, *_ = answer(live, {"prompt": [MARKER], "stop": ["STOP here and", "STOP here or"]}, stream=stream)
        assert text == {0: ("One two three ", "stop")}
        assert live.metric("octavo_engine_restarts_total") == 1
