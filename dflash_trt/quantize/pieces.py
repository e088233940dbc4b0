"""Row ranges of a weight, small enough that intermediates stay small beside it."""

from __future__ import annotations

PIECE_VALUES = 1 << 21


def row_pieces(num_rows: int, width: int) -> list[slice]:
    """Slices that cover the rows of a weight [num_rows, width], in order."""
    step = max(1, PIECE_VALUES // max(1, width))
    return [slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]
