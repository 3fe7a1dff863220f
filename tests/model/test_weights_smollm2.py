import json
import subprocess
import sys

import gguf
import pytest
import torch
from safetensors.torch import save_file
from support.checkpoints import gguf_name
from support.loading import loaded

from octavo.model.weights.checkpoint import open_checkpoint
from octavo.model.weights.gguf_file import GGUFFile
from octavo.model.weights.headers import tensor_shapes
from octavo.model.weights.locate import locate


@pytest.fixture(scope="module")
def reader():
    return gguf.GGUFReader(locate("smollm2"))


def test_the_header_of_smollm2_reads_as_the_gguf_package_reads_it(reader):
    file = GGUFFile(locate("smollm2"))
    theirs = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert file.metadata.keys() == theirs.keys()
    for name, value in file.metadata.items():
        if isinstance(value, list):
            assert (len(value), value[-50:]) == (len(theirs[name].data), theirs[name].contents(slice(-50, None)))
        else:
            assert value == theirs[name].contents()
    assert {name: (found.shape, found.type, found.offset, found.nbytes) for name, found in file.tensors.items()} == {
        found.name: (tuple(found.shape.tolist()[::-1]), found.tensor_type.name, found.data_offset, found.n_bytes)
        for found in reader.tensors
    }


def test_every_tensor_of_smollm2_is_what_the_gguf_package_reads_un_permuted(reader):
    checkpoint = open_checkpoint(locate("smollm2"))
    shapes = tensor_shapes(checkpoint.config)
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == 134_515_008
    found = loaded(checkpoint, shapes)
    theirs = {tensor.name: tensor for tensor in reader.tensors}
    assert len(theirs) == len(found)
    for name, tensor in found.items():
        stored = theirs[gguf_name(name)]
        expected = torch.tensor(gguf.dequantize(stored.data, stored.tensor_type))
        for projection, heads in (("q_proj", 9), ("k_proj", 3)):
            if projection in name:
                expected = torch.cat([torch.cat((head[0::2], head[1::2])) for head in expected.chunk(heads)])
        assert torch.equal(tensor, expected), name


MEASURE = """
import sys
from pathlib import Path
import torch
from octavo.model.weights.checkpoint import load_weights, open_checkpoint
from octavo.model.weights.headers import tensor_shapes
from support.loading import plain_destinations

def kilobytes(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1])

for path in sys.argv[1:]:
    checkpoint = open_checkpoint(Path(path))
    tensors, destinations = plain_destinations(tensor_shapes(checkpoint.config), torch.bfloat16)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    before = kilobytes("VmRSS")
    load_weights(checkpoint, destinations, lambda done, total: None)
    print(1024 * (kilobytes("VmHWM") - before))
"""


def test_loading_holds_no_second_copy_of_the_model(tmp_path):
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    shapes = tensor_shapes(open_checkpoint(tmp_path, "random").config)
    tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    command = [sys.executable, "-c", MEASURE, str(locate("smollm2")), str(tmp_path)]
    environment = {"PYTHONPATH": "tests", "OMP_NUM_THREADS": "1"}
    measured = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout.split()
    model_bytes = 2 * 134_515_008
    assert len(measured) == 2
    assert all(int(beside_the_model) < model_bytes / 2 for beside_the_model in measured)
