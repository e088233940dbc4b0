"""Lazy reader of safetensors checkpoints: one file, or shards that an index names."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from dflash_trt.checkpoint.facts import brief, parse_json, read_json
from dflash_trt.checkpoint.mapped import MappedFile
from dflash_trt.checkpoint.tensors import (
    BF16,
    UNQUANTIZED,
    FloatArray,
    Q4Blocks,
    TensorInfo,
    check_rows,
    missing,
    shown,
    to_float32,
)
from dflash_trt.errors import BadTensor, CheckpointError, MissingTensor
from dflash_trt.quantize.floats import FloatCodes

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format itself
MAX_AXES = 8

DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": BF16,
    "F64": np.dtype("<f8"),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}


@dataclass(frozen=True)
class _Entry:
    info: TensorInfo
    file: MappedFile
    offset: int  # from the start of the file


class SafetensorsSource:
    """`TensorSource` over a checkpoint folder, or over a single `.safetensors` file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries: dict[str, _Entry] = {}
        if os.path.isdir(path):
            files, index = _find_files(path)
        else:
            files, index = [path], {}
        for file in files:
            self._add(_read_header(MappedFile(file)))
        for name, shard in index.items():
            entry = self._entries.get(name)
            if entry is None or entry.info.file.name != shard:
                raise MissingTensor(
                    f"{path / INDEX_FILE}: places tensor {shown(name)} in {shard}, "
                    "which does not have it",
                    "download the checkpoint again",
                )

    @property
    def path(self) -> Path:
        """The file or folder, for messages."""
        return self._path

    def names(self) -> list[str]:
        """All tensor names, shard by shard in file order."""
        return list(self._entries)

    def info(self, name: str) -> TensorInfo:
        """Shape and type of one tensor. Raises `MissingTensor`."""
        return self._find(name).info

    def read(self, name: str) -> FloatArray:
        """The tensor as float32: a view for F32, exact for F16 and BF16, else `BadTensor`."""
        return to_float32(self.raw(name), self.info(name))

    def read_rows(self, name: str, start: int, stop: int) -> FloatArray:
        """Rows `start:stop` of the first axis, as float32."""
        info = self.info(name)
        check_rows(info, start, stop)
        part = TensorInfo(name, (stop - start, *info.shape[1:]), info.dtype, info.file)
        return to_float32(self.raw(name)[start:stop], part)

    def raw(self, name: str) -> npt.NDArray[Any]:
        """A read-only view in the stored type."""
        entry = self._find(name)
        return entry.file.view(DTYPES[entry.info.dtype], entry.offset, entry.info.shape)

    def q4_blocks(self, name: str) -> Q4Blocks | None:
        """None: this format has no 4-bit block type of its own."""
        self._find(name)
        return None

    def float_codes(self, name: str) -> FloatCodes | None:
        """None: scales are tensors of their own, which `QuantizedSource` knows."""
        self._find(name)
        return None

    def _find(self, name: str) -> _Entry:
        try:
            return self._entries[name]
        except KeyError:
            raise missing(self._path, name) from None

    def _add(self, entries: list[_Entry]) -> None:
        for entry in entries:
            name = entry.info.name
            if name in self._entries:
                other = self._entries[name].info.file.name
                raise BadTensor(
                    f"{entry.info.file}: tensor {shown(name)} is also in {other}",
                    "remove files of an older download from the folder",
                )
            self._entries[name] = entry


