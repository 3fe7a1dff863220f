"""Requests that wait or run for too long end by themselves, and say why."""

import threading
import time
from dataclasses import replace
from pathlib import Path

from support.live import Live, live_server, story_command
from support.story_engine import SLOW

from octavo.scheduler.messages import EngineConfig

TIMED_OUT = 'octavo_request_success_total{finished_reason="timeout"}'


def occupied(live: Live) -> threading.Thread:
    """A request that runs for a few seconds, once it is running."""
    thread = threading.Thread(target=live.completion, kwargs={"prompt": [SLOW], "max_tokens": 400})
    thread.start()
    while live.metric("octavo_requests_running") == 0:
        assert thread.is_alive()
        time.sleep(0.01)
    return thread


def test_a_request_that_waits_too_long_is_answered_503(tmp_path: Path) -> None:
    config = EngineConfig(model="smollm2", max_num_seqs=1)
    with live_server(config, command=story_command(tmp_path, {})) as live:
        running = occupied(live)
        live.service.settings = replace(live.service.settings, queue_timeout=0.3)
        refused = live.post("/v1/completions", prompt=[5])
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_timeout")
        assert refused.headers["retry-after"]
        *_, last = live.stream_lines("/v1/completions", prompt=[5])
        assert last["error"]["code"] == "queue_timeout"
        assert running.is_alive(), "what has begun may go on"
        running.join()
        assert live.metric(TIMED_OUT) == 2
        assert live.metric("octavo_queued_tokens") == live.metric('octavo_kv_blocks{state="used"}') == 0
        assert live.service.client.live == 0


def test_a_request_that_takes_too_long_is_answered_504(tmp_path: Path) -> None:
    with live_server(command=story_command(tmp_path, {})) as live:
        live.service.settings = replace(live.service.settings, request_timeout=2.0)
        refused = live.post("/v1/completions", prompt=[SLOW], max_tokens=1900)
        assert (refused.status_code, refused.json()["error"]["code"]) == (504, "request_timeout")
        *before, last = live.stream_lines("/v1/completions", prompt=[SLOW], max_tokens=1900)
        assert before[0]["choices"][0]["text"]
        assert last["error"]["code"] == "request_timeout"
        live.service.settings = replace(live.service.settings, request_timeout=0.0)
        assert live.completion(prompt=[5], max_tokens=3)["usage"]["completion_tokens"] == 3
        assert live.metric(TIMED_OUT) == 2
        assert live.metric('octavo_kv_blocks{state="used"}') == 0
