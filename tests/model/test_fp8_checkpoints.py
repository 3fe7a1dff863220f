"""Checkpoints in 8-bit floats: what is stored is multiplied with, and what cannot be served is refused by name."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import CACHE_SCHEME, COMPRESSED_TENSORS, edit_config, tiny_model, write_fp8
from support.flashinfer_emulation import emulated_flashinfer
from support.gpu_runners import FP8_CACHE, FakeCapture, build_on_gpu, scenario, serve
from support.gpu_runners import LIMITS as SCENARIO_LIMITS
from support.runners import build, logits_of
from torch import Tensor
from transformers import PreTrainedModel

from octavo.kvcache.store import KVStore
from octavo.model.attention.load import scale_destinations
from octavo.model.config import ModelConfig
from octavo.model.device import CPU
from octavo.model.kernels.cuda import CudaKernels
from octavo.model.kernels.fp8 import Fp8Linear
from octavo.model.memory import RunnerLimits, kv_layout, rank_shape
from octavo.model.parallel import share_destinations
from octavo.model.transformer import Transformer
from octavo.model.weights.checkpoint import load_weights, open_checkpoint
from octavo.model.weights.errors import CheckpointError
from octavo.model.weights.headers import check_headers, stored_shapes
from octavo.server.cli import main

LIMITS = RunnerLimits(max_model_len=128, max_rows=5, max_tokens=24, block_size=16, blocks=12)
TOKENS = [3, 1, 4, 1, 5, 92, 65]
VLLM = {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ["lm_head"]}


@pytest.fixture
def model(tmp_path: Path) -> PreTrainedModel:
    return tiny_model(tmp_path / "plain", "qwen2", head_dim=64, width=64, dtype=torch.bfloat16)


def loaded(directory: Path, **options: Any) -> Any:
    with emulated_flashinfer():
        return build_on_gpu(open_checkpoint(directory), LIMITS, fp8=True, **options)[0]


@pytest.mark.parametrize(
    ("per_tensor", "quantization"), [(False, COMPRESSED_TENSORS), (True, COMPRESSED_TENSORS), (True, VLLM)]
)
def test_a_gpu_multiplies_with_the_very_numbers_of_the_checkpoint(
    per_tensor: bool, quantization: dict[str, Any], model: PreTrainedModel, tmp_path: Path
) -> None:
    meant = write_fp8(tmp_path, model, per_tensor=per_tensor, quantization=quantization)
    check_headers(tmp_path, "auto")
    runner = loaded(tmp_path)
    for layer, block in enumerate(runner.model.blocks):
        names = (("self_attn", "qkv"), ("self_attn", "o"), ("mlp", ("gate", "up")), ("mlp", ("down",)))
        for linear, (branch, parts) in zip(block.linears(), names, strict=True):
            assert isinstance(linear, Fp8Linear)
            expected = [meant[f"model.layers.{layer}.{branch}.{part}_proj.weight"] for part in parts]
            assert torch.equal(linear._weight.float() * linear._scales.T, torch.cat(expected))


def test_a_cpu_widens_it_to_the_logits_of_a_checkpoint_of_the_same_numbers(
    model: PreTrainedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    meant = write_fp8(tmp_path, model)
    save_file({name: tensor.float() for name, tensor in meant.items()}, tmp_path / "plain" / "model.safetensors")
    logits = [logits_of(build(directory)[0], TOKENS) for directory in (tmp_path, tmp_path / "plain")]
    assert torch.equal(*logits)
    assert logits[0].abs().max() > 0.1


def test_its_logits_are_those_of_the_same_numbers_rounded_while_they_are_loaded(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    """Each row's largest number is 448 scales, so rounding it again finds the same scale and the same numbers."""
    meant = write_fp8(tmp_path, model)
    save_file({name: tensor.float() for name, tensor in meant.items()}, tmp_path / "plain" / "model.safetensors")
    with emulated_flashinfer():
        runners = [build_on_gpu(open_checkpoint(path), LIMITS, fp8=True)[0] for path in (tmp_path, tmp_path / "plain")]
        logits = [logits_of(runner, TOKENS) for runner in runners]
    assert torch.equal(*logits)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_holds_its_share_of_the_very_numbers(rank: int, model: PreTrainedModel, tmp_path: Path) -> None:
    write_fp8(tmp_path, model)
    checkpoint = open_checkpoint(tmp_path)
    config = checkpoint.config
    with emulated_flashinfer():
        kernels = CudaKernels(torch.bfloat16, CPU, fp8=True)
        share = Transformer(rank_shape(config, 2), kernels, dtype=torch.bfloat16, device=CPU, max_positions=8)
    whole = loaded(tmp_path).model
    destinations = share_destinations(share.destinations(), stored_shapes(config), rank)
    load_weights(checkpoint, destinations, lambda done, total: None)
    for own, all_of_it in zip(share.blocks, whole.blocks, strict=True):
        _, output, gate_up, down = own.linears()
        _, whole_output, whole_gate_up, whole_down = all_of_it.linears()
        for part, divided in ((output, whole_output), (down, whole_down)):
            columns = slice(rank * part.in_features, (rank + 1) * part.in_features)
            assert same(part._weight, divided._weight[:, columns])
            assert torch.equal(part._scales, divided._scales)
        half = gate_up.out_features // 2
        rows = torch.cat([side + rank * half + torch.arange(half) for side in (0, 2 * half)])
        assert same(gate_up._weight, whole_gate_up._weight[rows])
        assert torch.equal(gate_up._scales, whole_gate_up._scales[:, rows])


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.contiguous().view(torch.uint8))


