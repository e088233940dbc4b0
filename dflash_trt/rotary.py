"""Rotary embedding: frequencies of a rule, and tables, in FP32 as Hugging Face computes them.

Rules: `transformers.modeling_rope_utils` (default, linear, llama3, yarn); YaRN is arXiv 2309.00071.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_trt.config import RopeConfig
from dflash_trt.errors import UnsupportedArchitecture

F32 = npt.NDArray[np.float32]
YARN_DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
"""What the reference takes where a YaRN rule says nothing."""


def rotary_tables(rope: RopeConfig, head_dim: int, num_positions: int) -> tuple[F32, F32]:
    """cos and sin, float32 [num_positions, head_dim / 2], already times the attention factor."""
    inverse, factor = inverse_frequencies(rope, head_dim)
    angles = np.arange(num_positions, dtype=np.float32)[:, None] * inverse[None, :]
    return np.cos(angles) * np.float32(factor), np.sin(angles) * np.float32(factor)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[F32, float]:
    """Radians a position, float32 [head_dim / 2], and what cos and sin are multiplied with.

    Raises `UnsupportedArchitecture` for a kind that is not known.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    inverse = (1.0 / np.power(np.float32(rope.theta), exponent)).astype(np.float32)
    params = rope.params
    if rope.kind == "default":
        return inverse, 1.0
    if rope.kind == "linear":
        return (inverse / np.float32(params["factor"])).astype(np.float32), 1.0
    if rope.kind == "table":
        return (inverse / np.asarray(params["divisors"], np.float32)).astype(np.float32), 1.0
    if rope.kind == "llama3":
        return _llama3(inverse, params), 1.0
    if rope.kind == "yarn":
        return _yarn(inverse, rope.theta, head_dim, params), _yarn_factor(params)
    raise UnsupportedArchitecture(f"rotary embedding of type {rope.kind!r} is not supported")


def _llama3(inverse: F32, params: dict[str, Any]) -> F32:
    original = params["original_max_position_embeddings"]
    low, high = params["low_freq_factor"], params["high_freq_factor"]
    wavelength = 2 * math.pi / inverse
    smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    # wavelength < original/high gives smooth 1 (kept), > original/low gives 0 (stretched).
    blended: F32 = (1 - smooth) * inverse / params["factor"] + smooth * inverse
    return blended.astype(np.float32)


def _yarn(inverse: F32, theta: float, head_dim: int, params: dict[str, Any]) -> F32:
    original = params["original_max_position_embeddings"]

    def dim_of(rotations: float) -> float:
        return (head_dim * math.log(original / (rotations * 2 * math.pi))) / (2 * math.log(theta))

    params = YARN_DEFAULTS | params
    low, high = dim_of(params["beta_fast"]), dim_of(params["beta_slow"])
    if params["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # the reference's own guard against a division by zero
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low), 0.0, 1.0)
    stretched = inverse / np.float32(params["factor"])
    blended: F32 = stretched * ramp + inverse * (1 - ramp)
    return blended.astype(np.float32)


def _yarn_factor(params: dict[str, Any]) -> float:
    if params.get("attention_factor") is not None:
        return float(params["attention_factor"])
    factor = params["factor"]

    def mscale(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if params.get("mscale") and params.get("mscale_all_dim"):
        return mscale(params["mscale"]) / mscale(params["mscale_all_dim"])
    return mscale(1.0)
