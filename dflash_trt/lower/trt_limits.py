"""Sizes of a pair that TensorRT cannot build: known before a network is made.

Only its attention is choosy. Seen with TensorRT-RTX 1.7.1 in every precision, with every mask and
for every device that it builds for; `tests/trt/test_sizes.py` compares the rule with the builder.
"""

from __future__ import annotations

from dflash_trt.config import PairConfig
from dflash_trt.errors import UnsupportedArchitecture
from dflash_trt.flavor import TENSORRT_RTX, Device

FUSED = range(16, 257, 8)
"""Values of head_dim with a fused kernel; for others between them the builder tries one, and fails.

Smaller and larger ones become products and a softmax.
"""


def check_sizes(pair: PairConfig, device: Device) -> None:
    """Raises `UnsupportedArchitecture`, naming the model and its size."""
    if device.backend != TENSORRT_RTX:
        return
    for name, model in (("target", pair.target), ("drafter", pair.drafter)):
        head_dim = model.attention.head_dim
        if FUSED.step < head_dim < FUSED[-1] and head_dim not in FUSED:
            raise UnsupportedArchitecture(
                f"the {name} has head_dim {head_dim}: between {FUSED.step} and {FUSED[-1]} "
                f"TensorRT-RTX builds attention for multiples of {FUSED.step} only",
                "build for the CPU (--device cpu), which takes any size",
            )
