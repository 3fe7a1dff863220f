from pathlib import Path

import pytest

from octavo.kvcache.ledger import MemoryPlan
from octavo.scheduler.messages import EngineConfig
from octavo.scheduler.request import Limits
from octavo.scheduler.sizing import (
    ConfigurationError,
    available_memory,
    memory_budget,
    memory_capacity,
    resolve_limits,
    size_pool,
)

LIMITS = Limits(max_rows=4, max_tokens=64, max_model_len=1000, block_size=16)
BLOCK = 1024


def plan_pool(config: EngineConfig, fixed: int, budget: int) -> tuple[int, Limits]:
    plan = MemoryPlan(fixed - fixed // 3, fixed // 3, BLOCK, blocks=0, budget=budget)
    return size_pool(config, LIMITS, plan)


def config(**fields: object) -> EngineConfig:
    return EngineConfig(model="m", **fields)


@pytest.mark.parametrize(
    ("on_gpu", "cores", "expected"),
    [
        (False, 2, Limits(32, 512, 8192, 16, mixed_tokens=160)),
        (False, 4, Limits(32, 512, 8192, 16, mixed_tokens=160)),
        (False, 5, Limits(32, 512, 8192, 16)),
        (True, 2, Limits(256, 2048, 8192, 16)),
    ],
)
def test_limits_that_are_not_given_come_from_model_and_machine(on_gpu: bool, cores: int, expected: Limits) -> None:
    assert resolve_limits(config(), max_context=8192, on_gpu=on_gpu, cores=cores) == expected


def test_given_limits_are_kept_and_the_other_default_gives_way() -> None:
    def limits(**fields: int) -> Limits:
        return resolve_limits(config(**fields), max_context=100, on_gpu=False, cores=2)

    assert limits(max_model_len=50, max_num_seqs=3, max_num_batched_tokens=7) == Limits(3, 7, 50, 16)
    assert limits(max_num_seqs=600) == Limits(600, 600, 100, 16, mixed_tokens=600)
    assert limits(max_num_batched_tokens=5) == Limits(5, 5, 100, 16)


def test_contradicting_limits_are_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigurationError, match=r"--max-model-len 101 .* 100 tokens"):
        resolve_limits(config(max_model_len=101), max_context=100, on_gpu=False, cores=2)
    with pytest.raises(ConfigurationError, match=r"--max-num-batched-tokens 3 .* --max-num-seqs 4"):
        resolve_limits(config(max_num_seqs=4, max_num_batched_tokens=3), max_context=100, on_gpu=False, cores=2)


def test_by_default_two_requests_of_full_length_fit() -> None:
    blocks, limits = plan_pool(config(), fixed=0, budget=1000 * BLOCK)
    assert blocks == 125  # 2,000 tokens in blocks of 16
    assert limits == LIMITS


def test_by_default_the_pool_takes_at_most_half_of_the_budget() -> None:
    assert plan_pool(config(), fixed=0, budget=200 * BLOCK + 1)[0] == 100
    assert plan_pool(config(), fixed=130 * BLOCK, budget=200 * BLOCK)[0] == 70


@pytest.mark.parametrize("fields", [{"memory": 1100 * BLOCK - 1}, {"gpu_memory_utilization": 0.5}])
def test_a_budget_that_was_given_is_spent_to_the_last_whole_block(fields: dict[str, object]) -> None:
    blocks, _ = plan_pool(config(**fields), fixed=1000 * BLOCK, budget=1100 * BLOCK - 1)
    assert blocks == 99


def test_the_budget_is_what_was_given_in_bytes_or_as_a_share() -> None:
    assert memory_budget(config(memory=700), 1000) == 700
    assert memory_budget(config(gpu_memory_utilization=0.25), 1000) == 250
    assert memory_budget(config(gpu_memory_utilization=1.0), 1000) == 1000
    assert memory_budget(config(), 1000) == 900
    with pytest.raises(ConfigurationError, match=r"--memory and --gpu-memory-utilization"):
        memory_budget(config(memory=700, gpu_memory_utilization=0.5), 1000)
    with pytest.raises(ConfigurationError, match=r"--memory 2.0 MiB, but this process may use only 1.0 MiB"):
        memory_budget(config(memory=2 << 20), 1 << 20)


