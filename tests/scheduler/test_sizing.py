from pathlib import Path

import pytest

from octavo.kvcache.ledger import MemoryPlan
from octavo.scheduler.messages import EngineConfig
from octavo.scheduler.policy import Limits
from octavo.scheduler.sizing import ConfigurationError, resolve_limits, size_pool, usable_memory

LIMITS = Limits(max_rows=4, max_tokens=64, max_model_len=1000, block_size=16)
BLOCK = 1024


def plan_pool(config: EngineConfig, fixed: int, usable: int) -> tuple[int, Limits]:
    plan = MemoryPlan(fixed - fixed // 3, fixed // 3, BLOCK, blocks=0, budget=usable)
    return size_pool(config, LIMITS, plan, usable=usable)


def config(**fields: int) -> EngineConfig:
    return EngineConfig(model="m", **fields)


@pytest.mark.parametrize(
    ("on_gpu", "cores", "rows", "tokens"),
    [(False, 2, 32, 128), (False, 4, 32, 128), (False, 5, 32, 512), (True, 2, 256, 8192)],
)
def test_limits_that_are_not_given_come_from_model_and_machine(
    on_gpu: bool, cores: int, rows: int, tokens: int
) -> None:
    assert resolve_limits(config(), max_context=8192, on_gpu=on_gpu, cores=cores) == Limits(rows, tokens, 8192, 16)


def test_given_limits_are_kept_and_the_other_default_gives_way() -> None:
    def limits(**fields: int) -> Limits:
        return resolve_limits(config(**fields), max_context=100, on_gpu=False, cores=2)

    assert limits(max_model_len=50, max_num_seqs=3, max_num_batched_tokens=7) == Limits(3, 7, 50, 16)
    assert limits(max_num_seqs=300) == Limits(300, 300, 100, 16)
    assert limits(max_num_batched_tokens=5) == Limits(5, 5, 100, 16)


def test_contradicting_limits_are_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigurationError, match=r"--max-model-len 101 .* 100 tokens"):
        resolve_limits(config(max_model_len=101), max_context=100, on_gpu=False, cores=2)
    with pytest.raises(ConfigurationError, match=r"--max-num-batched-tokens 3 .* --max-num-seqs 4"):
        resolve_limits(config(max_num_seqs=4, max_num_batched_tokens=3), max_context=100, on_gpu=False, cores=2)


def test_by_default_two_requests_of_full_length_fit() -> None:
    blocks, limits = plan_pool(config(), fixed=0, usable=1000 * BLOCK)
    assert blocks == 125  # 2,000 tokens in blocks of 16
    assert limits == LIMITS


def test_by_default_the_pool_takes_at_most_half_of_the_usable_memory() -> None:
    assert plan_pool(config(), fixed=0, usable=200 * BLOCK + 1)[0] == 100
    assert plan_pool(config(), fixed=130 * BLOCK, usable=200 * BLOCK)[0] == 70


def test_a_budget_is_spent_to_the_last_whole_block() -> None:
    blocks, _ = plan_pool(config(memory=1100 * BLOCK - 1), fixed=1000 * BLOCK, usable=1100 * BLOCK)
    assert blocks == 99


def test_an_explicit_number_of_blocks_is_taken_as_it_is() -> None:
    assert plan_pool(config(kv_blocks=63), fixed=BLOCK, usable=64 * BLOCK)[0] == 63


@pytest.mark.parametrize("fields", [{"kv_blocks": 10}, {"memory": 10 * BLOCK}])
def test_a_small_pool_lowers_the_length_only_if_that_was_not_given(fields: dict[str, int]) -> None:
    assert plan_pool(config(**fields), fixed=0, usable=10**9)[1].max_model_len == 160
    with pytest.raises(ConfigurationError, match=r"160 tokens.*--max-model-len 1000") as raised:
        plan_pool(config(max_model_len=1000, **fields), fixed=0, usable=10**9)
    assert raised.value.exit_code == 64


def test_a_pool_exactly_as_large_as_one_request_is_enough() -> None:
    _, limits = plan_pool(config(kv_blocks=63, max_model_len=1000), fixed=0, usable=10**9)
    assert limits.max_model_len == 1000


@pytest.mark.parametrize("budget", [config(memory=1000), config()])
def test_a_budget_below_weights_and_activations_is_refused(budget: EngineConfig) -> None:
    with pytest.raises(ConfigurationError, match=r"no room for a single KV block"):
        plan_pool(budget, fixed=2000, usable=1000)


@pytest.mark.parametrize("fields", [{"kv_blocks": 100}, {"memory": 101 * BLOCK}])
def test_more_memory_than_there_is_is_refused(fields: dict[str, int]) -> None:
    plan_pool(config(**fields), fixed=BLOCK, usable=101 * BLOCK)
    with pytest.raises(ConfigurationError, match=r"are usable"):
        plan_pool(config(**fields), fixed=BLOCK, usable=101 * BLOCK - 1)


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:    4000 kB\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_cgroups_available_memory_counts(tmp_path: Path) -> None:
    assert usable_memory(tree(tmp_path, {})) == 4000 << 10


def test_the_tightest_limit_of_a_cgroup_and_its_ancestors_counts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/a/b\n",
        "sys/fs/cgroup/a/b/memory.max": "max\n",
        "sys/fs/cgroup/a/memory.max": "300000\n",
        "sys/fs/cgroup/memory.max": "900000\n",
    }
    assert usable_memory(tree(tmp_path, files)) == 300000


def test_in_a_container_the_root_of_the_hierarchy_counts(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/not/visible\n", "sys/fs/cgroup/memory.max": "12345\n"}
    assert usable_memory(tree(tmp_path, files)) == 12345


def test_limits_of_the_older_hierarchy_count_and_its_no_limit_does_not(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:devices:/\n4:cpu,memory:/x\n0::/\n",
        "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "777777\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    assert usable_memory(tree(tmp_path, files)) == 777777
