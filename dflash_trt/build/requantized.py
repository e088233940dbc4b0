"""Quantized checkpoints and precisions: which takes weights over, what it changes beside them."""

from __future__ import annotations

from collections import Counter

from dflash_trt.checkpoint.pair import Pair
from dflash_trt.checkpoint.quantized_config import FP8, NVFP4, SCHEMES
from dflash_trt.checkpoint.weights import TARGET
from dflash_trt.flavor import Device
from dflash_trt.quantize.policy import bits_of, format_of, kept_format

# Stored types that engines take over as they are, the one with fewer bits first.
_PRECISIONS = {NVFP4: "nvfp4", FP8: "fp8"}


def own_precision(pair: Pair, device: Device) -> str | None:
    """The precision that takes over the target's stored codes on a device, if there is one.

    None for a target of which weights alone are quantized: these precisions quantize the inputs of
    products as well, which its makers left out.
    """
    found = pair.quantizations.get("target")
    if found is None or found.weights_only:
        return None
    source = pair.target_source
    stored = {source.info(name).dtype for name in source.names()}
    fitting = (p for dtype, p in _PRECISIONS.items() if dtype in stored)
    return next((p for p in fitting if p in device.precisions), None)


def remarks(pair: Pair, precision: str, is_adopted: bool) -> tuple[str, ...]:
    """What to know of a precision; `is_adopted`: it is `own_precision` and was not asked for."""
    said = list(_requantized(pair, precision))
    if precision in _PRECISIONS.values():
        said += [
            f"{side}: its checkpoint quantizes weights alone, and precision {precision} the inputs "
            "of products too; bf16 leaves them"
            for side, quantization in pair.quantizations.items()
            if quantization.weights_only
        ]
    if is_adopted and "drafter" not in pair.quantizations:
        said.append(
            f"drafter: it is quantized for precision {precision}, the target's own; if that costs "
            "acceptance, give --precision bf16"
        )
    return tuple(said)


def _requantized(pair: Pair, precision: str) -> tuple[str, ...]:
    """One remark per model and stored form of weights that the engine stores in another one."""
    weights = pair.weights()
    counts: Counter[tuple[str, str]] = Counter()
    for name in weights.names():
        info = weights.info(name)
        if info.dtype in SCHEMES:
            kind = _form(precision, name, info.kept_as)
            if kind is not None and kind != _PRECISIONS.get(info.dtype):
                side = "target" if name.startswith(TARGET) else "drafter"
                counts[side, info.dtype] += 1
    return tuple(
        f"{side}: {count} of its weights are stored as {SCHEMES[dtype]}, and rounded a second time "
        f"for precision {precision}"
        for (side, dtype), count in counts.items()
    )


def _form(precision: str, name: str, kept_as: str | None) -> str | None:
    if precision in ("fp32", "int4"):
        bits = bits_of(precision)(name)
        return None if bits is None else f"int{bits}"
    return kept_format(format_of(precision)(name), kept_as)
