"""The kernel's own source on the CPU against NumPy: every byte, guard bands included."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv import interface as kv
from kv import reference
from kv.case import Case, arena_of, make_arrays, make_launch, run

KINDS = list(product((kv.BF16, kv.FP16), (kv.NONE, kv.FP8, kv.NVFP4)))


def differing_bytes(kernel: ctypes.CDLL, case: Case) -> int:
    """Bytes of all memory, guard bands and inputs included, that are not as they must be."""
    computed, expected = arena_of(make_arrays(case)), arena_of(make_arrays(case))
    assert run(kernel, case, computed.address) == kv.SUCCESS
    reference.inject(case, expected.views)
    return int((computed.memory != expected.memory).sum())


@pytest.mark.parametrize(("type_", "quant"), KINDS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("values", ["normal", "large", "tiny", "special"])
def test_bits(kernel: ctypes.CDLL, type_: int, quant: int, head_dim: int, values: str) -> None:
    case = Case(type=type_, quant=quant, head_dim=head_dim, values=values, heads=3)
    assert differing_bytes(kernel, case) == 0


@pytest.mark.parametrize(("type_", "quant"), KINDS)
def test_a_ring_wraps(kernel: ctypes.CDLL, type_: int, quant: int) -> None:
    case = Case(
        type=type_, quant=quant, ring=True, capacity=11, length=(0, 9, 29), committed=(6, 3, 6)
    )
    assert differing_bytes(kernel, case) == 0


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_shape(kernel: ctypes.CDLL, data: st.DataObject) -> None:
    def integer(low: int, high: int) -> int:
        return data.draw(st.integers(low, high))

    slots, context_rows, block_rows = integer(1, 3), integer(0, 7), integer(0, 5)
    ring = data.draw(st.booleans())
    capacity = integer(max(1, context_rows + block_rows), 30) if ring else integer(1, 30)
    layers = data.draw(st.sampled_from([1, 2, 5, 16]))
    case = Case(
        type=data.draw(st.sampled_from([kv.BF16, kv.FP16])),
        quant=data.draw(st.sampled_from([kv.NONE, kv.FP8, kv.NVFP4])),
        head_dim=data.draw(st.sampled_from([64, 128, 256])),
        layers=layers,
        heads=integer(1, 3 if layers > 2 else 9),
        capacity=capacity,
        positions=integer(1, 50),
        context_rows=context_rows,
        block_rows=block_rows,
        length=tuple(integer(-2, 50) for _ in range(slots)),
        committed=tuple(integer(-1, context_rows + 1) for _ in range(slots)),
        ring=ring,
        norm=data.draw(st.booleans()),
        values=data.draw(st.sampled_from(["normal", "special"])),
        eps=data.draw(st.sampled_from([1e-6, 1e-5, 0.0])),
        padding=8 * integer(0, 2),
        seed=integer(0, 1000),
    )
    assert differing_bytes(kernel, case) == 0


def test_rejected_rows_are_written_nowhere(kernel: ctypes.CDLL) -> None:
    case = Case(block_rows=0, length=(3,), committed=(2,), context_rows=6)
    arena = arena_of(make_arrays(case))
    before = {name: array.copy() for name, array in arena.views.items()}
    assert run(kernel, case, arena.address) == kv.SUCCESS
    for pair in range(2 * case.layers):
        changed = (arena.views[f"cache.{pair}"] != before[f"cache.{pair}"]).any(axis=(0, 1, 3))
        assert np.flatnonzero(changed).tolist() == [3, 4]


def test_addresses_beyond_four_gigabytes(kernel: ctypes.CDLL) -> None:
    """The last slot of a cache lies 5 GB behind its start; only the touched pages are real."""
    case = Case(
        layers=1, heads=1, head_dim=64, capacity=1 << 22, block_rows=0,
        length=(-9,) * 9 + (7,), committed=(6,) * 10,
    )  # fmt: skip
    arrays = make_arrays(replace(case, capacity=1))
    for pair in range(2):
        arrays[f"cache.{pair}"] = np.zeros((10, 1, 1 << 22, 128), np.uint8)
    assert arrays["cache.0"][9:].ctypes.data - arrays["cache.0"].ctypes.data > 4 << 30
    address = {name: array.ctypes.data for name, array in arrays.items()}
    launch = make_launch(case, address)
    assert kernel.dflash_kv_inject(ctypes.byref(launch), None) == kv.SUCCESS
    values = arrays["context"][9].reshape(6, 2, 64)[:, 1]
    stored = arrays["cache.1"][9, 0, 7:13].view(values.dtype)
    assert stored.tobytes() == values.tobytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 80}, "head_dim must be 64, 128 or 256"),
        ({"num_layers": 17}, "num_layers must be 1 to 16"),
        ({"num_kv_heads": 0}, "num_kv_heads"),
        ({"slots": -1}, "slots"),
        ({"context_rows": -1}, "context_rows"),
        ({"capacity": 0}, "capacity"),
        ({"type": 2}, "type"),
        ({"quant": 3}, "quant"),
        ({"ring": 1, "capacity": 9}, "a ring must hold all rows"),
        ({"context_stride": 1028}, "context_stride"),
        ({"block_stride": 8}, "block_stride"),
        ({"length": None}, "must not be null"),
        ({"quant": kv.FP8, "scale": None}, "a quantized cache needs scale"),
        ({"quant": kv.NVFP4}, "NVFP4 needs cache_scale"),
    ],
)
def test_refusals(kernel: ctypes.CDLL, change: dict[str, int | None], message: str) -> None:
    case = Case()
    arena = arena_of(make_arrays(case))
    before = arena.memory.copy()
    launch = make_launch(case, arena.address)
    assert kernel.dflash_kv_inject_check(ctypes.byref(launch)) is None
    for name, value in change.items():
        setattr(launch, name, value)
    assert message in kernel.dflash_kv_inject_check(ctypes.byref(launch)).decode()
    assert kernel.dflash_kv_inject(ctypes.byref(launch), None) == kv.INVALID_VALUE
    assert (arena.memory == before).all()


@pytest.mark.parametrize("name", ["context", "block", "cache", "k_norm"])
def test_misaligned_pointers_are_refused(kernel: ctypes.CDLL, name: str) -> None:
    launch = make_launch(Case(), arena_of(make_arrays(Case())).address)
    getattr(launch, name)[1] += 8
    assert b"aligned to 16 bytes" in kernel.dflash_kv_inject_check(ctypes.byref(launch))


def test_the_reference_is_within_rounding_of_exact_arithmetic() -> None:
    """Bit equality would not notice if kernel and reference were wrong together."""
    case = Case(length=(2,), committed=(3,), block_rows=0, heads=2, head_dim=128)
    arrays = make_arrays(case)
    reference.inject(case, arrays)
    projected = arrays["context"][0, :3].astype(np.float64).reshape(3, 2, 2, 2, 128)
    for layer in range(2):
        key = projected[:, layer, 0]
        rms = np.sqrt((key**2).mean(axis=-1, keepdims=True) + case.eps)
        normed = key / rms * arrays[f"k_norm.{layer}"]
        turn = (arrays["cos"] + 1j * arrays["sin"].astype(np.complex128))[2:5, None]
        turned = (normed[..., :64] + 1j * normed[..., 64:]) * turn
        exact = np.concatenate([turned.real, turned.imag], axis=-1).swapaxes(0, 1)
        stored = arrays[f"cache.{2 * layer}"][0, :, 2:5].view(arrays["context"].dtype)
        np.testing.assert_allclose(stored.astype(np.float64), exact, rtol=2**-8, atol=1e-6)
