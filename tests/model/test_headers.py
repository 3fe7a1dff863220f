"""What is told from the headers of a GGUF file alone, before anything imports torch."""

import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from octavo.model.weights.errors import CheckpointError
from octavo.model.weights.gguf_names import BLOCK_NAMES, NAMES
from octavo.model.weights.headers import check_headers

WIDTH, HEADS, FFN, VOCABULARY, CONTEXT = 16, 2, 32, 24, 64
SHAPES = {
    "attn_norm": (WIDTH,),
    "ffn_norm": (WIDTH,),
    **dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (WIDTH, WIDTH)),
    **dict.fromkeys(("ffn_gate", "ffn_up"), (FFN, WIDTH)),
    "ffn_down": (WIDTH, FFN),
}
TENSORS = {
    "token_embd.weight": (VOCABULARY, WIDTH),
    "output_norm.weight": (WIDTH,),
    **{f"blk.{block}.{name}.weight": shape for block in range(2) for name, shape in SHAPES.items()},
}


def written(file: Path, tensors: dict[str, tuple[int, ...]]) -> Path:
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(2)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    for name, shape in tensors.items():
        writer.add_tensor(name, np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_a_whole_file_is_accepted_with_its_shapes(tmp_path: Path) -> None:
    assert {name.split(".")[-2] for name in TENSORS} <= NAMES.keys() | BLOCK_NAMES.keys()
    config = check_headers(written(tmp_path / "whole.gguf", TENSORS), "auto")
    assert (config.layers, config.width, config.vocabulary, config.max_context) == (2, WIDTH, VOCABULARY, CONTEXT)
    assert config.tied_embeddings


@pytest.mark.parametrize("name", list(TENSORS)[1:])
def test_a_tensor_that_is_missing_or_of_another_shape_is_named(name: str, tmp_path: Path) -> None:
    own = BLOCK_NAMES.get(name.split(".")[-2], "model.norm")
    rest = {other: shape for other, shape in TENSORS.items() if other != name}
    with pytest.raises(CheckpointError, match=rf"^{tmp_path}/less.gguf: tensor '.*{own}.weight' is missing$"):
        check_headers(written(tmp_path / "less.gguf", rest), "gguf")
    longer = (TENSORS[name][0] + 2, *TENSORS[name][1:])
    with pytest.raises(CheckpointError, match=rf"{own}.weight' has shape \[{longer[0]}.*; expected \["):
        check_headers(written(tmp_path / "other.gguf", TENSORS | {name: longer}), "gguf")


def test_a_tensor_that_is_not_of_the_architecture_is_named(tmp_path: Path) -> None:
    file = written(tmp_path / "more.gguf", TENSORS | {"blk.2.attn_q.weight": (WIDTH, WIDTH)})
    with pytest.raises(CheckpointError, match="is not part of the architecture"):
        check_headers(file, "auto")


@pytest.mark.parametrize("command", ["serve", "check"])
def test_a_context_beyond_the_models_is_refused_before_torch_is_imported(command: str, tmp_path: Path) -> None:
    file = written(tmp_path / "tiny.gguf", TENSORS)
    program = (
        f"import sys\nfrom octavo.server.cli import main\ncode = main([{command!r}, {str(file)!r}, *sys.argv[1:]])\n"
        "sys.exit(code if 'torch' not in sys.modules else 1)"
    )
    options = ["--max-model-len", str(CONTEXT + 1)]
    result = subprocess.run([sys.executable, "-c", program, *options], capture_output=True, text=True, check=False)
    assert result.returncode == 64, result.stderr
    assert result.stderr == "octavo: error: --max-model-len 65 exceeds the model's context of 64 tokens\n"
