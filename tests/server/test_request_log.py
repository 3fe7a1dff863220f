import json
import logging
import sys

import httpx
import pytest
from support.daemon import running

from octavo.scheduler.log_format import formatter
from octavo.scheduler.messages import EngineStats, StepReport, TokenEvent
from octavo.server.life import Life, Origin
from octavo.server.logs import log_request
from octavo.server.metrics import Metrics


def complete(url: str, identity: str, **fields: object) -> None:
    body = {"model": "smollm2", "prompt": list(range(5, 45)), "max_tokens": 4, **fields}
    response = httpx.post(f"{url}/v1/completions", json=body, headers={"x-request-id": identity}, timeout=60)
    assert response.status_code == 200


def test_json_lines_tell_of_each_request_once_and_of_no_prompt() -> None:
    with running("--log-format", "json") as daemon:
        complete(daemon.url, "first")
        complete(daemon.url, "second", n=2)
        daemon.process.terminate()
        daemon.wait()
    lines = [json.loads(line) for line in daemon.log]
    assert {line["source"] for line in lines} <= {"server", "engine"}
    assert all(line["time"] and line["level"] and line["message"] for line in lines)
    requests = [line for line in lines if "request_id" in line]
    assert sorted(line["request_id"] for line in requests) == ["first", "second/0", "second/1"]
    [first] = [line for line in requests if line["request_id"] == "first"]
    assert first["operation"] == "text_completion"
    assert first["model"] == "smollm2"
    assert first["finish_reason"] == "length"
    assert (first["prompt_tokens"], first["cached_tokens"], first["generated_tokens"]) == (40, 0, 4)
    assert [line["cached_tokens"] for line in requests if line["request_id"] != "first"] == [32, 32]
    assert 0 <= first["queue_seconds"] <= first["first_token_seconds"] <= first["seconds"]
    assert not any("44" in line["message"] for line in requests), "the prompt's last token"


def test_the_text_line_says_the_same() -> None:
    with running() as daemon:
        complete(daemon.url, "only")
        daemon.process.terminate()
        daemon.wait()
    [line] = [line for line in daemon.log if "request only" in line]
    assert "length, 40 prompt tokens, 0 of them cached, 4 generated; queue " in line


def test_a_request_that_never_ran_has_no_times_it_did_not_reach(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics()
    metrics.observers.append(log_request)
    metrics.request_started(1, 5)
    metrics.originates(1, Origin("waits", "chat", "m"))
    with caplog.at_level(logging.INFO, "octavo"):
        metrics.step(StepReport(events=(TokenEvent(request=1, finish="abort"),), stats=EngineStats()))
    [record] = caplog.records
    assert (record.fields["queue_seconds"], record.fields["first_token_seconds"]) == (None, None)
    assert record.fields["finish_reason"] == "abort"
    assert "queue -, first token -, all " in record.getMessage()


def test_a_request_of_nobody_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "octavo"):
        log_request(Life(0.0, 5, 0))
    assert not caplog.records


def test_an_exception_stays_on_one_line_of_json() -> None:
    try:
        int("a\nb")
    except ValueError:
        record = logging.LogRecord("octavo.x", logging.ERROR, "", 0, "it %s", ("broke\n",), sys.exc_info())
    line = formatter("json", "engine").format(record)
    assert "\n" not in line
    read = json.loads(line)
    assert (read["message"], read["source"], read["level"]) == ("it broke\n", "engine", "error")
    assert "ValueError: invalid literal" in read["exception"]
