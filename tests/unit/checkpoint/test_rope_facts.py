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
from dflash_trt.checkpoint.rope import REQUIRED, same_rule
from dflash_trt.config import RopeConfig
from dflash_trt.errors import CheckpointError
from dflash_trt.rotary import rotary_tables

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


@pytest.mark.parametrize(
    "default",
    [{"partial_rotary_factor": 1.0}, {"beta_fast": 32.0}, {"beta_fast": 0}, {"beta_slow": 1},
     {"truncate": True}],
)  # fmt: skip
def test_a_default_that_one_spelling_states_is_no_disagreement(
    tmp_path: Path, default: dict[str, Any]
) -> None:
    save_hf(tmp_path, "qwen3")
    plain = {key: value for key, value in YARN.items() if key != "beta_fast"}
    for new, old in ((plain, plain | default), (plain | default, plain)):
        edit_json(tmp_path / "config.json", rope_parameters=new, rope_scaling=old)
        assert open_target(tmp_path).config.attention.rope.kind == "yarn"


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


def llama3(**changes: float) -> RopeConfig:
    params: dict[str, Any] = {key: LLAMA3[key] for key in REQUIRED["llama3"]}
    return RopeConfig(5e5, "llama3", params | changes)


def table(rope: RopeConfig) -> RopeConfig:
    """A rule as GGUF has it: the divisors of its frequencies, in 32 bits."""
    plain, angles = (rotary_angles(each)[1] for each in (RopeConfig(rope.theta), rope))
    divisors = (plain / angles).astype(np.float32)
    return RopeConfig(rope.theta, "table", {"divisors": tuple(map(float, divisors))})


def rotary_angles(rope: RopeConfig) -> Any:
    """The angles at the first two positions, below a quarter turn."""
    cos, sin = rotary_tables(rope, 16, 2)
    return np.arctan2(sin, cos)


def yarn(theta: float = 1e6, **changes: Any) -> RopeConfig:
    params = {"factor": 4.0, "original_max_position_embeddings": 128}
    return RopeConfig(theta, "yarn", params | changes)


PLAIN, LINEAR = RopeConfig(1e6), RopeConfig(1e6, "linear", {"factor": 1.0})
SAME = {
    "a factor of 1": (PLAIN, LINEAR),
    "a yarn of 1": (PLAIN, yarn(factor=1.0)),
    "yarn's defaults": (yarn(), yarn(beta_fast=32.0, beta_slow=1.0, truncate=True)),
    "yarn's attention": (yarn(), yarn(attention_factor=0.1 * np.log(4) + 1)),
    "yarn's ratio": (yarn(attention_factor=1.0), yarn(mscale=0.5, mscale_all_dim=0.5)),
    "one mscale": (yarn(), yarn(mscale=0.5)),
    "32 bits": (yarn(beta_fast=0.1), yarn(beta_fast=float(np.float32(0.1)))),
    "llama3's table": (llama3(), table(llama3())),
}
OTHER = {
    "theta": (PLAIN, RopeConfig(1.001e6)),
    "a factor": (PLAIN, RopeConfig(1e6, "linear", {"factor": 2.0})),
    "yarn": (PLAIN, yarn()),
    "yarn's attention alone": (PLAIN, yarn(factor=1.0, attention_factor=1.5)),
    "yarn's factor": (yarn(), yarn(factor=2.0, attention_factor=0.1 * np.log(4) + 1)),
    "yarn's attention": (yarn(), yarn(attention_factor=1.0)),
    "yarn's ratio": (yarn(), yarn(mscale=0.5, mscale_all_dim=1.0)),
    "yarn's ramp": (yarn(truncate=False), yarn()),
    "another table": (llama3(), table(llama3(factor=32.0))),
}


@pytest.mark.parametrize("case", SAME)
def test_rules_are_the_same_that_make_the_same_tables(case: str) -> None:
    one, other = SAME[case]
    assert same_rule(one, other, 16)
    assert same_rule(other, one, 16)
    for ours, theirs in zip(rotary_tables(one, 16, 20), rotary_tables(other, 16, 20), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", OTHER)
def test_rules_differ_that_make_other_tables(case: str) -> None:
    one, other = OTHER[case]
    assert not same_rule(one, other, 16)
    assert not same_rule(other, one, 16)
    ours, theirs = (rotary_tables(rope, 16, 2000)[0] for rope in (one, other))
    assert np.abs(ours - theirs).max() > 1e-3


def test_foreign_rope_key_is_noted(tmp_path: Path) -> None:
    save_hf(tmp_path, "qwen3")
    edit_json(
        tmp_path / "config.json",
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "beta_fast": 3},
    )
    (note,) = open_target(tmp_path).notes
    assert "beta_fast" in note
