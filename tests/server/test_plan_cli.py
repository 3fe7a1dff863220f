import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import tiny_model, write_gguf
from support.runners import cpu_kernels

from octavo.model.roofline import DEVICES
from octavo.model.weights.published import PUBLISHED
from octavo.scheduler.loading import load
from octavo.server.cli import main
from octavo.server.flags import resolve

SLOW = ("torch", "huggingface_hub", "transformers", "tokenizers", "pydantic", "fastapi", "uvicorn", "matplotlib")
Capture = pytest.CaptureFixture[str]


def planned(capsys: Capture, *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["plan", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def error_of(capsys: Capture, *arguments: str) -> tuple[int, str]:
    try:
        code = main([*arguments])
    except SystemExit as end:
        code = int(str(end.code))
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    return code, output.err


def test_llama_3_70b_fits_on_one_h200_with_room_for_more_than_23000_tokens(capsys: Capture) -> None:
    code, plan = planned(capsys, "llama-3-70b", "--device", "h200")
    assert code == 0
    assert plan["weights"] == 141_107_412_992
    assert plan["kv_bytes_per_token"] == 327_680
    assert plan["activation_parts"]["arena"] == 1_543_503_872 // 4 + 2 * 4 * 2048
    assert plan["budget"] == DEVICES["h200"].memory - plan["runtime"]
    assert 23_500 < plan["tokens"] < 24_000
    assert 0 <= plan["budget"] - plan["total"] < plan["block_bytes"]
    assert plan["total"] == plan["weights"] + plan["cache"] + plan["activations"]
    assert plan["requests"] == {"1024": 23, "2048": 11, "4096": 5, "8192": 2}
    assert plan["predicted"] is True


@pytest.mark.parametrize("device", ["h100-80g", "h200"])
def test_llama_3_70b_in_8_bits_fits_on_one_gpu_with_its_scales(device: str, capsys: Capture) -> None:
    code, plan = planned(capsys, "llama-3-70b", "--device", device, "--quantization", "fp8")
    matrices, scales = 68_451_041_280, 4 * 80 * (10_240 + 8192 + 57_344 + 8192)
    tables, norms = 2 * 2 * 128_256 * 8192, 2 * (80 * 16_384 + 8192)
    assert (code, plan["weights"]) == (0, matrices + scales + tables + norms)
    assert (plan["weights_in"], plan["dtype"], plan["not_served"]) == ("fp8 and bfloat16", "bfloat16", [])
    assert plan["kv_bytes_per_token"] == 327_680
    assert planned(capsys, "llama-3-70b", "--quantization", "fp8")[1]["not_served"] == ["8-bit floats on a CPU"]


def test_the_text_says_the_same_and_labels_what_is_predicted_or_not_served(capsys: Capture) -> None:
    assert main(["plan", "llama-3-70b", "--device", "h200"]) == 0
    text = capsys.readouterr().out
    for expected in ("141,107,412,992 B", "1,490 blocks", "2 of 8,192 tokens", "It fits.", "not a measurement"):
        assert expected in text
    assert next(line for line in text.splitlines() if line.startswith("runtime")).count("predicted") == 1
    assert "not served" not in text
    assert "predicted: this version was never measured on a GPU" in text


def test_what_does_not_fit_is_exit_code_1_with_three_changes_that_do(capsys: Capture) -> None:
    code, plan = planned(capsys, "llama-3-70b", "--device", "h100-80g")
    assert (code, plan["fits"], plan["blocks"]) == (1, False, 0)
    assert "141,868,359,940 B" in plan["shortfall"]
    assert [change["change"] for change in plan["changes"]] == ["--quantization fp8", "--devices 2", "--device h200"]
    for change in plan["changes"]:
        arguments = ["llama-3-70b", "--device", "h100-80g", *change["change"].split()]
        code, again = planned(capsys, *arguments)
        assert code == 0
        assert all(again[name] == change[name] for name in ("weights", "activations", "blocks", "tokens", "total"))
        assert change["total"] <= change["budget"]


@pytest.mark.parametrize(
    ("arguments", "first"),
    [
        (["llama-3-8b", "--device", "16850MiB"], "--max-num-batched-tokens 1024"),
        (["llama-3-70b", "--device", "h200", "--users", "16", "--context", "8k"], "--context 1024"),
        (["llama-3-8b", "--dtype", "float32", "--device", "rtx-4090"], "--dtype bfloat16"),
    ],
)
def test_the_cheapest_change_comes_first(arguments: list[str], first: str, capsys: Capture) -> None:
    code, plan = planned(capsys, *arguments)
    assert code == 1
    assert plan["changes"][0]["change"] == first
    assert planned(capsys, *_changed(arguments, first))[0] == 0


def _changed(arguments: list[str], change: str) -> list[str]:
    """The arguments with one option set otherwise: of two the last counts."""
    return [*arguments, *change.split()]


def test_users_are_told_how_many_devices_they_need(capsys: Capture) -> None:
    arguments = ("llama-3-70b", "--device", "h200", "--users", "16", "--context", "8k")
    code, plan = planned(capsys, *arguments)
    needed = plan["devices_needed"]
    assert (code, needed) == (1, {"total": 2, "replicas": 1, "each": 2})
    assert planned(capsys, *arguments, "--devices", "2")[0] == 0
    _, crowd = planned(capsys, "llama-3-8b", "--device", "rtx-4090", "--users", "40", "--context", "8k")
    alone = planned(capsys, "llama-3-8b", "--device", "rtx-4090", "--context", "8k")[1]["requests"]["8192"]
    assert crowd["devices_needed"]["total"] <= -(-40 // alone)


def test_more_memory_and_more_devices_never_hold_less(capsys: Capture) -> None:
    tokens = [planned(capsys, "llama-3-8b", "--device", f"{gib}GiB")[1]["tokens"] for gib in (20, 24, 40, 80)]
    assert tokens == sorted(tokens)
    parallel = [planned(capsys, "llama-3-70b", "--device", "h200", "--devices", n)[1]["tokens"] for n in "1248"]
    assert parallel == sorted(parallel)
    narrow = planned(capsys, "llama-3-70b", "--device", "h200", "--kv-cache-dtype", "fp8_e4m3")[1]
    assert narrow["kv_bytes_per_token"] == 327_680 // 2
    assert narrow["not_served"] == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", [{}, {"kv_blocks": "20"}, {"memory": "3MB"}, {"max_num_seqs": "3"}])
def test_a_running_engines_ledger_is_the_plan_to_the_byte(
    dtype: str, options: dict[str, str], tmp_path: Path, capsys: Capture
) -> None:
    tiny_model(tmp_path, "qwen3", width=72, ffn_width=100, vocabulary=131)
    flags = [text for name, value in options.items() for text in ("--" + name.replace("_", "-"), value)]
    _, plan = planned(capsys, str(tmp_path), "--dtype", dtype, *flags)
    _, _, ready = load(resolve({"model": str(tmp_path), "dtype": dtype, **options}, {}).engine)
    for line in ready.memory:
        if line.bucket in ("weights", "cache", "activations"):
            assert line.allocated == line.planned == plan[line.bucket], line.bucket
    for name in ("blocks", "max_model_len", "max_num_seqs", "max_num_batched_tokens"):
        assert getattr(ready, name) == plan[name]


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
@pytest.mark.parametrize("kinds", [{}, {"v_proj": "Q6_K", "gate_proj": "Q8_0"}], ids=["one type", "mixed types"])
def test_the_ledger_of_a_quantised_model_is_the_plan_to_the_byte(
    dtype: str, kinds: dict[str, str], tmp_path: Path, capsys: Capture
) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file, tiny_model(tmp_path, "llama", width=256, head_dim=64, ffn_width=512), "Q4_K", kinds=kinds)
    _, plan = planned(capsys, str(file), "--dtype", dtype, "--kv-blocks", "20")
    _, _, ready = load(resolve({"model": str(file), "dtype": dtype, "kv_blocks": "20"}, {}).engine)
    for line in ready.memory:
        if line.bucket in ("weights", "cache", "activations"):
            assert line.allocated == line.planned == plan[line.bucket], line.bucket
    kept = cpu_kernels(torch.bfloat16).panels and dtype == "auto"
    assert ready.quantised == (tuple(sorted({"Q4_K", *kinds.values()} - {"Q6_K"})) if kept else ())
    assert plan["weights_in"] == " and ".join((*ready.quantised, "bfloat16"))
    assert ("expanded panels" in plan["activation_parts"]) == kept


def test_the_default_model_is_planned_as_it_is_served(capsys: Capture) -> None:
    if not cpu_kernels(torch.bfloat16).panels:
        pytest.skip("without a compiler quantised weights are widened")
    kept, widened = (planned(capsys, "smollm2", *options)[1] for options in ((), ("--dtype", "bfloat16")))
    assert (kept["weights"], widened["weights"]) == (96_506_496, 269_030_016)
    assert kept["weights_in"] == "Q4_1 and Q8_0 and bfloat16"


def test_a_variable_of_the_server_counts_here_too(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_KV_BLOCKS", "77")
    assert planned(capsys, "smollm2")[1]["blocks"] == 77
    assert planned(capsys, "smollm2", "--kv-blocks", "78")[1]["blocks"] == 78


@pytest.mark.parametrize("command", ["plan", "describe"])
def test_without_a_model_it_is_the_one_that_serve_would_serve(
    command: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(*arguments: str) -> str:
        assert main([command, *arguments]) == 0
        return capsys.readouterr().out

    assert resolve({}, {}).engine.model == "smollm2"
    assert answer() == answer("smollm2")
    monkeypatch.setenv("OCTAVO_MODEL", "llama-3-8b")
    options = ["--device", "h200"] if command == "plan" else []
    assert answer(*options) == answer("llama-3-8b", *options) != answer("smollm2", *options)


@pytest.mark.parametrize("command", ["plan", "describe"])
@pytest.mark.parametrize("model", ["llama-3-70b", "smollm2", "directory"])
def test_nothing_that_takes_long_to_import_is_imported(command: str, model: str, tmp_path: Path) -> None:
    """They answer in under a second: half of one is Python itself, numpy and what the command line needs."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["llama-3-70b"]))
    arguments = [command, str(tmp_path) if model == "directory" else model]
    program = (
        "import sys; from octavo.server.cli import main; "
        f"main({arguments!r}); print(*sorted({set(SLOW)!r} & set(sys.modules)), file=sys.stderr)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.count("\n") > 10
    assert ended.stderr.strip() == ""


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (["llama-3-70b", "--device", "h100"], 64, "--device: 'h100'"),
        (["llama-3-70b", "--device", "0"], 64, "--device"),
        (["llama-3-70b", "--devices", "0", "--device", "h200"], 64, "--devices"),
        (["llama-3-70b", "--devices", "65"], 64, "--devices"),
        (["llama-3-70b", "--users", "-1"], 64, "--users"),
        (["llama-3-70b", "--dtype", "int3"], 64, "--dtype"),
        (["llama-3-70b", "--max-model-len", "9k", "--device", "h200"], 64, "--max-model-len 9216"),
        (["llama-3-70b", "--max-num-seqs", "9", "--max-num-batched-tokens", "8"], 64, "--max-num-batched-tokens 8"),
        (["llama-3-70b", "--devices", "3", "--device", "h200"], 65, "64 attention heads"),
        (["llama-3-70b", "--devices", "16", "--device", "h200"], 65, "8 KV heads"),
        (["llama-4-70b"], 65, "llama-4-70b"),
    ],
)
def test_wrong_input_is_one_line(arguments: list[str], code: int, named: str, capsys: Capture) -> None:
    found, line = error_of(capsys, "plan", *arguments)
    assert found == code
    assert named in line


@pytest.mark.parametrize("command", ["plan", "describe"])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_key_value_heads", 3),
        ("num_key_value_heads", 0),
        ("hidden_size", 0),
        ("hidden_size", 10**30),
        ("hidden_size", "64"),
        ("hidden_size", None),
        ("num_hidden_layers", -1),
        ("num_hidden_layers", 10**9),
        ("vocab_size", 10**13),
        ("vocab_size", None),
        ("intermediate_size", 96.5),
        ("intermediate_size", None),
        ("max_position_embeddings", 0),
        ("rms_norm_eps", -1),
        ("rope_theta", 0),
        ("dtype", "int9"),
        ("num_local_experts", 8),
        ("architectures", ["MixtralForCausalLM"]),
    ],
)
def test_a_wrong_model_is_one_line_and_exit_code_65(
    command: str, field: str, value: object, tmp_path: Path, capsys: Capture
) -> None:
    """None leaves the field out."""
    shapes = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
        "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16",
    }  # fmt: skip
    file = tmp_path / "config.json"
    file.write_text(json.dumps(shapes))
    assert main([command, str(file)]) == 0
    capsys.readouterr()
    file.write_text(json.dumps({name: found for name, found in {**shapes, field: value}.items() if found is not None}))
    code, line = error_of(capsys, command, str(file))
    assert code == 65
    assert field in line


@pytest.mark.parametrize("command", ["plan", "describe"])
@pytest.mark.parametrize("content", ["[1]", "{nope", "", "\x00"])
def test_what_is_no_configuration_is_one_line_and_exit_code_65(
    command: str, content: str, tmp_path: Path, capsys: Capture
) -> None:
    file = tmp_path / "config.json"
    file.write_text(content)
    code, line = error_of(capsys, command, str(file))
    assert code == 65
    assert str(file) in line
