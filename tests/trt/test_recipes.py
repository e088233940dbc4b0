"""Every recipe's pair, at full width and reduced depth, builds in every precision."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt
import pytest

from dflash_trt import contract as c
from dflash_trt.build.recipe import find_recipe, recipe_names
from dflash_trt.build.tensorrt import BuiltEngine, build_engine
from dflash_trt.config import BuildChoices, PairConfig
from dflash_trt.flavor import DEVICE_TABLE, PRECISION_TABLE, TENSORRT_RTX, load_flavor
from dflash_trt.lower.trt import lower_to_trt, step_fixed
from dflash_trt.nets.step import trace_step
from dflash_trt.quantize.policy import format_of
from tiny.gpu_builds import GEOMETRIES, RandomWeights

HERE = [device for device in DEVICE_TABLE.values() if device.backend == TENSORRT_RTX]
# Each recipe in each precision for SM120; each other device in each of its precisions.
COMBINATIONS = [
    *((name, "sm120", p) for name in GEOMETRIES for p in DEVICE_TABLE["sm120"].precisions),
    *(("smollm2-135m", d.name, p) for d in HERE if d.name != "sm120" for p in d.precisions),
]


def build_pair(
    pair: PairConfig, device: str, precision: str, block: int, folder: Path
) -> BuiltEngine:
    choices = BuildChoices(
        block=block, max_seq_len=512, precision=precision, device=device, logits=False
    )
    trt = load_flavor(TENSORRT_RTX)
    rows = c.cache_rows(choices.max_seq_len, block)
    graph = trace_step(pair, block, rows)
    del graph.outputs[c.LOGITS]
    weights = RandomWeights(pair, format_of(precision))

    def define(network: Any) -> Sequence[npt.NDArray[Any]]:
        compute = PRECISION_TABLE[precision].compute
        lower_to_trt(graph, network, trt, weights, compute, step_fixed(block, rows))
        return weights.kept

    profiles = c.profiles(choices, pair.target.vocab_size)
    return build_engine(
        trt, DEVICE_TABLE[device], define, profiles, folder / "rank0.engine", lambda *_: None
    )


def check(built: BuiltEngine, pair: PairConfig, file: Path) -> None:
    names = {tensor["name"] for tensor in built.layers["tensors"]}
    caches = c.all_caches(pair)
    assert {c.COMMITTED, c.NEXT, *(cache.output for cache in caches)} <= names
    assert built.layers["engines"] == 1
    assert file.stat().st_size > 1_000_000


def test_every_recipe_has_a_geometry_here() -> None:
    assert sorted(GEOMETRIES) == recipe_names()
    for name, pair in GEOMETRIES.items():
        recipe = find_recipe(name)
        assert recipe is not None
        assert recipe.choices.get("block", 16) == pair.drafter.block_size


@pytest.mark.usefixtures("greedy_choice")
@pytest.mark.parametrize(("recipe", "device", "precision"), COMBINATIONS)
def test_a_recipe_builds(recipe: str, device: str, precision: str, tmp_path: Path) -> None:
    pair = GEOMETRIES[recipe]
    built = build_pair(pair, device, precision, pair.drafter.block_size, tmp_path)
    check(built, pair, tmp_path / "rank0.engine")


@pytest.mark.usefixtures("greedy_choice")
@pytest.mark.parametrize("block", [2, 3, 8])
def test_a_smaller_block_builds(block: int, tmp_path: Path) -> None:
    pair = GEOMETRIES["smollm2-135m"]
    check(build_pair(pair, "sm120", "bf16", block, tmp_path), pair, tmp_path / "rank0.engine")
