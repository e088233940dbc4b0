"""Fixtures of the tests that build engines with TensorRT, which needs no GPU for RTX devices."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.build.pipeline import build, plan
from dflash_trt.graph import Tensor, argmax
from dflash_trt.nets import step
from tiny import PairMaker, TinyPair
from tiny.gpu_builds import GPU_CHOICES, GpuBuild


@pytest.fixture(scope="module")
def greedy_choice() -> Iterator[None]:
    """The likeliest token in place of the sampler: its kernels take longest, and are always alike.

    The real pair's build has the sampler too.
    """

    def choose(logits: Tensor, *_: Any) -> Tensor:
        return argmax(logits)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "choose", choose)
        yield


@pytest.fixture(scope="session")
def gpu_pair(make_pair: PairMaker) -> TinyPair:
    """A tiny pair of sizes that TensorRT has kernels for."""
    heads = {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    return make_pair(
        target={"hidden_size": 128, "vocab_size": 256, "num_hidden_layers": 3, **heads},
        intermediate_size=128, num_hidden_layers=1, **heads,
    )  # fmt: skip


@pytest.fixture
def build_gpu(gpu_pair: TinyPair, tmp_path: Path) -> GpuBuild:
    """Builds the tiny pair as the command line does."""

    def make(name: str = "engine", progress: Any = lambda *_: None, **choices: Any) -> Any:
        planned = plan(
            str(gpu_pair.target_dir), str(gpu_pair.drafter_dir), {**GPU_CHOICES, **choices}
        )
        return build(planned, tmp_path / name, force=False, progress=progress)

    return make