def test_a_server_that_reserves_says_so_in_its_limits() -> None:
    assert resolve_limits(config(admission="reserve"), max_context=9, on_gpu=False, cores=1).reserve
    assert not resolve_limits(config(), max_context=9, on_gpu=False, cores=1).reserve


def test_an_explicit_number_of_blocks_is_taken_as_it_is() -> None:
    assert plan_pool(config(kv_blocks=63), fixed=BLOCK, budget=64 * BLOCK)[0] == 63


@pytest.mark.parametrize("fields", [{"kv_blocks": 10}, {"memory": 10 * BLOCK}])
def test_a_small_pool_lowers_the_length_only_if_that_was_not_given(fields: dict[str, object]) -> None:
    assert plan_pool(config(**fields), fixed=0, budget=10 * BLOCK)[1].max_model_len == 160
    with pytest.raises(ConfigurationError, match=r"160 tokens.*--max-model-len 1000") as raised:
        plan_pool(config(max_model_len=1000, **fields), fixed=0, budget=10 * BLOCK)
    assert raised.value.exit_code == 64


def test_a_pool_exactly_as_large_as_one_request_is_enough() -> None:
    _, limits = plan_pool(config(kv_blocks=63, max_model_len=1000), fixed=0, budget=10**9)
    assert limits.max_model_len == 1000


@pytest.mark.parametrize(
    ("fields", "source"),
    [
        ({"memory": 1000}, "--memory 0.0 MiB"),
        ({"gpu_memory_utilization": 0.5}, "--gpu-memory-utilization 0.5"),
        ({}, "the default budget"),
    ],
)
def test_a_budget_below_weights_and_activations_is_refused(fields: dict[str, object], source: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{source}.* no room for a single KV block"):
        plan_pool(config(**fields), fixed=2000, budget=1000)


def test_more_blocks_than_the_budget_holds_are_refused() -> None:
    plan_pool(config(kv_blocks=100), fixed=BLOCK, budget=101 * BLOCK)
    with pytest.raises(ConfigurationError, match=r"--kv-blocks 100 needs .* but the budget is"):
        plan_pool(config(kv_blocks=100), fixed=BLOCK, budget=101 * BLOCK - 1)


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": "MemTotal:    9000 kB\nMemAvailable:    4000 kB\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_cgroups_the_machines_memory_counts_whoever_uses_it(tmp_path: Path) -> None:
    assert memory_capacity(tree(tmp_path, {})) == 9000 << 10
    assert available_memory(tmp_path) == 4000 << 10
    with pytest.raises(ConfigurationError, match="MemTotal"):
        memory_capacity(tree(tmp_path, {"proc/meminfo": "MemFree: 1 kB\n"}))


def test_the_tightest_limit_of_a_cgroup_and_its_ancestors_counts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/a/b\n",
        "sys/fs/cgroup/a/b/memory.max": "max\n",
        "sys/fs/cgroup/a/memory.max": "300000\n",
        "sys/fs/cgroup/memory.max": "900000\n",
    }
    assert memory_capacity(tree(tmp_path, files)) == 300000


def test_in_a_container_the_root_of_the_hierarchy_counts(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/not/visible\n", "sys/fs/cgroup/memory.max": "12345\n"}
    assert memory_capacity(tree(tmp_path, files)) == 12345


def test_limits_of_the_older_hierarchy_count_and_its_no_limit_does_not(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:devices:/\n4:cpu,memory:/x\n0::/\n",
        "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "777777\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    assert memory_capacity(tree(tmp_path, files)) == 777777
