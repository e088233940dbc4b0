"""Runs launches on exactly sized buffers: for a process with AddressSanitizer preloaded.

    python tests/kv/sanitized.py LIBRARY [BUFFER]

BUFFER is made 16 bytes shorter than it must be (or a line): the sanitizer has to find that.
"""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from kv import interface as kv
from kv import reference
from kv.case import Case, make_arrays, run


def cases() -> list[Case]:
    """Every kernel once, ring and linear in turn; the last slot reaches the end of each buffer."""
    kinds = product((kv.BF16, kv.FP16), (64, 128, 256), (kv.NONE, kv.FP8, kv.NVFP4))
    return [
        Case(
            type=type_, head_dim=head_dim, quant=quant, ring=i % 2 == 1, heads=1 + i % 3,
            capacity=7, positions=7, context_rows=4, block_rows=2, length=(0, 1), committed=(3, 4),
            values="special",
        )
        for i, (type_, head_dim, quant) in enumerate(kinds)
    ]  # fmt: skip


def main(library: str, short: str | None) -> None:
    """Launch all cases and compare with the reference."""
    loaded = kv.load(Path(library))
    for case in cases():
        computed, expected = make_arrays(case), make_arrays(case)
        if short:
            line = computed[short].shape[-1] * computed[short].itemsize
            cut = computed[short].reshape(-1).view(np.uint8)[: -min(line, 16)]
            computed[short] = cut.copy()
        address = {name: array.ctypes.data for name, array in computed.items()}
        assert run(loaded, case, address) == kv.SUCCESS
        reference.inject(case, expected)
        for name in computed:
            assert computed[name].tobytes() == expected[name].tobytes(), (case, name)
    print(f"{len(cases())} launches, no finding")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
