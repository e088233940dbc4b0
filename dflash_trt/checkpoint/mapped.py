"""A weight file mapped into memory: read-only views, with every range checked first."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_trt.checkpoint.facts import LFS_MAGIC, lfs_pointer
from dflash_trt.errors import CheckpointError


class MappedFile:
    """`size` bytes of a regular file; views stay valid for as long as anything holds them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if not os.path.isfile(path):
                raise CheckpointError(f"{path}: no such file")
            with path.open("rb") as file:
                if file.read(len(LFS_MAGIC)) == LFS_MAGIC:
                    raise lfs_pointer(path)
                self.size = file.seek(0, 2)
                if self.size == 0:
                    raise CheckpointError(f"{path}: file is empty", "download it again")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error

    def bytes_at(self, offset: int, count: int) -> bytes:
        """A copy of `count` bytes. Raises `CheckpointError` past the end of the file."""
        if offset < 0 or count < 0 or offset + count > self.size:
            raise CheckpointError(
                f"{self.path}: is truncated: {count} bytes at offset {offset} are needed, "
                f"the file has {self.size}",
                "download it again",
            )
        return self._map[offset : offset + count]

    def view(self, dtype: np.dtype[Any], offset: int, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """A zero-copy array; the caller has checked that it lies inside the file."""
        count = 1
        for dim in shape:
            count *= dim
        if count == 0:
            return np.empty(shape, dtype)
        return np.frombuffer(self._map, dtype, count, offset).reshape(shape)
