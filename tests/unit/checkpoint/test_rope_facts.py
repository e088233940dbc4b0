"""Rotary rules of Hugging Face's config files, in both spellings."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from checkpoint_files import edit_json, save_hf
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dflash_trt.checkpoint import open_target, read_target_config
from dflash_trt.errors import CheckpointError
from dflash_trt.nets.rotary import rotary_tables

YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "beta_fast": 16.0,
        "original_max_position_embeddings": 128}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip


def test_old_spelling_of_rope(tmp_path: Path) -> None:
    save_hf(tmp_path, "llama")
    old = {key: value for key, value in LLAMA3.items() if key not in ("rope_type", "rope_theta")}
    edit_json(
        tmp_path / "config.json",
        rope_parameters=..., rope_theta=5e5, rope_scaling=old | {"type": "llama3"},
    )  # fmt: skip
    rope = open_target(tmp_path).config.attention.rope
    assert (rope.theta, rope.kind, rope.params) == (5e5, "llama3", old)
    edit_json(tmp_path / "config.json", rope_scaling=None)
    assert open_target(tmp_path).config.attention.rope.kind == "default"


def test_nested_theta_wins_with_a_warning(tmp_path: Path) -> None:
    save_hf(tmp_path, "qwen3")
    edit_json(
        tmp_path / "config.json",
        rope_theta=10000.0, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip
    with pytest.warns(UserWarning, match="rope_theta is 10000.0 at top level and 1e"):
        config = read_target_config(tmp_path)
    assert config.attention.rope.theta == 1e6
    edit_json(tmp_path / "config.json", rope_theta=1e6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_target_config(tmp_path)


def test_two_spellings_of_one_rope_rule_agree_or_are_refused(tmp_path: Path) -> None:
    save_hf(tmp_path, "qwen3")
    file = tmp_path / "config.json"
    old = {key: value for key, value in YARN.items() if key not in ("rope_type", "rope_theta")}
    edit_json(file, rope_parameters=YARN, rope_scaling=old | {"type": "yarn"}, rope_theta=1e6)
    rope = open_target(tmp_path).config.attention.rope
    assert (rope.theta, rope.kind, rope.params) == (1e6, "yarn", old)
    for changes, both in (
        ({"beta_fast": 32.0}, "beta_fast: 16.0 and 32.0"),
        ({"beta_fast": None}, "beta_fast: 16.0 and nothing"),
        ({"truncate": False}, "truncate: nothing and False"),
        ({"rope_theta": 1e4}, "rope_theta: 1000000.0 and 10000.0"),
        ({"factor": 2.0}, "factor: 4.0 and 2.0"),
    ):
        edit_json(file, rope_scaling=old | {"type": "yarn"} | changes)
        with pytest.raises(CheckpointError, match=f"disagree on {both}"):
            open_target(tmp_path)
    edit_json(file, rope_scaling=old | {"type": "yarn"}, rope_theta=1e4)  # at its older place
    with pytest.raises(CheckpointError, match=r"disagree on rope_theta: 1000000\.0 and 10000\.0"):
        open_target(tmp_path)


@pytest.mark.parametrize(
    "zeros",
    [{"mscale": 1.0, "mscale_all_dim": 0}, {"mscale": 0.0}, {"beta_fast": 0, "beta_slow": 0}],
)
def test_a_zero_of_yarns_is_absent_as_transformers_reads_it(
    tmp_path: Path, zeros: dict[str, Any]
) -> None:
    save_hf(tmp_path, "qwen3")
    edit_json(tmp_path / "config.json", rope_parameters=YARN | zeros)
    target = open_target(tmp_path)
    assert target.notes == ()
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    frequencies, factor = ROPE_INIT_FUNCTIONS["yarn"](theirs, torch.device("cpu"))
    angles = np.arange(20, dtype=np.float32)[:, None] * frequencies.numpy()[None, :]
    cos, sin = rotary_tables(target.config.attention.rope, 16, 20)
    np.testing.assert_allclose(cos, np.cos(angles) * factor, rtol=0, atol=2e-6)
    np.testing.assert_allclose(sin, np.sin(angles) * factor, rtol=0, atol=2e-6)


def test_foreign_rope_key_is_noted(tmp_path: Path) -> None:
    save_hf(tmp_path, "qwen3")
    edit_json(
        tmp_path / "config.json",
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "beta_fast": 3},
    )
    (note,) = open_target(tmp_path).notes
    assert "beta_fast" in note