CACHE_SCALES = {"k_scale": 2.0**-8, "v_scale": 2.0**-5}
"""Powers of two, which scale without rounding. The least of them makes large numbers of K too large for 8 bits."""


def scaled(directory: Path, model: PreTrainedModel, **scales: float) -> Path:
    write_fp8(directory, model, cache_scales={**CACHE_SCALES, **scales})
    check_headers(directory, "auto")
    return directory


def tokens_of(directory: Path, **options: Any) -> dict[int, list[int]]:
    checkpoint = open_checkpoint(directory)
    runner, _ = build_on_gpu(checkpoint, SCENARIO_LIMITS, fp8=True, **options)
    served = serve(runner, SCENARIO_LIMITS, *scenario(checkpoint.config.vocabulary))
    assert served.errors == []
    return served.tokens


def test_a_cache_in_8_bits_keeps_k_and_v_by_the_scales_of_the_checkpoint(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    """The tokens are those of attention to the numbers that this means, kernel by kernel and captured."""
    scaled(tmp_path, model)
    with emulated_flashinfer() as emulation:
        expected = tokens_of(tmp_path, workspaces=FP8_CACHE, reference=True)
        assert tokens_of(tmp_path, workspaces=FP8_CACHE) == expected
        assert tokens_of(tmp_path, workspaces=FP8_CACHE, capture=FakeCapture(emulation)) == expected
        write_fp8(tmp_path, model)
        assert tokens_of(tmp_path, workspaces=FP8_CACHE) != expected


def test_every_rank_of_a_divided_model_has_the_scales_of_the_cache(model: PreTrainedModel, tmp_path: Path) -> None:
    config = open_checkpoint(scaled(tmp_path, model)).config
    for rank in (0, 1):
        shape = rank_shape(config, 2)
        store = KVStore(kv_layout(shape, 16, 1), 2, torch.float8_e4m3fn, CPU)
        for name, destination in share_destinations(
            scale_destinations(shape, store), stored_shapes(config), rank
        ).items():
            destination.load(0, open_checkpoint(tmp_path).read(name))
        assert store.scales == [{name: scale / 2**layer for name, scale in CACHE_SCALES.items()} for layer in (0, 1)]


def test_a_cache_of_the_activations_type_needs_no_scales(model: PreTrainedModel, tmp_path: Path) -> None:
    paths = [scaled(tmp_path / "scaled", model), tmp_path / "unscaled"]
    write_fp8(paths[1], model)
    assert torch.equal(*(logits_of(build(path)[0], TOKENS) for path in paths))
    with emulated_flashinfer():
        assert torch.equal(*(logits_of(loaded(path), TOKENS) for path in paths))


def test_a_scale_of_the_cache_that_is_not_positive_or_missing_is_named(model: PreTrainedModel, tmp_path: Path) -> None:
    scaled(tmp_path, model, v_scale=0.0)
    with pytest.raises(CheckpointError, match=r"tensor 'model.layers.0.self_attn.v_scale' is 0; expected a positive"):
        loaded(tmp_path, workspaces=FP8_CACHE)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_scale"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"'model.layers.1.self_attn.k_scale' is missing"):
        check_headers(tmp_path, "auto")


def changed(*path: str, value: Any) -> dict[str, Any]:
    found = copy.deepcopy(COMPRESSED_TENSORS)
    section: Any = found
    for name in path[:-1]:
        section = section[name]
    section[path[-1]] = value
    return found


GROUP = ("config_groups", "group_0")
METHODS = ("awq", "gptq", "bitsandbytes", "mxfp4", "fbgemm_fp8")
REFUSED = [
    *(({"quant_method": method}, f"quant_method is '{method}'") for method in METHODS),
    ({"bits": 4}, "quant_method is missing"),
    ({**VLLM, "activation_scheme": "static"}, "activation_scheme is 'static'"),
    ({**VLLM, "weight_block_size": [128, 128]}, "weight_block_size is '[128, 128]'"),
    ({**VLLM, "ignored_layers": ["model.layers.0.mlp.down_proj"]}, "ignored_layers has 'model.layers.0.mlp.down_proj'"),
    (changed("format", value="pack-quantized"), "format is 'pack-quantized'"),
    (changed("config_groups", value={}), "config_groups does not hold one group"),
    (changed(*GROUP, "targets", value=["Embedding"]), "targets is"),
    (changed(*GROUP, "weights", value=None), "weights is missing"),
    (changed(*GROUP, "weights", "num_bits", value=4), "weights: num_bits is '4'"),
    (changed(*GROUP, "weights", "strategy", value="block"), "strategy is 'block'"),
    (changed(*GROUP, "input_activations", value=None), "input_activations is missing"),
    (changed(*GROUP, "input_activations", "dynamic", value=False), "input_activations: dynamic is 'False'"),
    (changed("ignore", value=["re:.*self_attn.*"]), "ignore has 're:.*self_attn.*'"),
    (changed("kv_cache_scheme", value={**CACHE_SCHEME, "num_bits": 4}), "kv_cache_scheme: num_bits is '4'"),
    (changed("kv_cache_scheme", value={**CACHE_SCHEME, "strategy": "attn_head"}), "strategy is 'attn_head'"),
    (changed("kv_cache_scheme", value={**CACHE_SCHEME, "dynamic": True}), "kv_cache_scheme: dynamic is 'True'"),
    ({**VLLM, "kv_cache_scheme": "static"}, "kv_cache_scheme is 'static'"),
]  # fmt: skip


@pytest.mark.parametrize(("quantization", "named"), REFUSED, ids=[named for _, named in REFUSED])
def test_a_method_that_cannot_be_served_is_refused_by_name(quantization: dict[str, Any], named: str) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "vocab_size": 100,
        "max_position_embeddings": 64,
    }
    with pytest.raises(CheckpointError) as raised:
        ModelConfig.from_hugging_face({**config, "quantization_config": quantization})
    assert str(raised.value).startswith("config.json: quantization_config")
    assert named in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1
    assert raised.value.exit_code == 65


