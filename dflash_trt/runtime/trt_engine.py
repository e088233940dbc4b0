"""What a GPU session asks of a loaded engine and its execution contexts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorInfo:
    """One input or output of an engine; -1 in its shape is a dim that a step chooses."""

    name: str
    is_input: bool
    dtype: np.dtype[Any]
    shape: Shape
    most: tuple[Shape, ...] = ()  # of an input: the largest shape of each profile


class StepContext(Protocol):
    """Runs steps of one profile. Two contexts must not run at the same time: they share memory."""

    def set_shape(self, name: str, shape: Shape) -> None:
        """The shape of an input. Raises `GpuError` where the profile does not allow it."""

    def set_address(self, name: str, address: int) -> None:
        """Where an input or output lies."""

    def enqueue(self) -> None:
        """Put one step on the stream. Raises `GpuError` when TensorRT refuses."""

    @property
    def is_capturable(self) -> bool:
        """Whether steps with these shapes may become part of a graph."""


class LoadedEngine(Protocol):
    """An engine whose weights are on the GPU."""

    @property
    def tensors(self) -> Sequence[TensorInfo]:
        """Every input and output."""

    @property
    def num_profiles(self) -> int:
        """Optimization profiles: ranges of shapes that kernels were chosen for."""

    def scratch_bytes(self, profile: int) -> int:
        """Device memory that a context of a profile needs while it runs."""

    def context(self, profile: int, scratch: int, num_bytes: int, *, fixed: bool) -> StepContext:
        """A new context that works in memory of the caller. `fixed`: its shapes will not change."""

    def save_compiled(self, is_new: bool) -> None:
        """Keep what was compiled on this GPU for the next start, if a step made something new.

        Called after every step, so that the cost of saving can be spread.
        """
