"""GGUF's header: metadata and tensor table, every length checked against the file before use.

Not over gguf.GGUFReader: on a corrupt array length that loops for hours and fills the memory.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_trt.checkpoint.mapped import MappedFile
from dflash_trt.checkpoint.tensors import shown
from dflash_trt.errors import BadTensor, CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_AXES = 4
MAX_STRINGS = 2**24  # far above any vocabulary; a corrupt count must not keep us busy

_STRING, _ARRAY = 8, 9
_SCALARS = {  # value type -> struct letter
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip

# Tensor type id -> (name, elements per block, bytes per block). Types that we only name have 0.
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20), 8: ("Q8_0", 32, 34), 12: ("Q4_K", 256, 144), 14: ("Q6_K", 256, 210),
    6: ("Q5_0", 0, 0), 7: ("Q5_1", 0, 0), 9: ("Q8_1", 0, 0), 10: ("Q2_K", 0, 0),
    11: ("Q3_K", 0, 0), 13: ("Q5_K", 0, 0), 15: ("Q8_K", 0, 0), 16: ("IQ2_XXS", 0, 0),
    17: ("IQ2_XS", 0, 0), 18: ("IQ3_XXS", 0, 0), 19: ("IQ1_S", 0, 0), 20: ("IQ4_NL", 0, 0),
    21: ("IQ3_S", 0, 0), 22: ("IQ2_S", 0, 0), 23: ("IQ4_XS", 0, 0), 24: ("I8", 0, 0),
    25: ("I16", 0, 0), 26: ("I32", 0, 0), 27: ("I64", 0, 0), 28: ("F64", 0, 0),
    29: ("IQ1_M", 0, 0), 34: ("TQ1_0", 0, 0), 35: ("TQ2_0", 0, 0), 39: ("MXFP4", 0, 0),
    40: ("NVFP4", 0, 0),
}  # fmt: skip
SUPPORTED_TYPES = tuple(name for name, block, _ in TENSOR_TYPES.values() if block)


@dataclass(frozen=True)
class GgufTensor:
    """One row of the tensor table; `shape` is NumPy's order, [out, in]."""

    name: str
    type_name: str
    shape: tuple[int, ...]
    offset: int  # from the start of the file
    num_bytes: int


@dataclass(frozen=True)
class GgufHeader:
    """Metadata (arrays as `GgufArray`) and tensor table of one file."""

    file: MappedFile
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


@dataclass(frozen=True)
class GgufArray:
    """A metadata array, decoded only when `values` is called (a vocabulary has 100k strings)."""

    length: int
    _decode: Callable[[], list[Any]] = field(repr=False)

    def values(self) -> list[Any]:
        """The elements as plain Python values. Raises `CheckpointError` for bad UTF-8."""
        return self._decode()


def read_header(path: Path) -> GgufHeader:
    """Read metadata and tensor table. Raises `CheckpointError` in one line for any damage."""
    file = MappedFile(path)
    cursor = _Cursor(file)
    magic = cursor.take(4)
    if magic != MAGIC:
        raise CheckpointError(f"{path}: is not a GGUF file: it starts with {magic!r}")
    version = cursor.scalar("I")
    if version not in VERSIONS:
        raise CheckpointError(
            f"{path}: GGUF version {version} is not supported (supported: 2, 3 little-endian)",
            "convert the model again with a current llama.cpp",
        )
    num_tensors, num_keys = cursor.scalar("Q"), cursor.scalar("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):  # each turn consumes bytes, so a corrupt count ends at the file's end
        key = cursor.string()
        if key in metadata:
            raise CheckpointError(f"{path}: metadata key {shown(key)} occurs twice")
        metadata[key] = cursor.value(cursor.scalar("I"), key)
    table = [_read_row(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise CheckpointError(f"{path}: general.alignment {alignment!r} is not a power of two")
    base = -(-cursor.offset // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for row in table:
        tensor = _place(file, base, *row)
        if tensor.name in tensors:
            raise BadTensor(f"{path}: tensor {shown(tensor.name)} occurs twice")
        tensors[tensor.name] = tensor
    return GgufHeader(file, metadata, tensors)


class _Cursor:
    """A position in the file; every read is bounds-checked by `MappedFile.bytes_at`."""

    def __init__(self, file: MappedFile, offset: int = 0) -> None:
        self.file = file
        self.offset = offset

    def take(self, count: int) -> bytes:
        data = self.file.bytes_at(self.offset, count)
        self.offset += count
        return data

    def scalar(self, letter: str) -> Any:
        return struct.unpack("<" + letter, self.take(struct.calcsize("<" + letter)))[0]

    def string(self) -> str:
        raw = self.take(self.scalar("Q"))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.file.path}: a metadata string is not UTF-8") from error

    def value(self, kind: int, key: str) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(key)
        raise CheckpointError(
            f"{self.file.path}: metadata key {shown(key)} has unknown type {kind}"
        )

    def _array(self, key: str) -> GgufArray:
        kind, length = self.scalar("I"), self.scalar("Q")
        start, file = self.offset, self.file
        if kind in _SCALARS:
            letter = _SCALARS[kind]
            size = length * struct.calcsize("<" + letter)
            self._skip(size)

            def unpack() -> list[Any]:
                return list(struct.unpack(f"<{length}{letter}", file.bytes_at(start, size)))

            return GgufArray(length, unpack)
        if kind == _STRING and length <= MAX_STRINGS:
            for _ in range(length):
                self._skip(self.scalar("Q"))

            def decode() -> list[Any]:
                cursor = _Cursor(file, start)
                return [cursor.string() for _ in range(length)]

            return GgufArray(length, decode)
        raise CheckpointError(
            f"{self.file.path}: metadata key {shown(key)} is an array of {length} items "
            f"of type {kind}, which cannot be read"
        )

    def _skip(self, count: int) -> None:
        if self.offset + count > self.file.size:
            self.file.bytes_at(self.offset, count)  # raises "truncated"
        self.offset += count


def _read_row(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    path = cursor.file.path
    num_axes = cursor.scalar("I")
    if not name or not 1 <= num_axes <= MAX_AXES:
        raise BadTensor(
            f"{path}: tensor {shown(name)} has {num_axes} axes, expected 1 to {MAX_AXES}"
        )
    shape = tuple(cursor.scalar("Q") for _ in range(num_axes))[::-1]
    return name, shape, cursor.scalar("I"), cursor.scalar("Q")


def _place(
    file: MappedFile, base: int, name: str, shape: tuple[int, ...], kind: int, offset: int
) -> GgufTensor:
    type_name, block, block_bytes = TENSOR_TYPES.get(kind, (f"number {kind}", 0, 0))
    if not block:
        raise BadTensor(
            f"{file.path}: tensor {shown(name)} has type {type_name}, which is not supported",
            f"supported types: {', '.join(SUPPORTED_TYPES)}",
        )
    if shape[-1] % block or 0 in shape or max(shape) > 2**40:
        raise BadTensor(
            f"{file.path}: tensor {shown(name)} of type {type_name} has shape {list(shape)}: "
            f"rows must be a positive multiple of {block}"
        )
    if len(shape) == 1 and block > 1:
        raise BadTensor(f"{file.path}: tensor {shown(name)} has one axis but type {type_name}")
    size = shape[-1] // block * block_bytes
    for dim in shape[:-1]:
        size *= dim
    if base + offset + size > file.size:
        raise BadTensor(
            f"{file.path}: tensor {shown(name)} ends at byte {base + offset + size}, "
            f"but the file has {file.size}: it is truncated",
            "download it again",
        )
    return GgufTensor(name, type_name, shape, base + offset, size)
