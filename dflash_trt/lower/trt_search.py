"""Emitter of the search for a threshold: most of what the sampler does with the logits.

Two binary digits at a time: three candidates are summed over by one layer, so half as many layers
wait for each other. More at a time would read the logits more often than it saves.
"""

from __future__ import annotations

import numpy as np

from dflash_trt.graph import Node
from dflash_trt.graph.compounds import LEAST_THRESHOLD, THRESHOLD_DIGITS
from dflash_trt.lower.trt_emitter import Array, Emitter, TrtEmitter, TrtTensor
from dflash_trt.lower.trt_math import binary, reduced, reshaped, select

AT_A_TIME = 2


def _threshold(low: TrtEmitter, node: Node) -> list[TrtTensor]:
    """Candidates lie on an axis before the last: [M, R, 3, V]."""
    x, need, *weight = (low.value(tensor, node) for tensor in node.inputs)
    full, rank = low.trt.DataType.FLOAT, len(x.shape)
    lead = [0] * (rank - 1)

    def number(value: float | Array) -> TrtTensor:
        return low.const(np.reshape(np.asarray(value), (*[1] * (rank - 1), -1, 1)), full, node)

    def row(tensor: TrtTensor) -> TrtTensor:
        return reshaped(low, node, tensor, [*lead, 1, tensor.shape[-1]])

    rows, need, zero = row(x), row(need), number(0.0)
    weights = row(weight[0]) if weight else number(1.0)
    found = number(LEAST_THRESHOLD)
    for first in range(0, len(THRESHOLD_DIGITS), AT_A_TIME):
        digits = THRESHOLD_DIGITS[first : first + AT_A_TIME]
        steps = np.arange(1, 1 << len(digits)) * digits[-1]
        higher = binary(low, node, "SUM", found, number(steps))
        below = binary(low, node, "GREATER", higher, rows)
        total = reduced(low, node, "SUM", select(low, node, below, zero, weights), True)
        lacks = binary(low, node, "GREATER", need, total)
        reached = select(low, node, lacks, found, higher)
        # Beside the noise, TensorRT-RTX 1.7 cannot build a reduction over one element.
        is_one = len(steps) == 1
        found = reached if is_one else reduced(low, node, "MAX", reached, True, 1 << (rank - 1))
    return [reshaped(low, node, found, [*lead, 1])]


SEARCH: dict[str, Emitter] = {"threshold": _threshold}