@pytest.mark.parametrize("command", ["serve", "check", "plan", "describe"])
def test_every_command_refuses_it_in_one_line(
    command: str, model: PreTrainedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit_config(tmp_path / "plain", quantization_config={"quant_method": "awq", "bits": 4})
    assert main([command, str(tmp_path / "plain")]) == 65
    output = capsys.readouterr()
    assert output.out == ""
    assert "quant_method is 'awq', which is not supported; use an unquantised checkpoint" in output.err
    assert output.err.count("\n") == 1


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda tensors: tensors.pop(f"{UP}_scale"), f"'{UP}_scale' is missing"),
        (lambda tensors: tensors.update({f"{UP}_scale": torch.ones(3)}), r"has shape \[3\]; expected \[96\]"),
        (lambda tensors: tensors.update({UP: torch.ones(96, 64)}), f"'{UP}' has dtype F32; supported: F8_E4M3"),
        (
            lambda tensors: tensors.update({"lm_head.weight": torch.ones(128, 64).to(torch.float8_e4m3fn)}),
            "'lm_head.weight' has dtype F8_E4M3; supported: F32",
        ),
        (lambda tensors: tensors.update({f"{UP[:-7]}.input_scale": torch.ones(1)}), "is not part of the architecture"),
    ],
)
def test_tensors_that_do_not_fit_the_configuration_are_named(
    change: Callable[[dict[str, Tensor]], Any], named: str, model: PreTrainedModel, tmp_path: Path
) -> None:
    write_fp8(tmp_path, model)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=named):
        check_headers(tmp_path, "auto")


def test_what_it_takes_is_planned_as_8_bits_on_a_gpu_and_as_numbers_on_a_cpu(
    model: PreTrainedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_fp8(tmp_path, model)
    kinds = []
    for options in (["--device", "h200"], []):
        assert main(["plan", str(tmp_path), *options]) == 0
        kinds.append(capsys.readouterr().out.splitlines()[0])
    assert "weights fp8 and bfloat16" in kinds[0]
    assert "weights bfloat16" in kinds[1]
