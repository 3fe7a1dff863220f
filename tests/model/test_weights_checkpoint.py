import json
import struct

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import FAMILIES, edit_config, tiny_model, write_gguf
from support.loading import loaded

from octavo.model.weights import checkpoint as checkpoint_module
from octavo.model.weights.checkpoint import load_weights, open_checkpoint
from octavo.model.weights.destination import Destination
from octavo.model.weights.errors import CheckpointError
from octavo.model.weights.headers import tensor_shapes

# A float32 product and a float32 sum round twice; a float64 one does not.
FLOAT32 = 2.0**-22


def load_all(path):
    checkpoint = open_checkpoint(path)
    return loaded(checkpoint, tensor_shapes(checkpoint.config))


def load_nothing(path, shapes):
    """Open and load; a row that arrives is an error of its own."""
    checkpoint = open_checkpoint(path)
    wanted = shapes or tensor_shapes(checkpoint.config)
    destinations = {name: Destination(shape, None) for name, shape in wanted.items()}
    load_weights(checkpoint, destinations, lambda done, total: None)


def refusal(path, shapes=None):
    """The one line with which opening or loading ends, before a single row was read."""
    with pytest.raises(CheckpointError) as caught:
        load_nothing(path, shapes)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 65
    return str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("tied", "shards"), [(False, 1), (True, 1), (False, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_safetensors_load_bit_for_bit(tmp_path, family, tied, shards, dtype):
    model = tiny_model(tmp_path, family, tied=tied, shards=shards, dtype=dtype)
    assert len(list(tmp_path.glob("*.safetensors"))) >= shards
    found = load_all(tmp_path)
    expected = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    for name, parameter in expected.items():
        assert torch.equal(found[name], parameter.float()), name


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"])
def test_gguf_loads_every_type_in_the_row_order_of_hugging_face(tmp_path, family, kind):
    width = {"width": 256, "head_dim": 64, "ffn_width": 256, "layers": 1} if kind.endswith("_K") else {}
    extra = {"attention_bias": True} if family == "llama" else {}
    model = tiny_model(tmp_path, family, heads=4, kv_heads=2, vocabulary=64, **width, **extra)
    expected = write_gguf(tmp_path / "model.gguf", model, kind)
    found = load_all(tmp_path / "model.gguf")
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        tolerance = FLOAT32 * np.abs(values).max()
        np.testing.assert_allclose(found[name].double().numpy(), values, rtol=0, atol=tolerance, err_msg=name)
        if kind == "F32":
            assert torch.equal(found[name], model.state_dict()[name]), name


@pytest.mark.parametrize("kind", ["safetensors", "gguf", "random"])
def test_slices_put_together_are_the_whole_tensor(tmp_path, kind, monkeypatch):
    model = tiny_model(tmp_path, "llama", attention_bias=True)
    write_gguf(tmp_path / "model.gguf", model, "Q4_0")
    path = tmp_path / "model.gguf" if kind == "gguf" else tmp_path
    checkpoint = open_checkpoint(path, kind)
    shapes = tensor_shapes(checkpoint.config)
    whole = loaded(checkpoint, shapes)
    row_bytes = 4 * max(shape[-1] for shape in shapes.values() if len(shape) == 2)
    monkeypatch.setattr(checkpoint_module, "SLICE_BYTES", 5 * row_bytes)
    sliced = loaded(checkpoint, shapes)
    for name, tensor in whole.items():
        assert torch.equal(tensor, sliced[name]), name
        assert torch.equal(tensor, checkpoint.read(name).float()), name


def test_nothing_larger_than_a_slice_is_handed_over_and_progress_counts_every_byte(tmp_path, monkeypatch):
    tiny_model(tmp_path, "qwen3", dtype=torch.bfloat16)
    monkeypatch.setattr(checkpoint_module, "SLICE_BYTES", 4096)
    checkpoint = open_checkpoint(tmp_path)
    shapes = tensor_shapes(checkpoint.config)
    sizes, reports = [], []
    load_weights(
        checkpoint,
        {name: Destination(shape, lambda _, rows: sizes.append(rows.numel())) for name, shape in shapes.items()},
        lambda done, total: reports.append((done, total)),
    )
    numbers = sum(torch.Size(shape).numel() for shape in shapes.values())
    assert sum(sizes) == numbers
    assert max(sizes) == 1024
    assert [done for done, _ in reports] == [2 * sum(sizes[: count + 1]) for count in range(len(sizes))]
    assert {total for _, total in reports} == {2 * numbers}


def test_a_tied_head_is_the_embedding_whatever_the_file_holds(tmp_path):
    model = tiny_model(tmp_path, "llama", tied=True)
    embedding = model.model.embed_tokens.weight
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "lm_head.weight": torch.zeros(128, 64)}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    without_head = tensor_shapes(checkpoint.config)
    assert "lm_head.weight" not in loaded(checkpoint, without_head)
    found = loaded(checkpoint, {**without_head, "lm_head.weight": (128, 64)})
    assert torch.equal(found["lm_head.weight"], embedding)


def test_an_untied_head_that_is_missing_is_fatal(tmp_path):
    tiny_model(tmp_path, "llama", tied=True)
    edit_config(tmp_path, tie_word_embeddings=False)
    assert "tensor 'lm_head.weight' is missing" in refusal(tmp_path)


def test_rope_frequencies_of_old_checkpoints_are_passed_over(tmp_path):
    tiny_model(tmp_path, "llama")
    tensors = load_file(tmp_path / "model.safetensors")
    extra = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(8) for layer in range(2)}
    save_file({**tensors, **extra}, tmp_path / "model.safetensors")
    assert load_all(tmp_path).keys() == tensors.keys()


