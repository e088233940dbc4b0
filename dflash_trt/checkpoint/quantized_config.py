"""What a checkpoint's JSON files say of its quantized weights: schemes that are read, by name.

All others are refused here, before any weight is fetched. Tensors are the truth of which layer is
quantized; what is said here must agree with them (`quantized.py`).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from dflash_trt.checkpoint.facts import Facts, brief, read_json
from dflash_trt.checkpoint.tensors import UNQUANTIZED
from dflash_trt.errors import UnsupportedArchitecture

# How weights [out, in] are stored, as `TensorInfo.dtype` has it -> how a message has it.
FP8, FP8_CHANNEL, FP8_BLOCK, NVFP4 = "FP8", "FP8_CHANNEL", "FP8_BLOCK", "NVFP4"
SCHEMES = {
    FP8: "FP8 with one scale",
    FP8_CHANNEL: "FP8 with a scale per output",
    FP8_BLOCK: "FP8 with a scale per block",
    NVFP4: "NVFP4",
}

KEY, MODELOPT_FILE = "quantization_config", "hf_quant_config.json"
# What says that weights are quantized in a way we do not read: MLX, older compressed-tensors; then
# GPTQ, AWQ.
_OTHER_KEYS = ("quantization", "compression_config")
_OTHER_FILES = ("quantize_config.json", "quant_config.json")

_MODELOPT = {
    "FP8": FP8, "FP8_PER_CHANNEL_PER_TOKEN": FP8_CHANNEL, "NVFP4": NVFP4, "W4A16_NVFP4": NVFP4,
}  # fmt: skip
_PLAIN = (None, "NONE")  # ModelOpt's algorithm of what it does not quantize
_WEIGHTS_ONLY = frozenset({"W4A16_NVFP4"})
# compressed-tensors' bits, type and strategy of weights.
_COMPRESSED = {
    (8, "float", "tensor"): FP8,
    (8, "float", "channel"): FP8_CHANNEL,
    (8, "float", "block"): FP8_BLOCK,
    (4, "float", "tensor_group"): NVFP4,
}
_FP8_FORMATS = ("float-quantized", "naive-quantized")
_BLOCK_TEXT = re.compile(r"([1-9][0-9]{0,8})x([1-9][0-9]{0,8})")  # older files have "128x128"
# The block that transformers' FineGrainedFP8Config documents as its default.
_DEFAULT_BLOCK = (128, 128)


@dataclass(frozen=True)
class Quantization:
    """The schemes that a checkpoint's files name; each may hold for some of the weights only."""

    place: str  # file and key, for messages
    schemes: frozenset[str]
    block: tuple[int, int] | None = None  # outputs and inputs that share a scale in FP8_BLOCK
    weights_only: bool = False  # some products' inputs were left in 16 bits

    @property
    def words(self) -> str:
        """The schemes, for messages."""
        return " and ".join(SCHEMES[scheme] for scheme in SCHEMES if scheme in self.schemes)


def read_quantization(facts: Facts) -> Quantization | None:
    """What `config.json` (`facts`) and the files beside it say; None: nothing is quantized.

    Raises `UnsupportedArchitecture` naming what is not read, `CheckpointError` for a bad value or
    for two files that contradict each other.
    """
    folder = facts.path.parent
    for key in _OTHER_KEYS:
        value = facts.get(key)
        if value is not None:
            method = value.get("quant_method", value) if isinstance(value, dict) else value
            raise _unsupported(facts.path, f"{key} ({brief(method)})")
    for name in _OTHER_FILES:
        if os.path.exists(folder / name):
            raise _unsupported(folder / name, "a checkpoint of GPTQ or AWQ")
    said = []
    section, path = facts.section(KEY), folder / MODELOPT_FILE
    if section.data:  # an empty object says nothing
        said.append(_by_method(section))
    if os.path.exists(path):
        said.append(_modelopt(Facts(path, read_json(path)).section("quantization"), str(path)))
    words = ["that no weight is quantized" if each is None else each.words for each in said]
    if len(set(words)) > 1:
        raise facts.error(
            f"{KEY} says {words[0]}, but {MODELOPT_FILE} says {words[1]}",
            "download the checkpoint again",
        )
    return said[0] if said else None


def _by_method(section: Facts) -> Quantization | None:
    place = f"{section.path}: {KEY}"
    # ModelOpt's exporter of drafters copies the whole hf_quant_config.json, which has no method.
    if section.has("quantization") and section.get("quant_method") in (None, "modelopt"):
        return _modelopt(section.section("quantization"), place)
    method = section.text("quant_method")
    if method == "modelopt":
        return _modelopt(section, place)
    if method == "compressed-tensors":
        return _compressed_tensors(section, place)
    if method == "fp8":
        return _finegrained_fp8(section, place)
    raise _unsupported(section.path, f"{KEY} ({brief(method)})")


