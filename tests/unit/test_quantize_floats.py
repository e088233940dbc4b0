"""FP8 and NVFP4 quantizers, against ml_dtypes' own rounding and the definition of the blocks."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dflash_trt.quantize.floats import (
    FP4_BLOCK,
    FP4_MAX,
    FP8_MAX,
    quantize_fp8,
    quantize_nvfp4,
)
from dflash_trt.quantize.pieces import PIECE_VALUES

F32 = npt.NDArray[np.float32]
FP8, FP4 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float4_e2m1fn)


@st.composite
def weights(draw: st.DrawFn) -> F32:
    """Whole blocks of small numbers, at any magnitude that weights have."""
    shape = draw(st.tuples(st.integers(1, 4), st.sampled_from([16, 32, 48])))
    numbers = hnp.arrays(np.float32, shape, elements=st.floats(-8, 8, width=16))
    return draw(numbers) * np.float32(2.0 ** draw(st.integers(-8, 8)))


def is_power_of_two(x: float) -> bool:
    return bool(np.frexp(x)[0] == 0.5)


@given(weights())
def test_fp8_is_the_nearest_code_of_a_power_of_two_scale(weight: F32) -> None:
    made = quantize_fp8(weight)
    peak = np.abs(weight).max()
    assert is_power_of_two(made.scale)
    assert peak <= FP8_MAX * made.scale  # nothing is clipped
    assert made.scale == 2.0**-14 or peak > FP8_MAX * made.scale / 2  # and no range is wasted
    wanted = (weight.astype(np.float64) / made.scale).astype(FP8)
    np.testing.assert_array_equal(made.codes.view(np.uint8), wanted.view(np.uint8))
    np.testing.assert_array_equal(made.dequantize(), wanted.astype(np.float32) * made.scale)


@given(weights())
def test_nvfp4_maps_each_blocks_largest_weight_to_six(weight: F32) -> None:
    made = quantize_nvfp4(weight)
    assert is_power_of_two(made.scale)
    blocks = weight.reshape(len(weight), -1, FP4_BLOCK).astype(np.float64)
    peaks = np.abs(blocks).max(-1)
    scales = (peaks / FP4_MAX / made.scale).astype(FP8)
    assert (scales.astype(np.float64) <= FP8_MAX).all()
    np.testing.assert_array_equal(made.block_scales.view(np.uint8), scales.view(np.uint8))
    steps = scales.astype(np.float32)[..., None] * np.float32(made.scale)
    ratio = np.divide(blocks, steps, out=np.zeros_like(blocks), where=steps > 0)
    wanted = np.clip(ratio, -FP4_MAX, FP4_MAX).astype(np.float32).astype(FP4)
    found = made.dequantize().reshape(blocks.shape)
    np.testing.assert_allclose(found, wanted.astype(np.float32) * steps, rtol=2e-7, atol=0)


def test_fp4_rounds_to_the_nearest_code_with_ties_to_even() -> None:
    # A block whose scale is exactly 1: its codes are those of the numbers themselves.
    numbers = np.array([0, 0.25, 0.26, 0.75, 1.25, 1.26, 1.75, 2.5, 2.6, 3.5, 3.6, 5, 5.1, 6, 4, 3])
    weight = np.concatenate([numbers, -numbers]).reshape(2, 16).astype(np.float32)
    made = quantize_nvfp4(weight)
    found = made.dequantize().reshape(-1)
    wanted = weight.reshape(-1).astype(FP4).astype(np.float32)
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(wanted))


def test_the_low_nibble_is_the_even_input() -> None:
    weight = np.zeros((1, 16), np.float32)
    weight[0, 0], weight[0, 1] = 6, -3
    assert quantize_nvfp4(weight).codes[0, 0] == 7 | (0b1101 << 4)


@pytest.mark.parametrize("quantize", [quantize_fp8, quantize_nvfp4])
def test_large_weights_are_quantized_in_pieces_as_they_would_be_at_once(quantize: Any) -> None:
    generator = np.random.default_rng(0)
    weight = generator.normal(size=(PIECE_VALUES // 1024 + 3, 1024)).astype(np.float32)
    weight[-1, 0] = 50  # the largest is in the last piece
    found = quantize(weight).dequantize()
    for rows in (slice(0, 2), slice(-3, -1)):
        alone = quantize(np.concatenate([weight[rows], weight[-1:]])).dequantize()[:-1]
        np.testing.assert_array_equal(found[rows], alone)


@pytest.mark.parametrize("quantize", [quantize_fp8, quantize_nvfp4])
def test_zeros_stay_zeros(quantize: Any) -> None:
    assert not quantize(np.zeros((2, 16), np.float32)).dequantize().any()
