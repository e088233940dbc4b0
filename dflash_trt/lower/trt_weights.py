"""Weights of a TensorRT network: arrays that stay where they are until the build is over.

TensorRT takes weights by address and reads them while it builds, so a tensor whose stored type is
the compute type is handed over straight from the mapped checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt

from dflash_trt.errors import BuildError
from dflash_trt.quantize.floats import (
    F32,
    FP4_BLOCK,
    Fp8Weight,
    Nvfp4Weight,
    quantize_fp8,
    quantize_nvfp4,
)
from dflash_trt.quantize.pieces import row_pieces

Array = npt.NDArray[Any]

COMPUTE_TYPES: dict[str, np.dtype[Any]] = {
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp16": np.dtype(np.float16),
    "fp32": np.dtype(np.float32),
}
_STORED_AS = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}  # types as checkpoints spell them
_QUANTIZERS: dict[str, Callable[[F32], Fp8Weight | Nvfp4Weight]] = {
    "fp8": quantize_fp8,
    "nvfp4": quantize_nvfp4,
}


class TensorFacts(Protocol):
    """What a checkpoint says about a tensor."""

    @property
    def dtype(self) -> str:
        """Stored type as the format spells it."""


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


class TrtWeights:
    """Hands out arrays and keeps every one of them: `kept` must outlive the build.

    `format_of(name)` gives "fp8" or "nvfp4" for a weight to quantize, None for the compute type.
    """

    def __init__(self, reader: WeightReader, format_of: Callable[[str], str | None]) -> None:
        self.reader = reader
        self.kept: list[Array] = []
        self._format_of = format_of
        self._dense: dict[object, Array] = {}
        self._quantized: dict[str, Fp8Weight | Nvfp4Weight] = {}

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

    def quantized(self, name: str, shape: tuple[int, int]) -> Fp8Weight | Nvfp4Weight | None:
        """The quantized form of a weight [out, in], or None where it stays in the compute type."""
        owner = self.reader.canonical(name)
        kind = self._format_of(owner)
        if kind is None or shape[1] % FP4_BLOCK:
            return None
        if owner not in self._quantized:
            self._quantized[owner] = _QUANTIZERS[kind](self.reader.read(owner))
        return self._quantized[owner]

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