def changed(path, change):
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


UP = "model.layers.1.mlp.up_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(NORM), f"tensor '{NORM}' is missing"),
        (lambda tensors: tensors.update({NORM: torch.ones(32)}), f"'{NORM}' has shape [32]; expected [64]"),
        (lambda tensors: tensors.update({NORM: torch.ones(64, 1)}), f"'{NORM}' has shape [64, 1]; expected [64]"),
        (lambda tensors: tensors.update(extra=torch.ones(2)), "'extra' is not part of the architecture"),
        (lambda tensors: tensors.update({NORM: torch.ones(64).double()}), f"'{NORM}' has dtype F64; supported: F32"),
        (lambda tensors: tensors.update({NORM: torch.ones(64, dtype=torch.int8)}), "has dtype I8"),
    ],
)
def test_tensors_that_do_not_fit_are_named_before_anything_is_read(tmp_path, change, message):
    tiny_model(tmp_path, "llama")
    changed(tmp_path, change)
    assert message in refusal(tmp_path)
    assert str(tmp_path) in refusal(tmp_path)


def test_an_error_names_the_shard_that_holds_the_tensor(tmp_path):
    tiny_model(tmp_path, "llama", shards=3)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    edit_config(tmp_path, intermediate_size=64)
    file = index["weight_map"]["model.layers.0.mlp.gate_proj.weight"]
    message = "tensor 'model.layers.0.mlp.gate_proj.weight' has shape [96, 64]; expected [64, 64]"
    assert refusal(tmp_path) == f"{tmp_path / file}: {message}"


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", "weights.bin", 7, None]
)
def test_an_index_may_name_only_plain_files_of_its_directory(tmp_path, name):
    tiny_model(tmp_path, "llama")
    index = {"weight_map": {"model.norm.weight": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "is not the plain name of a .safetensors file" in refusal(tmp_path)


def test_a_broken_index_is_refused(tmp_path):
    tiny_model(tmp_path, "llama")
    index = tmp_path / "model.safetensors.index.json"
    for text, message in (
        ("{", "not valid JSON"),
        ("{}", "weight_map is missing"),
        ('{"weight_map": []}', "weight_map"),
    ):
        index.write_text(text)
        assert message in refusal(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "absent.safetensors"}}))
    assert f"{tmp_path / 'absent.safetensors'}: missing, though" in refusal(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    tiny_model(tmp_path, "llama")
    save_file({"model.norm.weight": torch.ones(64)}, tmp_path / "other.safetensors")
    index = {"weight_map": {"a": "model.safetensors", "model.norm.weight": "other.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "tensor 'model.norm.weight' is also in model.safetensors" in refusal(tmp_path)


def test_a_truncated_file_is_named_with_the_first_tensor_it_lacks_and_both_sizes(tmp_path):
    tiny_model(tmp_path, "llama")
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    header = json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])
    last = max(header, key=lambda name: header[name].get("data_offsets", [0, 0])[1])
    sizes = f"ends at byte {len(content):,}, the file at {len(content) - 1:,}"
    assert refusal(tmp_path) == f"{file}: truncated: tensor '{last}' {sizes}"
    for size in (0, 5, 8, 100, len(content) // 2):
        file.write_bytes(content[:size])
        assert f"{file}: truncated" in refusal(tmp_path)


def with_header(file, header):
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(encoded)) + encoded + bytes(1024))


