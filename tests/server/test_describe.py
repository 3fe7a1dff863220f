from pathlib import Path

import pytest
from support.checkpoints import tiny_model

from octavo.model.weights.locate import locate
from octavo.model.weights.lookup import find_config
from octavo.server.cli import main
from octavo.server.describing import attention_parameters, matrices, parameters, saved_by_sharing, table


def lines(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(["describe", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_the_seven_matrices_of_llama_3_70b() -> None:
    config = find_config("llama-3-70b")
    found = {matrix.name: (matrix.inputs, matrix.outputs, matrix.parameters) for matrix in matrices(config)}
    assert found == {
        "W_Q": (8192, 8192, 67_108_864),
        "W_K": (8192, 1024, 8_388_608),
        "W_V": (8192, 1024, 8_388_608),
        "W_O": (8192, 8192, 67_108_864),
        "W_gate": (8192, 28672, 234_881_024),
        "W_up": (8192, 28672, 234_881_024),
        "W_down": (28672, 8192, 234_881_024),
    }
    assert attention_parameters(config) == 150_994_944
    assert saved_by_sharing(config) == 117_440_512
    assert parameters(config) == 70_553_706_496


def test_each_matrix_receives_as_many_numbers_as_the_one_before_produces() -> None:
    found = {matrix.name: matrix for matrix in matrices(find_config("smollm2"))}
    assert found["W_O"].inputs == found["W_Q"].outputs
    assert found["W_down"].inputs == found["W_gate"].outputs == found["W_up"].outputs
    assert found["W_O"].outputs == found["W_down"].outputs == found["W_Q"].inputs == 576


def test_the_text_has_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    text = "\n".join(lines(capsys, "llama-3-70b"))
    for figure in (
        *("855,638,016", "150,994,944", "704,643,072", "82.4%", "16,384", "68,451,041,280", "70,553,706,496"),
        *("4,096", "327,680", "32,768", "2,621,440", "117,440,512"),
    ):
        assert f" {figure}" in text
    assert "8 query heads share each head of k and v" in text


def test_a_model_with_multi_head_attention_saves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_model(tmp_path, "llama", kv_heads=4, tied=True)
    text = "\n".join(lines(capsys, str(tmp_path)))
    assert "multi-head attention" in text
    assert "saved" not in text
    assert "also the LM head" in text


def test_a_trace_lists_every_block_and_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    found = lines(capsys, str(locate("smollm2")), "--dtype", "float32", "--trace", "The capital of France is")
    start = next(index for index, line in enumerate(found) if line.startswith("norms"))
    assert "a mean over 5 tokens" in found[start]
    assert "spine: one vector a token, to which every block adds two" in found[start - 1]
    blocks = [line.split() for line in found[start + 3 : -1]]
    assert [row[0] for row in blocks] == [str(index) for index in range(30)]
    assert all(float(cell) > 0 for row in blocks for cell in row[1:])
    *_, error = found[-1].split()
    assert float(error) < 1e-6 * max(float(row[3]) for row in blocks) * 60
    assert "60 contributions" in found[-1]


def test_a_text_without_tokens_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["describe", "smollm2", "--trace", ""]) == 64
    assert "--trace: 0 tokens" in capsys.readouterr().err


def test_columns_are_aligned() -> None:
    assert list(table([("name", "size"), ("a", "1,000"), ("long", "2")])) == [
        "name   size",
        "a     1,000",
        "long      2",
    ]


@pytest.mark.parametrize("command", ["plan", "describe"])
def test_the_help_names_the_exit_codes(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    _, codes = capsys.readouterr().out.split("exit codes:")
    expected = {"plan": ["0", "1", "64", "65"], "describe": ["0", "64", "65"]}
    assert [line.split()[0] for line in codes.strip().splitlines()] == expected[command]
