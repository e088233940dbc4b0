"""Sizes of a pair that TensorRT has no kernel for: known before a network is made.

Only its attention is choosy. Seen with TensorRT-RTX 1.7.1 in every precision, with every mask and
for every device that it builds for; `tests/trt/test_limits.py` compares the rule with the builder.
"""

from __future__ import annotations

from dflash_trt.config import AttentionConfig, PairConfig
from dflash_trt.errors import UnsupportedArchitecture

HEAD_DIMS = range(16, 257, 8)


def check_sizes(pair: PairConfig) -> None:
    """Raises `UnsupportedArchitecture`, naming the model and its size."""
    for name, attention in (
        ("target", pair.target.attention),
        ("drafter", pair.drafter.attention),
    ):
        reason = _reason(attention)
        if reason:
            raise UnsupportedArchitecture(
                f"the {name} has {reason}",
                "build for the CPU (--device cpu), which takes any size",
            )


def _reason(attention: AttentionConfig) -> str:
    if attention.head_dim not in HEAD_DIMS:
        first, last, step = HEAD_DIMS[0], HEAD_DIMS[-1], HEAD_DIMS.step
        return (
            f"head_dim {attention.head_dim}: TensorRT has attention kernels for multiples of "
            f"{step} from {first} to {last}"
        )
    if attention.num_heads == 1:
        return "a single attention head: TensorRT has attention kernels for two and more"
    return ""
