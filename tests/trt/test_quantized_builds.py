"""Engines that TensorRT builds of FP8 and NVFP4 checkpoints, whose scales are no powers of two."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_trt.build.pipeline import build, plan
from dflash_trt.inspection import describe
from tiny import TinyPair
from tiny.gpu_builds import GPU_CHOICES
from tiny.quantized import save_quantized

pytestmark = pytest.mark.usefixtures("greedy_choice")


@pytest.mark.parametrize(
    ("form", "precision", "kind"),
    [("modelopt-fp8", "fp8", "FP8"), ("compressed-nvfp4", "nvfp4", "FP4")],
)
def test_a_quantized_checkpoint_becomes_an_engine_of_its_own_precision(
    form: str, precision: str, kind: str, gpu_pair: TinyPair, tmp_path: Path
) -> None:
    save_quantized(gpu_pair.target_dir, tmp_path / "target", form)
    made = plan(str(tmp_path / "target"), str(gpu_pair.drafter_dir), GPU_CHOICES)
    assert made.choices.precision == precision
    engine = build(made, tmp_path / "engine", force=False, progress=lambda *_: None)
    weights = describe(engine)["tensorrt"]["kernels"]["weights"]
    assert sum(count for name, count in weights.items() if kind in name.upper()) >= 2 * 4
