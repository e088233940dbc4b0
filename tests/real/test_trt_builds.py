"""The real pair as TensorRT engines: they build, quickly, and hold the weights they should."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from dflash_trt.build.pipeline import build, plan
from dflash_trt.build.recipe import find_recipe
from dflash_trt.inspection import describe

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("precision", "kinds"),
    [("bf16", {"BFloat16"}), ("fp8", {"BFloat16", "FP8"}), ("nvfp4", {"FP4", "FP8"})],
)
def test_the_real_pair_builds(
    precision: str, kinds: set[str], target_file: Path, tmp_path: Path
) -> None:
    recipe = find_recipe("smollm2-135m")
    assert recipe is not None
    choices = {**recipe.choices_for("sm120"), "precision": precision}
    # Seconds of CPU: the machine may be busy with other things.
    begun = time.process_time()
    planned = plan(recipe.target, recipe.drafter, choices, target_base=recipe.base,
                   drafter_base=recipe.base)  # fmt: skip
    engine = build(planned, tmp_path / "engine", force=False, progress=lambda *_: None)
    assert time.process_time() - begun < 60
    told = describe(engine)["tensorrt"]
    assert kinds <= set(told["kernels"]["weights"])
    assert told["step"]["outputs"] == ["committed", "next_tokens"]
    assert told["step"]["on_host"] == []
    size = engine.model.stat().st_size
    assert planned.weight_bytes * 0.9 < size < planned.weight_bytes * 1.3
