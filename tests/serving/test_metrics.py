"""The metrics of the real model under a mixed load, beside what the clients were told."""

import httpx
import pytest
from support.live import live_server
from support.measuring import check_identities, scrape, stream_all, usage

from octavo.scheduler.messages import EngineConfig


def test_g01_metrics_agree_with_the_clients_on_the_real_model() -> None:
    shared = "The cat sat on the mat. " * 8
    bodies = [
        {"prompt": f"{shared}{number}", "max_tokens": 12 + number, "seed": number, "ignore_eos": True}
        for number in range(6)
    ]
    with live_server(EngineConfig(model="smollm2", max_model_len=512, max_num_seqs=2)) as live:
        assert all(value == 0 for name, value in scrape(live.url).items() if name.endswith(("_sum", "_count")))
        measured = stream_all(live.url, bodies)
        check_identities(found := scrape(live.url))
        assert found["generation_tokens_total"] == usage(measured, "completion_tokens")
        assert found["prompt_tokens_total"] == usage(measured, "prompt_tokens")
        cached = sum(one.events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] for one in measured)
        assert found["prompt_tokens_cached_total"] == cached > 0
        assert found["e2e_request_latency_seconds_sum"] == pytest.approx(sum(one.end for one in measured), rel=0.05)
        leave_early(live.url, shared)
        while scrape(live.url)["requests_running"]:
            pass
        check_identities(found := scrape(live.url))
        assert found["request_success_total{finished_reason=abort}"] == 1


def leave_early(url: str, prompt: str) -> None:
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": 300, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body) as response:
        next(response.iter_lines())
