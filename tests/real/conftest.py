"""The real pair: SmolLM2-135M-Instruct, the drafter of this repository, and their engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from demo_pair import find_demo_target
from dflash_trt.build.pipeline import build, plan
from dflash_trt.decode.engine import Engine
from dflash_trt.lossless.prompts import bundled_prompts, interleaved

DRAFTER = Path(__file__).parents[2] / "demo-drafter"


@pytest.fixture(scope="session")
def target_file() -> Path:
    return find_demo_target()


@pytest.fixture(scope="session")
def make_engine(target_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An engine of a precision, built from the recipe; loaded once."""
    made: dict[str, Engine] = {}

    def make(precision: str) -> Engine:
        if precision not in made:
            planned = plan(
                str(target_file), str(DRAFTER), {"precision": precision, "max_seq_len": 512}
            )
            folder = tmp_path_factory.mktemp("real") / precision
            built = build(planned, folder, force=False, progress=lambda *_: None)
            made[precision] = Engine.from_dir(built)
        return made[precision]

    return make


@pytest.fixture(scope="session")
def target(target_file: Path) -> Any:
    """The same weights in transformers, FP32."""
    model = AutoModelForCausalLM.from_pretrained(
        str(target_file.parent), gguf_file=target_file.name, dtype=torch.float32
    )
    return model.eval()


@pytest.fixture(scope="session")
def prompts(make_engine: Any) -> list[list[int]]:
    """Chat prompts as ids, one of each class in turn."""
    tokenizer = make_engine("fp32").tokenizer
    texts = interleaved(bundled_prompts())
    return [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in texts]
