"""The real pair as a TensorRT engine: it builds, and holds the weights it should."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_trt.build.pipeline import build, plan
from dflash_trt.build.recipe import find_recipe
from dflash_trt.inspection import describe

pytestmark = pytest.mark.slow


def test_the_real_pair_builds(target_file: Path, tmp_path: Path) -> None:
    """In NVFP4, which has FP8 (the head) and BF16 (the table) in it too."""
    recipe = find_recipe("smollm2-135m")
    assert recipe is not None
    choices = {**recipe.choices_for("sm120"), "precision": "nvfp4"}
    planned = plan(str(target_file), recipe.drafter, choices, drafter_base=recipe.base)
    engine = build(planned, tmp_path / "engine", force=False, progress=lambda *_: None)
    told = describe(engine)["tensorrt"]
    kinds = {name.upper() for name in told["kernels"]["weights"]}
    assert any("FP4" in kind for kind in kinds)
    assert any("FP8" in kind for kind in kinds)
    assert "BFLOAT16" in kinds
    assert told["step"]["outputs"] == ["committed", "next_tokens"]
    assert told["step"]["on_host"] == []
    assert planned.weight_bytes < engine.model.stat().st_size < 2 * planned.weight_bytes
