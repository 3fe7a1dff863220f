"""The memory of the whole daemon on the default model, against what was planned before anything was loaded."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.live import Live, live_server

from octavo.scheduler.messages import EngineConfig
from octavo.server.cli import main
from octavo.server.memory import anonymous_bytes

LIMITS = {"max_model_len": 2048, "max_num_seqs": 12, "max_num_batched_tokens": 96}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_server(EngineConfig(model="smollm2", **LIMITS)) as server:
        yield server


def memory(live: Live, bucket: str, kind: str) -> float:
    return live.metric(f'octavo_memory_bytes{{bucket="{bucket}",kind="{kind}"}}')


def test_a_running_servers_metrics_are_the_plan_to_the_byte(live: Live, capsys: pytest.CaptureFixture[str]) -> None:
    options = [text for name, value in LIMITS.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    assert main(["plan", "smollm2", *options, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    for bucket in ("weights", "cache", "activations"):
        assert memory(live, bucket, "planned") == memory(live, bucket, "allocated") == plan[bucket] > 0, bucket
    for bucket in ("runtime", "host"):
        assert memory(live, bucket, "planned") == plan[bucket] > 0, bucket
    assert live.metric("octavo_memory_budget_bytes") == plan["budget"]
    assert live.metric("octavo_kv_bytes_per_token") == plan["kv_bytes_per_token"]
    assert live.metric('octavo_kv_blocks{state="free"}') == plan["blocks"]


def test_use_of_the_cache_and_of_the_arena_follows_the_requests(live: Live) -> None:
    live.completion(prompt="one two three four five six", max_tokens=30, ignore_eos=True)
    block = 16 * live.metric("octavo_kv_bytes_per_token")
    # Six tokens of prompt or a few more, and 29 of output, as the last one is never computed.
    assert memory(live, "cache", "used") == 0
    assert 3 * block <= memory(live, "cache", "peak") <= 4 * block
    one_token, peak = memory(live, "activations", "used"), memory(live, "activations", "peak")
    assert 0 < one_token <= peak < memory(live, "activations", "allocated")
    live.completion(prompt="word " * 200, max_tokens=1)
    assert memory(live, "cache", "peak") >= 200 // 16 * block
    assert peak <= memory(live, "activations", "peak") <= memory(live, "activations", "allocated")


def test_the_engine_holds_what_was_planned_from_the_first_minute_and_stays_within_it_under_load(live: Live) -> None:
    """What is compared: all anonymous memory of the engine's process, with its three buckets and the runtime line."""
    buckets = sum(memory(live, bucket, "allocated") for bucket in ("weights", "cache", "activations"))
    plan = buckets + memory(live, "runtime", "planned")
    process = live.service.client.ready.process
    held = [anonymous_bytes(process)]
    requests = [
        {"prompt": "the cat sat on the mat. " * (1 + 12 * number), "max_tokens": 24, "seed": number, "logprobs": 5,
         "top_p": 0.9, "repetition_penalty": 1.2, "ignore_eos": True}
        for number in range(24)
    ]  # fmt: skip
    with ThreadPoolExecutor(len(requests)) as pool:
        answers = [pool.submit(live.completion, **request) for request in requests]
        while not all(answer.done() for answer in answers):
            held.append(anonymous_bytes(process))
            time.sleep(0.02)
    assert all(answer.result()["choices"][0]["finish_reason"] == "length" for answer in answers)
    assert buckets < held[0], "every page of the buckets is there before the first request"
    assert max(held) <= 1.05 * plan
    assert memory(live, "runtime", "used") >= 0.5 * memory(live, "runtime", "planned"), (
        "the plan is not merely generous"
    )
