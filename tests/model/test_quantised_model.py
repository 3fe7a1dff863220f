"""Whole models from quantised GGUF files: the same bits as widened ones, in fewer bytes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.checkpoints import tiny_model, write_gguf
from support.runners import build, cpu_kernels, formats_of, logits_of

from octavo.model.kernels.fallback import TorchKernels
from octavo.model.kernels.packing import QUANTISED
from octavo.model.memory import weights_bytes
from octavo.model.transformer import Transformer
from octavo.model.weights.checkpoint import open_checkpoint
from octavo.model.weights.configuration import read_config
from octavo.model.weights.locate import locate

TOKENS = [1, 5, 9, 2, 77, 31, 8, 8, 100, 3, 64, 12]
DTYPES = (torch.bfloat16, torch.float32)

pytestmark = pytest.mark.skipif(
    not cpu_kernels(torch.float32).panels, reason="without compiled kernels quantised weights are widened"
)


def model_file(directory: Path, kind: str, family: str = "llama", *, tied: bool = False, **kinds: str) -> Path:
    """A tiny model whose matrices have `kind`, but those whose names contain a keyword."""
    model = tiny_model(directory, family, width=256, head_dim=64, ffn_width=256, tied=tied)
    write_gguf(directory / "model.gguf", model, kind, kinds=kinds)
    return directory / "model.gguf"


def assert_as_widened(file: Path, dtype: torch.dtype) -> None:
    kept, _ = build(open_checkpoint(file), dtype)
    wide, _ = build(open_checkpoint(file, widen=True), dtype)
    assert kept.model.weights_nbytes < wide.model.weights_nbytes
    assert torch.equal(logits_of(kept, TOKENS), logits_of(wide, TOKENS))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.parametrize("tied", [True, False])
def test_logits_have_the_bits_of_the_widened_model(kind: str, tied: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    assert_as_widened(model_file(tmp_path, kind, tied=tied), dtype)


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_a_file_of_mixed_types_keeps_what_it_can_and_widens_the_rest(family: str, tmp_path: Path) -> None:
    file = model_file(tmp_path, "Q4_K", family, v_proj="Q6_K", up_proj="Q8_0", embed="Q6_K", down_proj="F16")
    quantised = read_config(file).quantised
    kinds = {name.split(".")[-2]: kind for name, kind in quantised.items()}
    others = dict.fromkeys(("q_proj", "k_proj", "o_proj", "gate_proj", "lm_head"), "Q4_K")
    assert kinds == {**others, "up_proj": "Q8_0"}
    for dtype in DTYPES:
        assert_as_widened(file, dtype)


def test_the_default_model_has_the_bits_of_the_widened_model() -> None:
    runners = [build(open_checkpoint(locate("smollm2"), widen=widen), torch.bfloat16)[0] for widen in (False, True)]
    tokens = torch.randint(49152, (80,), generator=torch.Generator().manual_seed(0)).tolist()
    kept, wide = (logits_of(runner, tokens[:60]) for runner in runners)
    assert torch.equal(kept, wide)
    sizes = [runner.model.weights_nbytes for runner in runners]
    # The embedding is in Q8_0, the other matrices in Q4_1; norms are in bfloat16.
    assert sizes == [28_311_552 * 34 // 32 + 106_168_320 * 20 // 32 + 2 * 35_136, 2 * 134_515_008]


def test_the_plan_counts_the_bytes_of_the_file(tmp_path: Path) -> None:
    mixed = model_file(tmp_path, "Q4_K", v_proj="Q6_K", up_proj="Q8_0")
    for dtype in DTYPES:
        for config in (read_config(mixed), read_config(locate("smollm2")), read_config(mixed).widened()):
            for kernels in (cpu_kernels(dtype), TorchKernels(dtype)):
                with torch.device("meta"):
                    model = Transformer(
                        replace(config, layers=2), kernels, dtype=dtype, device=torch.device("meta"), max_positions=4
                    )
                planned = weights_bytes(replace(config, layers=2), formats_of(kernels, dtype))
                assert planned == model.weights_nbytes
