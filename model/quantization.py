"""The quantization_config of a checkpoint: 8-bit floats with a scale for each row are served, and all else is refused.

The two spellings that are known are those of compressed-tensors ("float-quantized") and of vLLM ("fp8").
"""

from collections.abc import Mapping
from typing import Final

from octavo.model.fields import Fields

_ADVICE: Final = (
    "use an unquantised checkpoint (on a GPU with --quantization fp8), "
    "one of compressed-tensors with FP8 weights and dynamic activations, or a GGUF file"
)
_Wanted = Mapping[str, tuple[object, ...]]
_FP8: Final[_Wanted] = {"num_bits": (8,), "type": ("float",)}
_WANTED: Final[Mapping[str, _Wanted]] = {
    "weights": {**_FP8, "strategy": ("channel", "tensor"), "dynamic": (False, None)},
    "input_activations": {**_FP8, "strategy": ("token",), "dynamic": (True,)},
}
_CACHE: Final[_Wanted] = {**_FP8, "strategy": ("tensor",), "dynamic": (False, None)}
_OUTSIDE: Final = {"lm_head", "embed_tokens", "model.embed_tokens"}
"""What may be left unquantised: it is no matrix of a block."""


def stores_fp8(fields: Fields) -> bool:
    """Whether the matrices of the blocks are 8-bit floats. CheckpointError names the method that is not supported."""
    section = fields.section("quantization_config")
    if section is None:
        return False
    method = section.text("quant_method")
    if method == "fp8":
        _require(section, kv_cache_scheme=(None,), activation_scheme=("dynamic",), weight_block_size=(None,))
        _check_exceptions(section, "ignored_layers", "modules_to_not_convert")
        return True
    if method != "compressed-tensors":
        raise section.error("quant_method", f"is {method[:80]!r}, which is not supported; {_ADVICE}")
    _require(section, format=("float-quantized",))
    groups = section.section("config_groups")
    if groups is None or len(groups.values) != 1:
        raise section.error("config_groups", f"does not hold one group; {_ADVICE}")
    group = groups.section(next(iter(groups.values))) or groups
    _require(group, targets=(["Linear"],))
    for part, wanted in _WANTED.items():
        found = group.section(part)
        if found is None:
            raise group.error(part, f"is missing; {_ADVICE}")
        _require(found, **wanted)
    _check_exceptions(section, "ignore")
    return True


def scales_cache(fields: Fields) -> bool:
    """Whether a checkpoint of 8-bit floats has scales for the cache. CheckpointError for any but a number a layer."""
    section = fields.section("quantization_config")
    scheme = section and section.section("kv_cache_scheme")
    if scheme is None:
        return False
    _require(scheme, **_CACHE)
    return True


def _check_exceptions(fields: Fields, *names: str) -> None:
    """Either all matrices of the blocks are in 8 bits, or none is."""
    for name in names:
        for entry in fields.texts(name):
            if entry.removeprefix("re:").lstrip(".*") not in _OUTSIDE:
                raise fields.error(name, f"has {entry[:80]!r}, but only lm_head may be left out; {_ADVICE}")


def _require(fields: Fields, **wanted: tuple[object, ...]) -> None:
    for name, values in wanted.items():
        if (value := fields.values.get(name)) not in values:
            raise fields.error(name, f"is {str(value)[:80]!r}, which is not supported; {_ADVICE}")