SOUND = {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}


@pytest.mark.parametrize(
    "entry",
    [
        7,
        {},
        {**SOUND, "shape": [-4, -4]},
        {**SOUND, "shape": [4, 5]},
        {**SOUND, "shape": [4, 4.0]},
        {**SOUND, "shape": "4"},
        {**SOUND, "shape": [True] * 16},
        {**SOUND, "shape": [1 << 62, 4]},
        {**SOUND, "data_offsets": [64, 0]},
        {**SOUND, "data_offsets": [-64, 0]},
        {**SOUND, "data_offsets": [0, 64, 128]},
        {**SOUND, "dtype": ["F32"]},
        {**SOUND, "dtype": "F8_E4M3"},
        {**SOUND, "data_offsets": [1 << 62, (1 << 62) + 64]},
    ],
)
def test_no_entry_of_a_safetensors_header_is_believed(tmp_path, entry):
    tiny_model(tmp_path, "llama")
    with_header(tmp_path / "model.safetensors", {"model.norm.weight": entry})
    assert "tensor 'model.norm.weight'" in refusal(tmp_path)


@pytest.mark.parametrize("header", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b"1" * 5000])
def test_a_safetensors_header_that_is_no_object_is_refused(tmp_path, header):
    tiny_model(tmp_path, "llama")
    with_header(tmp_path / "model.safetensors", header)
    assert f"{tmp_path / 'model.safetensors'}: damaged: the header is not" in refusal(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 63) + bytes(64))
    assert "the header does not fit into 72 bytes" in refusal(tmp_path)


def test_data_that_overlaps_or_leaves_holes_is_refused(tmp_path):
    tiny_model(tmp_path, "llama")
    for offsets in ([0, 64], [32, 96], [128, 192]):
        entries = {"model.norm.weight": SOUND, "lm_head.weight": {**SOUND, "data_offsets": offsets}}
        with_header(tmp_path / "model.safetensors", entries)
        assert "model.safetensors: damaged" in refusal(tmp_path)


def test_a_file_that_vanishes_while_loading_is_an_error_of_the_checkpoint(tmp_path):
    write_gguf(tmp_path / "model.gguf", tiny_model(tmp_path, "llama"))
    opened = {file: open_checkpoint(file) for file in (tmp_path, tmp_path / "model.gguf")}
    for file in tmp_path.glob("model.*"):
        file.unlink()
    for checkpoint in opened.values():
        with pytest.raises(CheckpointError, match=r"/model\.\w+: tensor .* cannot be read"):
            checkpoint.read("model.norm.weight")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_f11_a_number_that_is_not_finite_is_refused_with_its_tensor_and_file(tmp_path, kind, value):
    model = tiny_model(tmp_path, "llama", dtype=torch.float16)
    weight = model.model.layers[1].mlp.up_proj.weight.data
    weight[weight.shape[0] - 1, 3] = value
    save_file({**load_file(tmp_path / "model.safetensors"), UP: weight}, tmp_path / "model.safetensors")
    path = tmp_path
    if kind == "gguf":
        path = tmp_path / "model.gguf"
        write_gguf(path, model, "F16")
    with pytest.raises(CheckpointError, match=f"model.{kind}: tensor '{UP}' holds a value that is not finite"):
        load_all(path)


def test_numbers_whose_sum_overflows_are_loaded(tmp_path):
    model = tiny_model(tmp_path, "llama", dtype=torch.float16)
    model.model.layers[1].mlp.up_proj.weight.data.fill_(60_000)
    weight = model.model.layers[1].mlp.up_proj.weight.data
    save_file({**load_file(tmp_path / "model.safetensors"), UP: weight}, tmp_path / "model.safetensors")
    assert torch.equal(load_all(tmp_path)[UP], weight.float())


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_pickled_weights_are_refused_unread_with_a_way_out(tmp_path, name):
    tiny_model(tmp_path, "llama")
    (tmp_path / "model.safetensors").rename(tmp_path / name)
    assert "may run code when read and are not supported; convert them" in refusal(tmp_path)


