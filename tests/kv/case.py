"""A launch of the KV-injection kernel as NumPy arrays: shapes, values, where each buffer lies."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from kv import interface as kv

Arrays = dict[str, np.ndarray]
TYPES = {kv.BF16: np.dtype(ml_dtypes.bfloat16), kv.FP16: np.dtype(np.float16)}


@dataclass(frozen=True)
class Case:
    """Sizes and kinds of one launch; `values` names a family of `random_values`."""

    type: int = kv.BF16
    quant: int = kv.NONE
    head_dim: int = 128
    layers: int = 2
    heads: int = 2
    capacity: int = 24
    positions: int = 40
    context_rows: int = 6
    block_rows: int = 4
    length: tuple[int, ...] = (0, 5)
    committed: tuple[int, ...] = (6, 2)
    ring: bool = False
    norm: bool = True
    values: str = "normal"
    eps: float = 1e-6
    seed: int = 0
    padding: int = 0  # elements behind each row, a multiple of 8

    @property
    def slots(self) -> int:
        """B."""
        return len(self.length)


def random_values(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """float32 values: `normal`, `large`, `tiny` (denormals of the 16-bit types), `special`."""
    x = rng.standard_normal(shape, dtype=np.float32)
    if kind == "large":
        return x * np.float32(3e4)
    if kind == "tiny":
        return x * np.float32(2) ** rng.integers(-140, -10, shape).astype(np.float32)
    if kind == "special":
        odd = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, 6e-8, -65504.0], np.float32)
        pick = rng.random(shape) < 0.02
        x = np.where(pick, rng.choice(odd, shape), x)
        x[..., 0, :] = 0.0  # whole lines of zeros
    return x


def make_arrays(case: Case) -> Arrays:
    """Every buffer of the launch by name; caches hold random bytes, as garbage does."""
    rng = np.random.default_rng(case.seed)
    layers, heads, dim = case.layers, case.heads, case.head_dim
    pairs = 2 * layers
    width = pairs * heads * dim + case.padding
    bytes_of_line = {kv.NONE: 2 * dim, kv.FP8: dim, kv.NVFP4: dim // 2}[case.quant]
    lines = (case.slots, heads, case.capacity)

    def projected(rows: int) -> np.ndarray:
        shape = (case.slots, rows, pairs, heads, dim)
        padded = np.zeros((case.slots, rows, width), np.float32)
        values = random_values(rng, case.values, shape)
        padded[..., : width - case.padding] = values.reshape(case.slots, rows, width - case.padding)
        with np.errstate(over="ignore"):
            return padded.astype(TYPES[case.type])

    angle = rng.uniform(0, 6.3, (case.positions, dim // 2)).astype(np.float32)
    arrays = {
        "length": np.array(case.length, np.int32),
        "committed": np.array(case.committed, np.int32),
        "cos": np.cos(angle),
        "sin": np.sin(angle),
        "scale": rng.uniform(0.004, 0.3, pairs).astype(np.float32),
        "context": projected(case.context_rows),
        "block": projected(case.block_rows),
    }
    for layer in range(layers if case.norm else 0):
        arrays[f"k_norm.{layer}"] = random_values(rng, "normal", (1, dim))[0]
    for pair in range(pairs):
        arrays[f"cache.{pair}"] = rng.integers(0, 256, (*lines, bytes_of_line), np.uint8)
        if case.quant == kv.NVFP4:
            arrays[f"cache_scale.{pair}"] = rng.integers(0, 256, (*lines, dim // 16), np.uint8)
    return arrays


def make_launch(case: Case, address: dict[str, int]) -> kv.Launch:
    """The launch on buffers that start at these addresses."""
    pairs, width = 2 * case.layers, case.heads * case.head_dim
    stride = pairs * width + case.padding
    launch = kv.Launch(
        slots=case.slots,
        context_rows=case.context_rows,
        block_rows=case.block_rows,
        num_layers=case.layers,
        num_kv_heads=case.heads,
        head_dim=case.head_dim,
        capacity=case.capacity,
        num_positions=case.positions,
        type=case.type,
        quant=case.quant,
        ring=case.ring,
        eps=case.eps,
        context_stride=stride,
        block_stride=stride,
        **{name: address[name] for name in ("length", "committed", "cos", "sin", "scale")},
    )
    for layer in range(case.layers):
        launch.k_norm[layer] = address.get(f"k_norm.{layer}")
    for pair in range(pairs):
        launch.context[pair] = address["context"] + 2 * pair * width
        launch.block[pair] = address["block"] + 2 * pair * width
        launch.cache[pair] = address[f"cache.{pair}"]
        launch.cache_scale[pair] = address.get(f"cache_scale.{pair}")
    return launch


@dataclass(frozen=True)
class Arena:
    """All buffers in one block of memory, with bytes between them that nobody may write."""

    memory: np.ndarray  # uint8
    views: Arrays

    @property
    def address(self) -> dict[str, int]:
        """Where each buffer starts."""
        return {name: view.ctypes.data for name, view in self.views.items()}


def arena_of(arrays: Arrays, guard: int = 128) -> Arena:
    """Copies of the arrays with `guard` bytes before, between and behind them."""
    start, total = {}, guard
    for name, array in arrays.items():
        total = -(-total // 16) * 16
        start[name] = total
        total += array.nbytes + guard
    raw = np.zeros(total + 16, np.uint8)
    raw = raw[-raw.ctypes.data % 16 :][:total]  # aligned to 16 bytes, as a device allocation is
    raw[:] = np.arange(total) * 37 % 251
    views = {}
    for name, array in arrays.items():
        piece = raw[start[name] : start[name] + array.nbytes]
        views[name] = piece.view(array.dtype).reshape(array.shape)
        views[name][...] = array
    return Arena(raw, views)


def run(library: ctypes.CDLL, case: Case, address: dict[str, int]) -> int:
    """Launch on host memory; the status."""
    return int(library.dflash_kv_inject(ctypes.byref(make_launch(case, address)), None))
