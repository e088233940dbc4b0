"""Draft vocabularies: the tokens that a drafter can draft, where these are not all of the target's.

A head of fewer rows is read faster, and of a small pair's drafter it is the largest part. What it
cannot draft the target still chooses, one token a step, so the text stays the same.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dflash_trt import swap
from dflash_trt.checkpoint.facts import brief, parse_json, read_bytes
from dflash_trt.checkpoint.tensors import (
    FloatArray,
    Q4Blocks,
    TensorInfo,
    TensorSource,
    check_rows,
)
from dflash_trt.errors import BadTensor, CheckpointError, ConfigError
from dflash_trt.quantize.floats import FloatCodes, Fp8Weight, Nvfp4Weight

DraftIds = npt.NDArray[np.int32]

TO_TARGET, TO_DRAFT = "d2t", "t2d"
HOW_TO_MAKE = "`dflash-trt draft-vocab` makes a list of token ids from text"
_WHOLE_NUMBERS = ("I64", "I32")


def stored_ids(source: TensorSource, vocab_size: int, rows: int | None) -> DraftIds | None:
    """The tokens of a drafter's own draft vocabulary, in the order of its head; None if it has all.

    `d2t` [N] of whole numbers: token i of the draft vocabulary is token i + d2t[i] of the target's
    (speculators and EAGLE-3). `t2d` bool [vocab_size], where it is there, marks the same tokens.
    `rows`: what the config says that N is, if it does. Raises `BadTensor` naming the tensor.
    """
    if TO_TARGET not in source.names():
        if TO_DRAFT in source.names():
            raise _bad(source.info(TO_DRAFT), f"is there but no {TO_TARGET}")
        return None
    info = source.info(TO_TARGET)
    if info.dtype not in _WHOLE_NUMBERS or len(info.shape) != 1:
        raise _bad(info, f"is {info.dtype} {list(info.shape)}, expected a list of whole numbers")
    if rows not in (None, info.shape[0]):
        raise _bad(info, f"has {info.shape[0]} numbers, but draft_vocab_size is {rows}")
    offsets = source.raw(TO_TARGET).astype(np.int64)
    # Compared before the sum, which a damaged file could carry around the end of INT64.
    row = np.arange(len(offsets))
    ids = row + np.where(np.abs(offsets) <= vocab_size, offsets, -1 - row)
    if len(ids) == 0 or ids.min() < 0 or ids.max() >= vocab_size:
        raise _bad(info, f"leads outside the vocabulary's {vocab_size} tokens")
    if len(np.unique(ids)) != len(ids):
        raise _bad(info, "leads to the same token twice")
    _check_marks(source, ids, vocab_size)
    has_all = len(ids) == vocab_size and np.array_equal(ids, row)
    return None if has_all else ids.astype(np.int32)


def read_ids(path: Path, vocab_size: int) -> DraftIds:
    """The tokens of a draft vocabulary that a user chose: a JSON file with a list of token ids.

    In ascending order, for of equal logits the first one wins. Raises `CheckpointError` for a file
    that is none, `ConfigError` for ids that the target does not have, or has twice.
    """
    try:
        ids = parse_json(read_bytes(path), path, "file")
    except CheckpointError as error:
        error.hint = HOW_TO_MAKE
        raise
    if not isinstance(ids, list) or not ids:
        raise CheckpointError(f"{path}: is {brief(ids)}, expected a list of token ids", HOW_TO_MAKE)
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise ConfigError(
                f"{path}: {brief(token)} is no token of the target, which has 0..{vocab_size - 1}"
            )
    chosen = np.unique(np.array(ids, np.int32))
    if len(chosen) != len(ids):
        raise ConfigError(f"{path}: names {len(ids) - len(chosen)} tokens twice")
    return chosen


def write_ids(path: Path, ids: Sequence[int]) -> None:
    """Write what `read_ids` reads, at once or not at all. Raises `ConfigError`."""
    try:
        swap.write_file(path, (json.dumps(list(ids)) + "\n").encode())
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


class ChosenRows:
    """One tensor of a source with only the rows `ids` of its first axis, as a `TensorSource`."""

    def __init__(self, source: TensorSource, stored: str, name: str, ids: DraftIds) -> None:
        self._source, self._stored, self._name, self._ids = source, stored, name, ids

    @property
    def path(self) -> Path:
        """The file or folder, for messages."""
        return self._source.path

    def names(self) -> list[str]:
        """The one name."""
        return [self._name]

    def info(self, name: str) -> TensorInfo:
        """Shape and type: the owner's but for the rows."""
        info = self._source.info(self._stored)
        return dataclasses.replace(info, name=name, shape=(len(self._ids), *info.shape[1:]))

    def read(self, name: str) -> FloatArray:
        """The rows as float32, C-contiguous."""
        return self.read_rows(name, 0, len(self._ids))

    def read_rows(self, name: str, start: int, stop: int) -> FloatArray:
        """Rows `start:stop` of the chosen ones, as float32."""
        info = self.info(name)
        check_rows(info, start, stop)
        rows = np.empty((stop - start, *info.shape[1:]), np.float32)
        # Runs of neighbours are read at once: frequent tokens have neighbouring ids.
        wanted = self._ids[start:stop]
        breaks = np.flatnonzero(np.diff(wanted) != 1) + 1
        for run in np.split(np.arange(len(wanted)), breaks):
            if len(run):
                first = int(wanted[run[0]])
                rows[run] = self._source.read_rows(self._stored, first, first + len(run))
        return rows

    def raw(self, name: str) -> npt.NDArray[np.generic]:
        """The rows in their stored type: a copy."""
        return self._source.raw(self._stored)[self._ids]

    def q4_blocks(self, name: str) -> Q4Blocks | None:
        """The rows' 4-bit blocks, if the owner is stored in such."""
        blocks = self._source.q4_blocks(self._stored)
        if blocks is None:
            return None
        offsets = None if blocks.offsets is None else blocks.offsets[self._ids]
        return Q4Blocks(blocks.codes[self._ids], blocks.scales[self._ids], offsets)

    def float_codes(self, name: str) -> FloatCodes | None:
        """The rows' FP8 or NVFP4 codes, if the owner is stored in such."""
        stored = self._source.float_codes(self._stored)
        if stored is None:
            return None
        codes = stored.codes[self._ids]
        if isinstance(stored, Fp8Weight):
            return Fp8Weight(codes, stored.scale)
        return Nvfp4Weight(codes, stored.block_scales[self._ids], stored.scale)


def _check_marks(source: TensorSource, ids: npt.NDArray[np.int64], vocab_size: int) -> None:
    if TO_DRAFT not in source.names():
        return
    info = source.info(TO_DRAFT)
    if info.dtype != "BOOL" or info.shape != (vocab_size,):
        raise _bad(info, f"is {info.dtype} {list(info.shape)}, expected BOOL {[vocab_size]}")
    if not np.array_equal(np.flatnonzero(source.raw(TO_DRAFT)), np.sort(ids)):
        raise _bad(info, f"marks other tokens than {TO_TARGET} leads to")


def _bad(info: TensorInfo, what: str) -> BadTensor:
    return BadTensor(f"{info.file}: tensor {info.name} {what}", "download the drafter again")