def _find_files(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """The weight files of a folder and the index's tensor-to-shard map, empty without one."""
    if os.path.exists(folder / SINGLE_FILE):
        return [folder / SINGLE_FILE], {}
    if os.path.exists(folder / INDEX_FILE):
        index = _read_index(folder / INDEX_FILE)
        return [folder / shard for shard in dict.fromkeys(index.values())], index
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found, {}
    if found:
        raise CheckpointError(
            f"{folder}: has {len(found)} .safetensors files but no {INDEX_FILE}",
            "download the checkpoint again, with its index",
        )
    others = [path.name for path in sorted(folder.glob("*")) if path.suffix in (".bin", ".pt")]
    if others:
        raise CheckpointError(
            f"{folder}: has {others[0]} but no .safetensors file; pickled weights are never loaded",
            "convert the checkpoint to safetensors",
        )
    ggufs = sorted(folder.glob("*.gguf"))
    raise CheckpointError(
        f"{folder}: no .safetensors file",
        f"name the file itself: {ggufs[0]}"
        if ggufs
        else "the folder must hold the weights beside config.json",
    )


def _read_index(path: Path) -> dict[str, str]:
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map is {brief(weight_map)}, expected an object")
    for name, shard in weight_map.items():
        # A name, never a path: an index must not reach outside its folder.
        good = isinstance(shard, str) and shard.isprintable() and shard.endswith(".safetensors")
        if not good or any(mark in shard for mark in ("/", "\\", ":")) or len(shard) > 255:
            raise CheckpointError(
                f"{path}: tensor {shown(name)} is placed in {brief(shard)}, "
                "which is not the name of a .safetensors file in the folder"
            )
    for shard in dict.fromkeys(weight_map.values()):
        if not os.path.exists(path.parent / shard):
            raise CheckpointError(
                f"{path.parent}: shard {shard} is missing", "download the checkpoint again"
            )
    return weight_map


def _read_header(file: MappedFile) -> list[_Entry]:
    length = int.from_bytes(file.bytes_at(0, 8), "little")
    if not 2 <= length <= MAX_HEADER_BYTES or 8 + length > file.size:
        raise CheckpointError(
            f"{file.path}: header length {length} does not fit a file of {file.size} bytes",
            "the file is truncated or not safetensors; download it again",
        )
    header = parse_json(file.bytes_at(8, length), file.path, "header")
    if not isinstance(header, dict):
        raise CheckpointError(f"{file.path}: header is not a JSON object")
    metadata = header.pop("__metadata__", None)
    if metadata is not None and not isinstance(metadata, dict):
        raise CheckpointError(f"{file.path}: __metadata__ is {brief(metadata)}, expected an object")
    base = 8 + length
    entries = [_parse_entry(file, base, name, item) for name, item in header.items()]
    _check_layout(file, base, entries)
    return entries


def _parse_entry(file: MappedFile, base: int, name: str, item: Any) -> _Entry:
    def bad(reason: str) -> BadTensor:
        return BadTensor(f"{file.path}: tensor {shown(name)}: {reason}", "download the file again")

    if not isinstance(item, dict) or set(item) != {"dtype", "shape", "data_offsets"}:
        raise bad(f"header entry is {brief(item)}, expected dtype, shape and data_offsets")
    dtype, shape, offsets = item["dtype"], item["shape"], item["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise BadTensor(
            f"{file.path}: tensor {shown(name)}: type {brief(dtype)} is not supported", UNQUANTIZED
        )
    if not _are_sizes(shape) or len(shape) > MAX_AXES:
        raise bad(f"shape {brief(shape)} is not a list of sizes")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise bad(f"data_offsets {brief(offsets)} are not a range")
    if base + offsets[1] > file.size:
        raise bad(
            f"ends at byte {base + offsets[1]}, but the file has {file.size}: it is truncated"
        )
    needed = DTYPES[dtype].itemsize
    for dim in shape:
        needed *= dim
    if needed != offsets[1] - offsets[0]:
        raise bad(
            f"has {offsets[1] - offsets[0]} bytes, but shape {brief(shape)} of {dtype} "
            f"needs {brief(needed)}"
        )
    if needed == 0 and any(dim > 2**31 for dim in shape):
        raise bad(f"shape {brief(shape)} is absurd")  # NumPy cannot hold it, though it has no bytes
    info = TensorInfo(name, tuple(shape), dtype, file.path)
    return _Entry(info, file, base + offsets[0])


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**63 for item in value
    )


def _check_layout(file: MappedFile, base: int, entries: list[_Entry]) -> None:
    """The format wants data without holes or overlaps; anything else is damage or a trick."""
    end, last = base, "the header"
    for entry in sorted(entries, key=lambda entry: (entry.offset, _num_bytes(entry))):
        if entry.offset != end:
            what = "overlaps" if entry.offset < end else "leaves a gap after"
            raise BadTensor(
                f"{file.path}: tensor {shown(entry.info.name)} {what} {last}",
                "download the file again",
            )
        end, last = entry.offset + _num_bytes(entry), shown(entry.info.name)
    if end != file.size:
        raise CheckpointError(
            f"{file.path}: {file.size - end} bytes after the last tensor", "download it again"
        )


def _num_bytes(entry: _Entry) -> int:
    count = DTYPES[entry.info.dtype].itemsize
    for dim in entry.info.shape:
        count *= dim
    return count
