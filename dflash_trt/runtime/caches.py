"""The CPU's cache pools: one array per key or value cache, as long as the longest live request.

ONNX Runtime's attention costs what its caches are long, not what is live in them. So the pools
hold as many rows as the live requests need, and grow and shrink with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from dflash_trt.contract import CacheSpec

F32 = npt.NDArray[np.float32]

ROWS_AT_A_TIME = 128  # growing copies what is live: not for every token, nor far ahead


class CachePools:
    """Arrays [slots, heads, rows, head_dim] of all caches, with the same number of rows."""

    def __init__(
        self,
        specs: Sequence[CacheSpec],
        num_slots: int,
        max_rows: int,
        allocate: Callable[[tuple[int, ...]], F32],
    ) -> None:
        self._specs = specs
        self._num_slots = num_slots
        self._max_rows = max_rows
        self._allocate = allocate
        self._live = np.zeros(num_slots, np.int64)  # rows of each slot that must be kept
        self.rows = 0
        self.arrays: dict[str, F32] = {}
        self.fit(1)

    def fit(self, needed: int) -> bool:
        """Make room for `needed` rows of any slot; whether the arrays are new ones.

        What is live is kept. Pools that are twice as long as anything needs are shortened.
        """
        wanted = max(needed, int(self._live.max()))
        rows = min(-(-wanted // ROWS_AT_A_TIME) * ROWS_AT_A_TIME, self._max_rows)
        if rows <= self.rows < 2 * rows:
            return False
        kept = min(self.rows, rows)
        arrays: dict[str, F32] = {}  # swapped in whole: memory may run out half-way
        for spec in self._specs:
            array = self._allocate((self._num_slots, spec.num_heads, rows, spec.head_dim))
            if kept:
                array[:, :, :kept] = self.arrays[spec.name][:, :, :kept]
            arrays[spec.name] = array
        self.arrays = arrays
        self.rows = rows
        return True

    def keep(self, first_slot: int, lengths: npt.NDArray[np.integer]) -> None:
        """Note how many rows are live in the slots from `first_slot` on."""
        self._live[first_slot : first_slot + len(lengths)] = lengths

    def release(self, slot: int) -> None:
        """Forget the slot's request, down to its bytes.

        Dead rows are masked, but zero times NaN is NaN: what one request overflowed to must not
        reach the next one.
        """
        self._live[slot] = 0
        for array in self.arrays.values():
            array[slot] = 0.0