def _modelopt(section: Facts, place: str) -> Quantization | None:
    """ModelOpt's unified export: one algorithm, or one for each of the layers that are named."""
    algorithms = [_algorithm(section)]
    if algorithms == ["MIXED_PRECISION"]:
        layers = section.section("quantized_layers")
        algorithms = [_algorithm(layers.section(name)) for name in layers.data]
        if not algorithms:
            section.fail("quantized_layers", "names no layer, although quant_algo is mixed")
    schemes = set()
    for algorithm in algorithms:
        if algorithm in _PLAIN:
            continue
        if not isinstance(algorithm, str) or algorithm not in _MODELOPT:
            raise _unsupported(section.path, f"quant_algo {brief(algorithm)}")
        schemes.add(_MODELOPT[algorithm])
    if schemes:
        weights_only = not _WEIGHTS_ONLY.isdisjoint(algorithms)
        return Quantization(place, frozenset(schemes), weights_only=weights_only)
    if section.has("kv_cache_scheme") or section.get("kv_cache_quant_algo") not in _PLAIN:
        raise _only_caches(section.path)
    return None


def _algorithm(section: Facts) -> object:
    if "quant_algo" not in section.data:  # null is ModelOpt's word for no quantization
        section.fail("quant_algo", "is missing")
    return section.get("quant_algo")


def _compressed_tensors(section: Facts, place: str) -> Quantization:
    """compressed-tensors: groups of layers, each with a scheme for its weights."""
    # Weights of which rows are missing, or that only fit inputs that were rotated.
    sparse, transform = section.get("sparsity_config"), section.get("transform_config")
    if sparse and not (isinstance(sparse, dict) and sparse.get("format") == "dense"):
        raise _unsupported(section.path, f"{KEY}.sparsity_config ({brief(sparse)})")
    if transform and not (isinstance(transform, dict) and not any(transform.values())):
        raise _unsupported(section.path, f"{KEY}.transform_config ({brief(transform)})")
    named = section.section("config_groups")
    # A group without weights is one of an attention, or of a KV cache.
    groups = [group for group in map(named.section, named.data) if group.has("weights")]
    if not groups:
        if section.has("kv_cache_scheme"):
            raise _only_caches(section.path)
        section.fail("config_groups", "is missing, empty or without weights")
    schemes, blocks = set(), set()
    for group in groups:
        weights = group.section("weights")
        form = group.get("format") or section.get("format")
        scheme = _compressed_scheme(weights, form)
        if scheme == FP8_BLOCK:
            blocks.add(_block_structure(weights))
        schemes.add(scheme)
    if len(blocks) > 1:
        raise _unsupported(section.path, f"{KEY} with blocks of sizes {brief(sorted(blocks))}")
    weights_only = not all(group.has("input_activations") for group in groups)
    return Quantization(place, frozenset(schemes), next(iter(blocks), None), weights_only)


def _compressed_scheme(weights: Facts, form: object) -> str:
    kind = tuple(weights.get(key) for key in ("num_bits", "type", "strategy"))
    has_parts = weights.has("group_size") or weights.has("block_structure")
    if kind == (8, "float", None) and form in _FP8_FORMATS and not has_parts:
        kind = (8, "float", "tensor")  # compressed-tensors' default
    scheme = _COMPRESSED.get(kind) if all(isinstance(part, int | str) for part in kind) else None
    if scheme is None or not weights.flag("symmetric", default=True):
        symmetry = "" if weights.get("symmetric") is not False else ", asymmetric"
        stated = ", ".join(brief(part) for part in kind)
        raise _unsupported(
            weights.path, f"compressed-tensors' format {brief(form)} (weights {stated}{symmetry})"
        )
    wanted = ("nvfp4-pack-quantized",) if scheme == NVFP4 else _FP8_FORMATS
    if form not in (None, "mixed-precision", *wanted):
        raise _unsupported(
            weights.path, f"compressed-tensors' format {brief(form)} for {SCHEMES[scheme]}"
        )
    return scheme


def _finegrained_fp8(section: Facts, place: str) -> Quantization:
    """transformers' own FP8, in blocks; with null for a block, and in AutoFP8's files one scale."""
    # Scales that are powers of two (ue8m0) multiply like others; their tensors' types are checked.
    for key, known in (("scale_fmt", ("float", "ue8m0")), ("fmt", ("e4m3",))):
        if section.has(key) and section.get(key) not in known:
            raise _unsupported(section.path, f"{KEY}.{key} {brief(section.get(key))}")
    if section.has("weight_block_size"):
        return Quantization(place, frozenset({FP8_BLOCK}), _block(section, "weight_block_size"))
    if "weight_block_size" in section.data:
        return Quantization(place, frozenset({FP8}))
    return Quantization(place, frozenset({FP8, FP8_BLOCK}), _DEFAULT_BLOCK)


def _block(facts: Facts, key: str) -> tuple[int, int]:
    sizes = facts.integers(key)
    if len(sizes) != 2 or 0 in sizes:
        facts.fail(key, f"is {brief(list(sizes))}, expected two sizes")
    return sizes[0], sizes[1]


def _block_structure(weights: Facts) -> tuple[int, int]:
    value = weights.get("block_structure")
    sizes = _BLOCK_TEXT.fullmatch(value) if isinstance(value, str) else None
    if sizes is None:
        return _block(weights, "block_structure")
    return int(sizes[1]), int(sizes[2])


def _only_caches(path: Path) -> UnsupportedArchitecture:
    return _unsupported(path, "a quantized KV cache, with weights that are not,")


def _unsupported(path: Path, what: str) -> UnsupportedArchitecture:
    return UnsupportedArchitecture(
        f"{path}: {what} is not supported: of quantized weights, FP8 and NVFP4 are read, of "
        "ModelOpt, compressed-tensors and transformers",
        UNQUANTIZED,
    )
