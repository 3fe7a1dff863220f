import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.checkpoints import tiny_model, write_gguf

from octavo.kvcache.ledger import BUCKETS
from octavo.model.device import DeviceError
from octavo.model.step import SamplingParams
from octavo.model.weights.errors import CheckpointError
from octavo.scheduler.loading import choose_dtype, load
from octavo.scheduler.messages import EngineConfig, Loading, Submission
from octavo.scheduler.sizing import ConfigurationError


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    tiny_model(path, "llama", max_context=256, eos_token_id=5)
    return path


def config(directory: Path, **fields: object) -> EngineConfig:
    return EngineConfig(model=str(directory), **fields)


def test_a_model_becomes_an_engine_whose_memory_is_as_planned(directory: Path) -> None:
    _, runner, ready = load(config(directory, dtype="float32", max_num_seqs=4, max_num_batched_tokens=32))
    parameters = {id(parameter): parameter.numel() for parameter in tiny_parameters(directory)}
    assert ready.parameters == sum(parameters.values())
    assert (ready.architecture, ready.vocabulary, ready.eos_ids) == ("LlamaForCausalLM", 128, (5,))
    assert (ready.max_model_len, ready.max_num_seqs, ready.max_num_batched_tokens) == (256, 4, 32)
    assert ready.blocks == 2 * 256 // 16
    assert ready.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4  # layers, K and V, heads, head_dim, bytes
    memory = {line.bucket: line for line in ready.memory}
    assert list(memory) == ["weights", "cache", "activations", "runtime", "host"]
    assert memory["cache"].allocated == ready.blocks * 16 * ready.kv_bytes_per_token
    assert memory["weights"].allocated == runner.model.weights_nbytes
    for bucket in BUCKETS:
        assert 0 < memory[bucket].allocated == memory[bucket].planned
    assert ready.process == os.getpid()


def test_loading_says_how_far_it_has_come(directory: Path) -> None:
    heard: list[Loading] = []
    load(config(directory), heard.append)
    shares = [loading.progress for loading in heard]
    assert [loading.phase for loading in heard[:-1]] == ["loading weights"] * (len(heard) - 1)
    assert heard[-1].phase == "checking batch invariance"
    assert shares == sorted(shares)
    assert 3 < len(set(shares)) <= 101
    assert shares[-1] == 1


def tiny_parameters(directory: Path) -> list[torch.Tensor]:
    from transformers import LlamaForCausalLM

    return list(LlamaForCausalLM.from_pretrained(directory).parameters())


def test_a_loaded_engine_computes(directory: Path) -> None:
    scheduler, runner, _ = load(config(directory, dtype="float32", prefix_caching=False))
    greedy = SamplingParams(temperature=0.0, ignore_eos=True)
    assert scheduler.add(Submission(request=1, prompt=(1, 2, 3), params=greedy, max_tokens=4)) is None
    tokens = []
    while (step := scheduler.schedule()) is not None:
        tokens += [event.token for event in scheduler.commit(step, runner.submit(step).wait())]
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(directory)
    expected = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert tokens == expected[0, 3:].tolist()


def test_random_weights_need_a_configuration_only(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    _, _, ready = load(config(tmp_path, load_format="random"))
    assert ready.dtype == "bfloat16"
    with pytest.raises(CheckpointError) as raised:
        load(config(tmp_path))
    assert raised.value.exit_code == 65


def test_a_pool_below_one_request_lowers_the_context_and_says_so(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, _, ready = load(config(directory, kv_blocks=6))
    assert (ready.blocks, ready.max_model_len) == (6, 96)
    assert "from 256 to 96" in caplog.text
    with pytest.raises(ConfigurationError, match=r"96 tokens.*--max-model-len 128"):
        load(config(directory, kv_blocks=6, max_model_len=128))


def test_a_budget_is_never_exceeded_and_leaves_less_than_a_block_unused(directory: Path) -> None:
    _, _, ready = load(config(directory, memory=3_000_000, max_model_len=64))
    total = sum(line.allocated for line in ready.memory)
    assert 0 <= 3_000_000 - total < ready.block_size * ready.kv_bytes_per_token
    assert ready.memory_budget == 3_000_000


def test_what_this_machine_or_version_cannot_do_is_refused_in_one_line(directory: Path) -> None:
    with pytest.raises(ConfigurationError, match="--dtype float16 is not for the CPU"):
        choose_dtype("float16")
    with pytest.raises(ConfigurationError, match="--dtype float32 is not for a GPU; use bfloat16 or float16"):
        choose_dtype("float32", on_gpu=True)
    for option in ({"attention_prefill": "fa3"}, {"attention_decode": "xqa"}):
        with pytest.raises(ConfigurationError, match="choose kernels of a GPU: use --device cuda"):
            load(config(directory, **option))
    assert choose_dtype("auto") == torch.bfloat16
    with pytest.raises(DeviceError, match=r"--device cuda: there is no usable GPU .*; or use --device cpu") as raised:
        load(config(directory, device="cuda"))
    assert raised.value.exit_code == 69


def test_kernels_that_do_not_exist_are_a_configuration_error(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_KERNELS", "vector9000")
    with pytest.raises(ConfigurationError, match="OCTAVO_KERNELS"):
        load(config(directory))


RESTLESS = """
import random, sys
rng, held = random.Random(1), []
print("started", flush=True)
while True:
    held.append(bytearray(rng.randrange(1 << 24)))
    if len(held) > rng.randrange(1, 16):
        held.clear()
"""


def test_a_neighbour_that_allocates_and_frees_at_random_leaves_the_plan_unchanged(directory: Path) -> None:
    def numbers() -> tuple[object, ...]:
        _, _, ready = load(config(directory, gpu_memory_utilization=0.001))
        return ready.blocks, ready.memory, ready.memory_budget

    quiet = numbers()
    with subprocess.Popen([sys.executable, "-c", RESTLESS], stdout=subprocess.PIPE) as neighbour:
        try:
            assert neighbour.stdout is not None
            neighbour.stdout.readline()
            assert [numbers() for _ in range(4)] == [quiet] * 4
        finally:
            neighbour.kill()


def test_a_plan_beyond_what_is_free_now_is_made_all_the_same_and_says_so(
    directory: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.scheduler.loading.available_memory", lambda: 1000)
    _, _, ready = load(config(directory, kv_blocks=16))
    assert ready.blocks == 16
    assert "the system can give only 1000 now" in caplog.text


def test_without_compiled_kernels_quantised_weights_are_widened_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_gguf(tmp_path / "model.gguf", tiny_model(tmp_path, "llama"), "Q4_0")
    monkeypatch.setenv("OCTAVO_KERNELS", "torch")
    engine = EngineConfig(model=str(tmp_path / "model.gguf"), kv_blocks=20, max_num_seqs=2)
    _, runner, ready = load(engine)
    assert ready.quantised == ()
    assert ready.memory[0].allocated == runner.model.weights_nbytes == 2 * ready.parameters
    assert "widened to torch.bfloat16" in caplog.text
    caplog.clear()
    load(EngineConfig(model=str(tmp_path / "model.gguf"), kv_blocks=20, max_num_seqs=2, dtype="bfloat16"))
    assert "widened" not in caplog.text
