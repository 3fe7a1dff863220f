"""Requests made from the OpenAPI document, sensible and not: every answer is as documented, and none is a fault.

OCTAVO_API_REQUESTS says how many (`make fuzz-api` sends 3,000). The engine tells stories; the rest is real.
"""

import logging
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import APIOperation, Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)
from support.live import Live, engine_pid, live_server, story_command

from octavo.scheduler.messages import EngineConfig

log = logging.getLogger(__name__)

REQUESTS = int(os.environ.get("OCTAVO_API_REQUESTS", "150"))
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server with a short context, so that no answer is long."""
    command = story_command(tmp_path_factory.mktemp("schema"), {})
    with live_server(EngineConfig(model="smollm2", max_model_len=128), command=command) as server:
        yield server


def operations(live: Live) -> list[APIOperation]:
    document = httpx.get(f"{live.url}/openapi.json").json()
    for described in document["components"]["schemas"].values():
        if "model" in described.get("required", ()):
            described["properties"]["model"] = {"enum": list(live.service.names)}  # else most would not be found
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=live.url)
    return [result.ok() for result in schema.get_all_operations()]


def try_out(operation: APIOperation, examples: int) -> list[int]:
    """Send so many requests, half of them sensible if they have a body; return the statuses of the answers."""
    if operation.method != "post":
        return send_all(operation.as_strategy(generation_mode=GenerationMode.POSITIVE), examples)
    halves = ((GenerationMode.POSITIVE, -(-examples // 2)), (GenerationMode.NEGATIVE, examples // 2))
    return [status for mode, half in halves for status in send_all(operation.as_strategy(generation_mode=mode), half)]


def spelled(value: Any) -> Any:
    """A value with its whole numbers as integers: to JSON Schema 1.0 is one, to this server it is not."""
    if isinstance(value, dict):
        return {key: spelled(item) for key, item in value.items()}
    if isinstance(value, list):
        return [spelled(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def send_all(cases: st.SearchStrategy[Case], count: int) -> list[int]:
    statuses: list[int] = []

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases)
    def send(case: Case) -> None:
        if case.meta is not None and case.meta.generation.mode is GenerationMode.POSITIVE:
            case.body = spelled(case.body)
        response = case.call(timeout=60)
        statuses.append(response.status_code)
        case.validate_response(response, checks=CHECKS)

    send()
    return statuses


def test_requests_made_from_the_schema_get_documented_answers(small: Live) -> None:
    process = engine_pid(small.service.client)
    found = operations(small)
    writing = [operation for operation in found if operation.method == "post"]
    assert len(writing) >= 6
    statuses: dict[str, list[int]] = {}
    for operation in found:
        examples = -(-REQUESTS // len(writing)) if operation.method == "post" else 10
        statuses[operation.path] = try_out(operation, examples)
        log.info("%s: %s", operation.label, dict(Counter(statuses[operation.path])))
    assert sum(map(len, statuses.values())) >= REQUESTS
    for operation in writing:
        assert 200 in statuses[operation.path], f"nothing was accepted by {operation.path}"
        assert 400 in statuses[operation.path], f"nothing was refused by {operation.path}"
    assert small.completion(prompt=[5], max_tokens=1)["usage"]["completion_tokens"] == 1
    assert engine_pid(small.service.client) == process
