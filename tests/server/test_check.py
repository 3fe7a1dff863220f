"""`octavo check` ends as `octavo serve` would, and shows the plan that the engine would carry out."""

import json
import socket
from pathlib import Path

import pytest
from support.checkpoints import edit_config, tiny_model
from support.vocabularies import byte_level_backend

from octavo.scheduler.loading import load
from octavo.server.cli import main
from octavo.server.flags import resolve

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def model(tmp_path: Path) -> str:
    """The directory of a tiny checkpoint with a tokenizer and no chat template."""
    tiny_model(tmp_path / "tiny", "llama", vocabulary=byte_level_backend().get_vocab_size())
    byte_level_backend().save(str(tmp_path / "tiny" / "tokenizer.json"))
    return str(tmp_path / "tiny")


def lines(capsys: Capture, *arguments: str, code: int = 0) -> list[str]:
    assert main(["check", *arguments]) == code
    output = capsys.readouterr()
    assert output.err == ""
    return output.out.splitlines()


def test_it_prints_the_table_of_plan_and_the_sizes_that_the_engine_allocates(model: str, capsys: Capture) -> None:
    options = [model, "--max-num-seqs", "4", "--kv-blocks", "40", "--max-model-len", "64"]
    checked = lines(capsys, *options)
    assert main(["plan", *options]) == 0
    assert checked[checked.index("") + 1 :] == capsys.readouterr().out.splitlines()
    assert "--max-num-seqs 4" in checked[0]
    assert "--kv-blocks 40" in checked[0]
    settings = resolve({"model": model, "max_num_seqs": "4", "kv_blocks": "40", "max_model_len": "64"}, {})
    _, _, ready = load(settings.engine)
    for line in ready.memory:
        if line.bucket in ("weights", "cache", "activations"):
            assert any(row.startswith(line.bucket) and f"{line.allocated:,} B" in row for row in checked)
    assert f"kernels    {ready.kernels}" in checked


def test_it_runs_beside_a_server_on_the_same_port(model: str, capsys: Capture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        lines(capsys, model, "--port", str(taken.getsockname()[1]))


def test_a_model_without_a_chat_template_is_said_to_have_none(model: str, tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages[0].content }}")
    assert any("no chat template" in line for line in lines(capsys, model))
    assert not any("no chat template" in line for line in lines(capsys, model, "--chat-template", str(file)))


def test_memory_that_does_not_suffice_is_exit_code_64_with_changes_that_would(model: str, capsys: Capture) -> None:
    checked = lines(capsys, model, "--memory", "300k", "--max-num-batched-tokens", "4096", code=64)
    assert any(line.startswith("It does not fit") for line in checked)


@pytest.mark.parametrize("options", [[], ["--max-model-len", "48"], ["--max-num-seqs", "3", "--kv-blocks", "7"]])
def test_a_budget_far_too_small_is_answered_with_the_smallest_that_fits(
    options: list[str], model: str, capsys: Capture
) -> None:
    checked = lines(capsys, model, *options, "--memory", "10k", code=64)
    budgets = [int(line.split()[1].rstrip(":")) for line in checked if line.startswith("  --memory ")]
    assert len(budgets) == (1 if options else 2)
    for budget in budgets:
        lines(capsys, model, *options, "--memory", str(budget))
    lines(capsys, model, *options, "--memory", str(budgets[0] - 1), code=64)
    full = lines(capsys, model, "--memory", str(budgets[-1])) if not options else []
    assert not any("is lowered" in line for line in full)


def test_a_share_far_too_small_is_answered_with_a_budget_to_give_instead(model: str, capsys: Capture) -> None:
    checked = lines(capsys, model, "--gpu-memory-utilization", "0.000001", code=64)
    change, _, _ = next(line for line in checked if line.startswith("  --memory ")).partition(":")
    assert change.endswith(" instead of --gpu-memory-utilization")
    lines(capsys, model, "--memory", change.split()[1])


@pytest.mark.parametrize(
    ("options", "code", "named"),
    [
        (["--port", "x"], 64, "--port: 'x'"),
        (["--dtype", "float16"], 64, "--dtype float16"),
        (["--max-model-len", "1m"], 64, "--max-model-len 1048576"),
        (["--device", "cuda"], 69, "--device cuda"),
        (["--chat-template", "{bad}"], 65, "template"),
        (["--chat-template", "{binary}"], 65, "--chat-template"),
    ],
)
def test_what_serve_refuses_it_refuses_with_the_same_line_and_code(
    options: list[str], code: int, named: str, model: str, tmp_path: Path, capsys: Capture
) -> None:
    files = {"bad": tmp_path / "bad.jinja", "binary": tmp_path / "binary.jinja"}
    files["bad"].write_text("{% if %}")
    files["binary"].write_bytes(b"\xff\xfe")
    assert main(["check", model, *(option.format(**files) for option in options)]) == code
    error = capsys.readouterr().err
    assert error.startswith("octavo: error: ")
    assert error.count("\n") == 1
    assert named in error


def test_variables_count_and_unknown_ones_are_refused(
    model: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_KV_BLOCKS", "40")
    assert "40 blocks" in "\n".join(lines(capsys, model))
    monkeypatch.setenv("OCTAVO_FOO", "1")
    assert main(["check", model]) == 64
    assert "OCTAVO_FOO: there is no such setting" in capsys.readouterr().err


def test_damaged_files_are_exit_code_65(model: str, capsys: Capture) -> None:
    config = json.loads((Path(model) / "config.json").read_text())
    edit_config(Path(model), num_hidden_layers=config["num_hidden_layers"] + 1)
    assert main(["check", model]) == 65
    assert model in capsys.readouterr().err