def test_a_directory_without_weights_says_so(tmp_path):
    tiny_model(tmp_path, "llama")
    (tmp_path / "model.safetensors").unlink()
    assert refusal(tmp_path) == f"{tmp_path}: neither model.safetensors nor model.safetensors.index.json"
    (tmp_path / "model.gguf").touch()
    assert "give the path of the file itself" in refusal(tmp_path)


def test_extra_and_misshapen_tensors_of_a_gguf_file_are_named(tmp_path):
    model = tiny_model(tmp_path, "llama")
    write_gguf(tmp_path / "model.gguf", model, rope_factors=[2.0] * 8)
    shapes = tensor_shapes(open_checkpoint(tmp_path / "model.gguf").config)
    assert loaded(open_checkpoint(tmp_path / "model.gguf"), shapes).keys() == shapes.keys()
    message = refusal(tmp_path / "model.gguf", {**shapes, "model.norm.weight": (63,)})
    assert message == f"{tmp_path / 'model.gguf'}: tensor 'model.norm.weight' has shape [64]; expected [63]"
    del shapes["model.norm.weight"]
    assert "'model.norm.weight' is not part of the architecture" in refusal(tmp_path / "model.gguf", shapes)


def test_random_weights_follow_from_seed_and_name_alone(tmp_path):
    tiny_model(tmp_path, "qwen2", dtype=torch.bfloat16)
    (tmp_path / "model.safetensors").unlink()
    checkpoint = open_checkpoint(tmp_path, "random", seed=3)
    shapes = tensor_shapes(checkpoint.config)
    names = list(shapes)
    first = loaded(checkpoint, shapes)
    again = loaded(open_checkpoint(tmp_path, "random", seed=3), {name: shapes[name] for name in reversed(names)})
    other = loaded(open_checkpoint(tmp_path, "random", seed=4), shapes)
    matrices = [name for name in names if "norm" not in name]
    for name in names:
        assert torch.equal(first[name], again[name])
        assert torch.equal(first[name], other[name]) == ("norm" in name)
        assert first[name].shape == shapes[name]
    assert all(torch.all(first[name] == 1) for name in names if "norm" in name)
    everything = torch.cat([first[name].flatten() for name in matrices])
    assert len(everything.unique()) > 1000
    assert abs(everything.mean()) < 5 * 0.02 / len(everything) ** 0.5
    assert abs(everything.std() / 0.02 - 1) < 5 / (2 * len(everything)) ** 0.5
    assert checkpoint.read(matrices[0]).dtype == torch.bfloat16
    assert len({tuple(first[name].flatten()[:8].tolist()) for name in matrices}) == len(matrices)


def test_a_load_format_must_be_known_and_fit(tmp_path):
    write_gguf(tmp_path / "model.gguf", tiny_model(tmp_path, "llama"))
    for path, load_format in ((tmp_path, "gguf"), (tmp_path / "model.gguf", "safetensors")):
        with pytest.raises(CheckpointError, match=f"not what load format '{load_format}' reads"):
            open_checkpoint(path, load_format)
    with pytest.raises(CheckpointError, match="choose one of auto, safetensors, gguf, random"):
        open_checkpoint(tmp_path, "pickle")


def digest(path):
    checkpoint = open_checkpoint(path)
    destinations = {
        name: Destination(shape, lambda first_row, rows: None)
        for name, shape in tensor_shapes(checkpoint.config).items()
    }
    return load_weights(checkpoint, destinations, lambda done, total: None)


def test_the_digest_of_weights_changes_with_any_of_them_and_with_nothing_else(tmp_path):
    model = tiny_model(tmp_path, "llama", tied=False)
    first = digest(tmp_path)
    assert len(bytes.fromhex(first)) == 32
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert digest(tmp_path) == first
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            parameter.view(-1)[-1] += 1
        model.save_pretrained(tmp_path, max_shard_size="100KB")
        changed = digest(tmp_path)
        assert changed != first, name
        first = changed
