"""What every weight file looks like to the rest of the program: names, shapes and lazy reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt

from dflash_trt.errors import BadTensor, MissingTensor
from dflash_trt.quantize.floats import FloatCodes

#: What helps against a checkpoint that is quantized in a way we do not read.
UNQUANTIZED = "use the unquantized checkpoint (F32, F16 or BF16); a target may also be a GGUF file"

KeptAs = Literal["dense", "fp8"]
FloatArray = npt.NDArray[np.float32]
BF16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True)
class TensorInfo:
    """What a file says about one tensor; `dtype` as the format spells it (`BF16`, `Q4_0`, ...).

    `kept_as` is what a quantized checkpoint chose with care, where an engine's precision would
    choose otherwise: "dense" for what it does not quantize, "fp8" beside weights in 4 bits.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path
    kept_as: KeptAs | None = None


@dataclass(frozen=True)
class Q4Blocks:
    """4-bit weights in blocks of 32 inputs: value = scale * (code - 8) + offset.

    `codes` [out, in/32, 16] holds elements 2i (low nibble) and 2i+1 (high) of its block in byte i,
    the order of ONNX Runtime's MatMulNBits. `offsets` is None where it is zero everywhere (Q4_0).
    """

    codes: npt.NDArray[np.uint8]
    scales: FloatArray  # [out, in/32]
    offsets: FloatArray | None  # [out, in/32]


class TensorSource(Protocol):
    """A weight file or a set of shards; opening it reads headers only."""

    @property
    def path(self) -> Path:
        """The file or folder, for messages."""

    def names(self) -> list[str]:
        """All tensor names, in file order."""

    def info(self, name: str) -> TensorInfo:
        """Shape and type of one tensor. Raises `MissingTensor`."""

    def read(self, name: str) -> FloatArray:
        """The tensor as float32, C-contiguous; a view of the mapped file where the file has that.

        Raises `MissingTensor`, or `BadTensor` when the stored type has no exact float32 form.
        """

    def read_rows(self, name: str, start: int, stop: int) -> FloatArray:
        """Rows `start:stop` of the first axis, as `read` would give them."""

    def raw(self, name: str) -> npt.NDArray[Any]:
        """The tensor in its stored type. Raises `BadTensor` for block-quantized types."""

    def q4_blocks(self, name: str) -> Q4Blocks | None:
        """The tensor's 4-bit blocks, or None when it is not stored as Q4_0 or Q4_1."""

    def float_codes(self, name: str) -> FloatCodes | None:
        """The tensor's FP8 or NVFP4 codes, or None when it is not stored as an engine has those."""


class RenamedSource:
    """A source under other names, without the tensors that have none."""

    def __init__(self, source: TensorSource, stored: Mapping[str, str]) -> None:
        self._source = source
        self._stored = dict(stored)

    @property
    def path(self) -> Path:
        """The file or folder, for messages."""
        return self._source.path

    def names(self) -> list[str]:
        """The new names."""
        return list(self._stored)

    def info(self, name: str) -> TensorInfo:
        """Shape and type of one tensor. Raises `MissingTensor`."""
        return dataclasses.replace(self._source.info(self._find(name)), name=name)

    def read(self, name: str) -> FloatArray:
        """The tensor as float32, C-contiguous."""
        return self._source.read(self._find(name))

    def read_rows(self, name: str, start: int, stop: int) -> FloatArray:
        """Rows `start:stop` of the first axis, as float32."""
        return self._source.read_rows(self._find(name), start, stop)

    def raw(self, name: str) -> npt.NDArray[Any]:
        """The tensor in its stored type."""
        return self._source.raw(self._find(name))

    def q4_blocks(self, name: str) -> Q4Blocks | None:
        """The tensor's 4-bit blocks, or None."""
        return self._source.q4_blocks(self._find(name))

    def float_codes(self, name: str) -> FloatCodes | None:
        """The tensor's FP8 or NVFP4 codes, or None."""
        return self._source.float_codes(self._find(name))

    def _find(self, name: str) -> str:
        try:
            return self._stored[name]
        except KeyError:
            raise missing(self.path, name) from None


def missing(path: Path, name: str) -> MissingTensor:
    """The error for a tensor that a source does not have."""
    return MissingTensor(f"{path}: tensor {shown(name)} is missing")


def to_float32(array: npt.NDArray[Any], info: TensorInfo) -> FloatArray:
    """Widen F32, F16 or BF16 to float32 exactly; F32 stays a view if it is aligned."""
    if info.dtype == "F32":
        return np.require(array, dtype=np.float32, requirements=["C", "A"])
    if info.dtype == "F16":
        return np.ascontiguousarray(array, dtype=np.float32).reshape(info.shape)
    if info.dtype == "BF16":
        # bfloat16 is the upper half of a float32: shifting is exact and faster than a cast.
        wide = array.view(np.uint16).astype(np.uint32)
        wide <<= np.uint32(16)
        return wide.view(np.float32)
    raise BadTensor(
        f"{info.file}: tensor {shown(info.name)} has type {info.dtype}, "
        "which cannot be read as float32 exactly",
        hint="supported weight types are F32, F16 and BF16",
    )


def check_rows(info: TensorInfo, start: int, stop: int) -> None:
    """Refuse a row range that the tensor does not have. Raises `BadTensor`."""
    rows = info.shape[0] if info.shape else 0
    if not 0 <= start <= stop <= rows:
        raise BadTensor(
            f"{info.file}: tensor {shown(info.name)} has {rows} rows, "
            f"so rows {start} to {stop} cannot be read"
        )


def shown(name: str) -> str:
    """A name from a file, safe to print on one line: odd characters escaped, long ones cut."""
    text = name if name.isprintable() and name else ascii(name)
    return text if len(text) <= 160 else text[:157] + "..."
