"""Write the embedded default model in the forms that other servers read, with the same weights.

    .venv/bin/python bench/peer_models.py DIRECTORY

Makes DIRECTORY/hf (config, safetensors in bfloat16, tokenizer), DIRECTORY/bf16.gguf, q8_0.gguf and q4_1.gguf; the last
is the embedded file itself. Needs what `make install-test` installs.
"""

import json
import shutil
import sys
from pathlib import Path

import gguf
import numpy as np
import torch
from device_serving import describe_model
from safetensors.torch import save_file
from tqdm import tqdm

from octavo.model.weights.checkpoint import open_checkpoint
from octavo.model.weights.gguf_file import GGUFFile
from octavo.model.weights.locate import locate
from octavo.server.tokenizer_gguf import gguf_tokenizer

TYPES = {"bf16": gguf.GGMLQuantizationType.BF16, "q8_0": gguf.GGMLQuantizationType.Q8_0}


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    target = Path(sys.argv[1])
    (target / "hf").mkdir(parents=True, exist_ok=True)
    source = locate("smollm2")
    shutil.copyfile(source, target / "q4_1.gguf")
    for name, kind in TYPES.items():
        convert(source, target / f"{name}.gguf", kind)
    write_directory(source, target / "hf")


def convert(source: Path, target: Path, kind: gguf.GGMLQuantizationType) -> None:
    """Write a GGUF file again with its matrices in another type."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "llama")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in {"general.architecture", "general.file_type"}:
            item = field.types[1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=item)
    for tensor in tqdm(reader.tensors, target.name):
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_directory(source: Path, target: Path) -> None:
    """Write what Hugging Face's libraries load."""
    checkpoint = open_checkpoint(source)
    config = checkpoint.config
    tensors = {name: checkpoint.read(name).to(torch.bfloat16) for name in checkpoint.shapes}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    facts = describe_model(config) | {"pad_token_id": 2}
    (target / "config.json").write_text(json.dumps(facts, indent=2))
    gguf_tokenizer(GGUFFile(source).metadata).backend.save(str(target / "tokenizer.json"))
    (target / "tokenizer_config.json").write_text(
        json.dumps(
            {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
        )
    )


if __name__ == "__main__":
    main()
