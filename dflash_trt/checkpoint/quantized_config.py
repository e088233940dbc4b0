"""What a checkpoint's JSON files say of its quantized weights: schemes that are read, by name.

All others are refused here, before any weight is fetched. Tensors are the truth of which layer is
quantized; what is said here must agree with them (`quantized.py`).
"""

from __future__ import annotations

import os
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
# compressed-tensors' bits, type and strategy of weights.
_COMPRESSED = {
    (8, "float", "tensor"): FP8,
    (8, "float", "channel"): FP8_CHANNEL,
    (8, "float", "block"): FP8_BLOCK,
    (4, "float", "tensor_group"): NVFP4,
}
_FP8_FORMATS = ("float-quantized", "naive-quantized")
# The block that transformers' FineGrainedFP8Config documents as its default.
_DEFAULT_BLOCK = (128, 128)


@dataclass(frozen=True)
class Quantization:
    """The schemes that a checkpoint's files name; each may hold for some of the weights only."""

    place: str  # file and key, for messages
    schemes: frozenset[str]
    block: tuple[int, int] | None = None  # outputs and inputs that share a scale in FP8_BLOCK

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
    if facts.has(KEY):
        said.append(_by_method(facts.section(KEY)))
    if os.path.exists(folder / MODELOPT_FILE):
        file = Facts(folder / MODELOPT_FILE, read_json(folder / MODELOPT_FILE))
        said.append(_modelopt(file.section("quantization"), str(file.path)))
    if len(said) == 2 and said[0].schemes != said[1].schemes:
        raise facts.error(
            f"{KEY} says {said[0].words}, but {MODELOPT_FILE} says {said[1].words}",
            "download the checkpoint again",
        )
    return said[0] if said else None


def _by_method(section: Facts) -> Quantization:
    place, method = f"{section.path}: {KEY}", section.text("quant_method")
    if method == "modelopt":
        return _modelopt(section, place)
    if method == "compressed-tensors":
        return _compressed_tensors(section, place)
    if method == "fp8":
        return _finegrained_fp8(section, place)
    raise _unsupported(section.path, f"{KEY} ({brief(method)})")


def _modelopt(section: Facts, place: str) -> Quantization:
    """ModelOpt's unified export: one algorithm, or one for each of the layers that are named."""
    algorithms = [section.get("quant_algo")]
    if algorithms == [None]:
        if section.has("kv_cache_quant_algo") or section.has("kv_cache_scheme"):
            raise _unsupported(section.path, "a quantized KV cache, with weights that are not,")
        section.fail("quant_algo", "is missing")
    if algorithms == ["MIXED_PRECISION"]:
        layers = section.section("quantized_layers")
        algorithms = [layers.section(name).get("quant_algo") for name in layers.data]
        if not algorithms:
            section.fail("quantized_layers", "names no layer, although quant_algo is mixed")
    for algorithm in algorithms:
        if not isinstance(algorithm, str) or algorithm not in _MODELOPT:
            raise _unsupported(section.path, f"quant_algo {brief(algorithm)}")
    return Quantization(place, frozenset(_MODELOPT[algorithm] for algorithm in algorithms))


def _compressed_tensors(section: Facts, place: str) -> Quantization:
    """compressed-tensors: groups of layers, each with a scheme for its weights."""
    # Weights of which rows are missing, or that only fit inputs that were rotated.
    for key in ("sparsity_config", "transform_config"):
        value = section.get(key)
        if value and not (isinstance(value, dict) and value.get("format") == "dense"):
            raise _unsupported(section.path, f"{KEY}.{key} ({brief(value)})")
    groups = section.section("config_groups")
    if not groups.data:
        if section.has("kv_cache_scheme"):
            raise _unsupported(section.path, "a quantized KV cache, with weights that are not,")
        section.fail("config_groups", "is missing or empty")
    schemes, blocks = set(), set()
    for name in groups.data:
        group = groups.section(name)
        weights = group.section("weights")
        form = group.get("format") or section.get("format")
        scheme = _compressed_scheme(weights, form)
        if scheme == FP8_BLOCK:
            blocks.add(_block(weights, "block_structure"))
        schemes.add(scheme)
    if len(blocks) > 1:
        raise _unsupported(section.path, f"{KEY} with blocks of sizes {sorted(blocks)}")
    return Quantization(place, frozenset(schemes), next(iter(blocks), None))


def _compressed_scheme(weights: Facts, form: object) -> str:
    kind = tuple(weights.get(key) for key in ("num_bits", "type", "strategy"))
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
    for key, usual in (("scale_fmt", "float"), ("fmt", "e4m3")):
        if section.has(key) and section.get(key) != usual:
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


def _unsupported(path: Path, what: str) -> UnsupportedArchitecture:
    return UnsupportedArchitecture(
        f"{path}: {what} is not supported: of quantized weights, FP8 and NVFP4 are read, of "
        "ModelOpt, compressed-tensors and transformers",
        UNQUANTIZED,
    )
