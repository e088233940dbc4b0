"""The noise of (seed, position, token id): one fixed function, and as good as independent."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from dflash_trt.decode.request import MAX_SEED
from dflash_trt.graph import Tensor
from dflash_trt.nets.sampling import exponential_noise
from tiny.noise import PRIME, noise_of
from tiny.ops import run_ops

F64 = npt.NDArray[np.float64]


def noise(folder: Path, seeds: list[int], positions: object, ids: object) -> F64:
    """Noise [B, R, N] of the graph; every slot sees the same ids."""
    rows = np.broadcast_to(np.asarray(positions, np.int32), (len(seeds), np.size(positions)))
    wide = np.broadcast_to(np.asarray(ids, np.int32), (*rows.shape, np.size(ids)))

    def body(seed: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
        return exponential_noise(seed, positions, ids)

    inputs = {
        "seed": np.array(seeds, np.int64),
        "positions": np.ascontiguousarray(rows),
        "ids": np.ascontiguousarray(wide),
    }
    return run_ops(folder, body, inputs)[0].astype(np.float64)


SEEDS = [0, 1, 7, PRIME - 1, PRIME, PRIME + 1, 2**40 + 3, MAX_SEED - 1, MAX_SEED]


def test_noise_equals_its_definition_in_python_integers(tmp_path: Path) -> None:
    positions, ids = [0, 1, 4095, 2**20], [0, 1, 2, 159, 151_935]
    made = noise(tmp_path, SEEDS, positions, ids)
    wanted = [[[noise_of(s, p, i) for i in ids] for p in positions] for s in SEEDS]
    # Where u is next to 1 the float32 logarithm is coarse: the noise there is large.
    np.testing.assert_allclose(made, wanted, rtol=2e-5, atol=2e-5)


def uniform(made: F64) -> F64:
    return np.exp(-made)


def test_noise_is_exponentially_distributed(tmp_path: Path) -> None:
    made = noise(tmp_path, [5, 123456789], np.arange(40), np.arange(1500)).ravel()
    assert 0 < made.min() < made.max() < 17
    assert abs(made.mean() - 1) < 4 / len(made) ** 0.5
    assert abs(made.std() - 1) < 0.02
    counts = np.histogram(uniform(made), bins=64, range=(0, 1))[0]
    expected = len(made) / 64
    assert ((counts - expected) ** 2 / expected).sum() < 63 + 5 * (2 * 63) ** 0.5


def correlation(a: F64, b: F64) -> float:
    return float(np.corrcoef(a.ravel(), b.ravel())[0, 1])


@pytest.mark.parametrize("base", [0, 41, PRIME - 3, 2**45])
def test_neighbouring_seeds_positions_and_tokens_are_uncorrelated(
    base: int, tmp_path: Path
) -> None:
    made = uniform(noise(tmp_path, [base + i for i in range(6)], np.arange(60), np.arange(200)))
    bound = 5 / (made.size / 4) ** 0.5
    assert abs(correlation(made[:, :-1], made[:, 1:])) < bound
    assert abs(correlation(made[:, :, :-1], made[:, :, 1:])) < bound
    assert abs(correlation(made[:-1], made[1:])) < bound
    # Not the same stream shifted: along two axes at once, in any direction.
    for seed, position, token in ((1, 1, 0), (1, 2, 0), (1, 0, 1), (0, 1, 1), (2, 1, 1)):
        for sign in (1, -1):
            moved = np.roll(made, (-seed, sign * position, sign * token), axis=(0, 1, 2))
            inner = (slice(0, 6 - seed), slice(2, -2), slice(1, -1))
            assert abs(correlation(made[inner], moved[inner])) < bound


def test_no_two_positions_of_any_seed_share_their_noise(tmp_path: Path) -> None:
    made = noise(tmp_path, list(range(64)), np.arange(64), [0, 1, 2])
    assert len(np.unique(made.reshape(-1, 3), axis=0)) == 64 * 64


def test_the_first_of_equal_tokens_is_uniform(tmp_path: Path) -> None:
    made = noise(tmp_path, list(range(100)), np.arange(100), np.arange(10))
    counts = np.bincount(made.argmin(-1).ravel(), minlength=10)
    assert ((counts - 1000) ** 2 / 1000).sum() < 9 + 5 * 18**0.5
