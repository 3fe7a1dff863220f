"""What a process holds at most while a checkpoint is read, beside what it held before: the weights and a tenth."""

import json
import math
import select
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from octavo.model.weights.configuration import read_config
from octavo.model.weights.headers import tensor_shapes
from octavo.model.weights.locate import locate

LOADER = """
import sys
from collections.abc import Iterator
from pathlib import Path
import torch
from octavo.model.kernels.load import load_kernels
from octavo.model.transformer import Transformer
from octavo.model.weights.checkpoint import load_weights, open_checkpoint
checkpoint, kernels = open_checkpoint(Path(sys.argv[1])), load_kernels(torch.bfloat16)
print(flush=True)
sys.stdin.readline()
cpu = torch.device("cpu")
model = Transformer(checkpoint.config, kernels, dtype=torch.bfloat16, device=cpu, max_positions=16)
load_weights(checkpoint, model.destinations(), lambda done, total: None)
print(model.weights_nbytes, flush=True)
sys.stdin.readline()
"""
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "vocab_size": 32_000,
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 7, "num_attention_heads": 16,
    "num_key_value_heads": 8, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip


def random_checkpoint(directory: Path) -> int:
    """Write a checkpoint of random bfloat16 numbers and return the size of its tensors."""
    (directory / "config.json").write_text(json.dumps(CONFIG))
    header, offset = {}, 0
    for name, shape in tensor_shapes(read_config(directory)).items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": (offset, offset + size)}
        offset += size
    text = json.dumps(header).encode()
    numbers = np.random.default_rng(0).integers(0, 1 << 16, 1 << 23, dtype=np.uint16)
    chunk = (numbers & 0xBFFF).tobytes()  # without the highest bit of the exponent: finite, below 2
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for start in range(0, offset, len(chunk)):
            file.write(chunk[: offset - start])
    return offset


def anonymous_bytes(process: int) -> int:
    """By the kernel's own walk over the pages: unlike the process's counters, exact at any moment."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Anonymous:"))


def measure(path: Path) -> tuple[int, int, int]:
    """Load in a process of its own: bytes of the weights, and what it held in the end and at most, beside the start."""
    command = [sys.executable, "-c", LOADER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as loader:
        assert loader.stdin is not None
        assert loader.stdout is not None
        assert loader.stdout.readline() == b"\n"
        before = peak = anonymous_bytes(loader.pid)
        loader.stdin.write(b"\n")
        while not select.select([loader.stdout], [], [], 0.001)[0]:
            peak = max(peak, anonymous_bytes(loader.pid))
        line = loader.stdout.readline()
        end = anonymous_bytes(loader.pid)
        loader.stdin.write(b"\n")
    return int(line), end - before, peak - before


@pytest.fixture
def large(tmp_path: Path) -> Iterator[Path]:
    assert random_checkpoint(tmp_path) > 1_000_000_000
    yield tmp_path
    (tmp_path / "model.safetensors").unlink()


def test_a_safetensors_checkpoint_of_1_gb_is_read_within_its_weights_and_a_tenth(large: Path) -> None:
    weights, end, peak = measure(large)
    assert weights > 1_000_000_000
    assert weights <= end <= peak <= 1.1 * weights


def test_the_default_model_is_read_within_its_weights_and_a_tenth() -> None:
    weights, end, peak = measure(locate("smollm2"))
    assert 0.99 * weights <= end <= peak <= 1.1 * weights
