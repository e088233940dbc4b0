"""A weight reader that tells how far the reading has come."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_trt.checkpoint.tensors import Q4Blocks, TensorInfo
from dflash_trt.checkpoint.weights import PairWeights
from dflash_trt.quantize.blocks import BLOCK_SIZE
from dflash_trt.quantize.floats import FloatCodes

F32 = npt.NDArray[np.float32]
Progress = Callable[[str, int, int], None]  # stage, done bytes, total bytes


class Reporting:
    """The weights of a pair; bytes count as float32, whatever their type on disk."""

    def __init__(self, weights: PairWeights, progress: Progress, total: int) -> None:
        self._weights = weights
        self._progress = progress
        self._total = total
        self._done = 0

    def stage(self, name: str, fraction: float) -> None:
        """Tell of a stage behind the reading."""
        self._progress(name, int(fraction * self._total), self._total)

    def canonical(self, name: str) -> str:
        """See `PairWeights`, here and below."""
        return self._weights.canonical(name)

    def info(self, name: str) -> TensorInfo:
        """Shape and type."""
        return self._weights.info(name)

    def read(self, name: str) -> F32:
        """The whole tensor."""
        return self._count(self._weights.read(name))

    def read_rows(self, name: str, start: int, stop: int) -> F32:
        """Some rows of it."""
        return self._count(self._weights.read_rows(name, start, stop))

    def raw(self, name: str) -> npt.NDArray[Any]:
        """The tensor as it is stored."""
        array = self._weights.raw(name)
        self._advance(4 * array.size)
        return array

    def q4_blocks(self, name: str) -> Q4Blocks | None:
        """Its 4-bit blocks, if it is stored in such."""
        blocks = self._weights.q4_blocks(name)
        if blocks is not None:
            self._advance(4 * blocks.scales.size * BLOCK_SIZE)
        return blocks

    def float_codes(self, name: str) -> FloatCodes | None:
        """Its FP8 or NVFP4 codes, if it is stored in such."""
        codes = self._weights.float_codes(name)
        if codes is not None:
            self._advance(4 * math.prod(self.info(name).shape))
        return codes

    def _count(self, array: F32) -> F32:
        self._advance(array.nbytes)
        return array

    def _advance(self, num_bytes: int) -> None:
        self._done += num_bytes
        self._progress("weights", min(self._done, self._total), self._total)
