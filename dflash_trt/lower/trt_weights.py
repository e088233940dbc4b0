"""Weights of a TensorRT network: arrays that stay where they are until the build is over.

TensorRT takes weights by address and reads them while it builds, so a tensor whose stored type is
the compute type is handed over straight from the mapped checkpoint.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt

from dflash_trt.errors import BuildError
from dflash_trt.quantize.floats import (
    F32,
    FP4_BLOCK,
    MIN_SCALE,
    FloatCodes,
    Fp8Weight,
    Nvfp4Weight,
    quantize_fp8,
    quantize_nvfp4,
)
from dflash_trt.quantize.pieces import row_pieces
from dflash_trt.quantize.policy import kept_format

Array = npt.NDArray[Any]

COMPUTE_TYPES: dict[str, np.dtype[Any]] = {
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp16": np.dtype(np.float16),
    "fp32": np.dtype(np.float32),
}
_STORED_AS = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}  # types as checkpoints spell them
_QUANTIZERS: dict[str, Callable[[F32], FloatCodes]] = {
    "fp8": quantize_fp8,
    "nvfp4": quantize_nvfp4,
}
_CLASSES: dict[str, type[FloatCodes]] = {"fp8": Fp8Weight, "nvfp4": Nvfp4Weight}


@dataclass(frozen=True)
class Stack:
    """Quantized weights of one input as one, whose part i is `factors[i]` times as large.

    The scale of `packed` is a power of two, which every compute type holds exactly.
    """

    packed: FloatCodes
    factors: tuple[float, ...]

    @property
    def is_exact(self) -> bool:
        """Whether the factors are powers of two as well, as those of our own quantizers are."""
        return all(_power_below(factor) == factor for factor in self.factors)


def stacked(parts: Sequence[FloatCodes]) -> Stack:
    """One weight, or FP8 ones on top of each other: the codes stay."""
    scale = max(MIN_SCALE, _power_below(parts[0].scale))
    factors = tuple(part.scale / scale for part in parts)
    packed = dataclasses.replace(parts[0], scale=scale)
    if len(parts) > 1:
        packed = Fp8Weight(np.concatenate([part.codes for part in parts]), scale)
    return Stack(packed, factors)


def _power_below(number: float) -> float:
    """The largest one that is not above a positive number."""
    return math.ldexp(1, math.frexp(number)[1] - 1)


class TensorFacts(Protocol):
    """What a checkpoint says about a tensor."""

    @property
    def dtype(self) -> str:
        """Stored type as the format spells it."""

    @property
    def kept_as(self) -> str | None:
        """What a quantized checkpoint chose for it: see `kept_format`."""


class WeightReader(Protocol):
    """What the lowering needs of a pair's weights, by canonical name."""

    def canonical(self, name: str) -> str:
        """The name that holds the bytes: resolves tied and shared weights."""

    def info(self, name: str) -> TensorFacts:
        """The stored type."""

    def raw(self, name: str) -> Array:
        """The tensor in its stored type, where that is a plain one."""

    def read(self, name: str) -> F32:
        """The whole tensor as float32."""

    def read_rows(self, name: str, start: int, stop: int) -> F32:
        """Some rows of its first axis as float32."""

    def float_codes(self, name: str) -> FloatCodes | None:
        """The FP8 or NVFP4 codes that the checkpoint itself stores, if it does."""


class TrtWeights:
    """Hands out arrays and keeps every one of them: `kept` must outlive the build.

    `format_of(name)` gives "fp8" or "nvfp4" for a weight to quantize, None for the compute type;
    a quantized checkpoint may know better (`kept_format`).
    """

    def __init__(self, reader: WeightReader, format_of: Callable[[str], str | None]) -> None:
        self.reader = reader
        self.kept: list[Array] = []
        self._format_of = format_of
        self._dense: dict[object, Array] = {}
        self._quantized: dict[tuple[str, ...], Stack] = {}

    def keep(self, array: Array) -> Array:
        """The same values at an address that stays valid and aligned."""
        placed = np.require(array, requirements=["C", "A"])
        self.kept.append(placed)
        return placed

    def dense(self, name: str, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        """The tensor in `dtype`: the mapped bytes themselves where the checkpoint has that type."""
        owner = self.reader.canonical(name)
        key = (owner, dtype)
        if key not in self._dense:
            stored = _STORED_AS.get(self.reader.info(owner).dtype)
            if stored is not None and COMPUTE_TYPES[stored] == dtype:
                self._dense[key] = self.keep(self.reader.raw(owner))
            else:
                self._dense[key] = self.keep(self._converted(owner, shape, dtype))
        return self._dense[key].reshape(shape)

    def format_of(self, name: str) -> str | None:
        """How a weight is quantized, None if it is not."""
        owner = self.reader.canonical(name)
        return kept_format(self._format_of(owner), self.reader.info(owner).kept_as)

    def quantized(self, names: Sequence[str], sizes: Sequence[int], width: int) -> Stack | None:
        """A weight [size, width], or several of FP8, each with its own scale, stacked.

        Codes that the checkpoint has in this form are taken over, all else is quantized. None
        where they stay in the compute type.
        """
        owners = tuple(self.reader.canonical(name) for name in names)
        kind = self.format_of(names[0])
        if kind is None or width % FP4_BLOCK:
            return None
        if owners not in self._quantized:
            self._quantized[owners] = stacked([self._codes(owner, kind) for owner in owners])
        return self._quantized[owners]

    def _codes(self, name: str, kind: str) -> FloatCodes:
        stored = self.reader.float_codes(name)
        if isinstance(stored, _CLASSES[kind]):
            return stored
        return _QUANTIZERS[kind](self.reader.read(name))

    def _converted(self, name: str, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        result = np.empty(shape, dtype)
        for rows in row_pieces(len(result), result[:1].size):
            piece = self.reader.read_rows(name, rows.start, rows.stop)
            if dtype == np.float16 and np.abs(piece).max(initial=0) > np.finfo(np.float16).max:
                raise BuildError(
                    f"weight {name} has values beyond the range of fp16",
                    hint="build with bf16",
                )
            result[rows] = piece
        return result
