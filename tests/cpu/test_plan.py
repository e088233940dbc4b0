"""What a plan promises before a build, against what the build and the session then are."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from dflash_trt.build import pipeline
from dflash_trt.build.pipeline import Plan, build, plan
from dflash_trt.config import BuildChoices
from dflash_trt.errors import BadTensor, BuildError, ConfigError, PairMismatch
from tiny import EngineMaker, PairMaker, TinyPair


def planned(pair: TinyPair, **choices: Any) -> Plan:
    return plan(str(pair.target_dir), str(pair.drafter_dir), choices)


def test_missing_choices_come_from_the_pair(pair: TinyPair) -> None:
    choices = planned(pair).choices
    assert choices == BuildChoices(block=4, max_seq_len=512)


def test_the_smaller_of_both_models_position_limits_holds(make_pair: PairMaker) -> None:
    pair = make_pair(max_position_embeddings=200)
    assert planned(pair).choices.max_seq_len == 200
    with pytest.raises(ConfigError, match=r"201.*target 512, drafter 200"):
        planned(pair, max_seq_len=201)


@pytest.mark.parametrize("block", [5, 64])
def test_a_block_larger_than_trained_is_refused_with_both_numbers(
    block: int, pair: TinyPair
) -> None:
    with pytest.raises(PairMismatch, match=rf"{block}.*\b4\b"):
        planned(pair, block=block)


@pytest.mark.parametrize("block", [2, 3, 4])
def test_a_block_counts_the_anchor_so_one_draft_less_is_verified(
    block: int, pair: TinyPair, make_engine: EngineMaker, prompts: list[list[int]]
) -> None:
    engine = make_engine(pair, block=block)
    made = engine.generate(prompts[0], 20)
    assert engine.session().limits.block == block
    assert len(made.stats.offered) == block - 1


@pytest.mark.parametrize(
    "bad",
    [
        {"block": 1}, {"block": 65}, {"block": "4"}, {"block": True}, {"max_seq_len": 1},
        {"max_slots": 0}, {"max_slots": 257}, {"prefill_chunk": 0}, {"precision": "fp4"},
        {"max_seq_len": 2.0},
    ],
)  # fmt: skip
def test_choices_out_of_range_are_refused_by_name(bad: dict[str, Any], pair: TinyPair) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        planned(pair, **bad)


@pytest.mark.parametrize(
    ("device", "precision"), [("sm120", "int4"), ("sm89", "nvfp4"), ("cpu", "bf16")]
)
def test_a_precision_that_the_device_lacks_is_refused_before_anything_is_fetched(
    device: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "locate", lambda *_: pytest.fail("a checkpoint was looked for"))
    with pytest.raises(ConfigError, match=rf"precision {precision} .*{device}"):
        plan("hf:some/target", "hf:some/drafter", {"device": device, "precision": precision})


@pytest.mark.parametrize(
    ("options", "is_tied"),
    [({}, False), ({}, True), ({"dflash2": {"selector_rank": 32}}, False),
     ({"draft_ids": range(0, 19_200, 2)}, True)],
)  # fmt: skip
@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_sizes_that_the_plan_names_are_those_of_the_engine(
    precision: str, options: dict[str, Any], is_tied: bool, make_pair: PairMaker,
    make_engine: EngineMaker,
) -> None:  # fmt: skip
    # A table is larger than what pages and positions add.
    sizes = {"hidden_size": 64, "vocab_size": 19_200, "tie_word_embeddings": is_tied}
    pair = make_pair(target=sizes, intermediate_size=96, **options)
    made = planned(pair, precision=precision, max_seq_len=96, max_slots=3)
    engine = make_engine(pair, precision=precision)
    caches = engine.session().caches.values()
    assert made.cache_bytes_per_slot == sum(cache[0].nbytes for cache in caches)
    written = (engine.directory.path / "weights.bin").stat().st_size
    # Every tensor starts on a page, and tables of positions are written too.
    tensors = 120
    assert made.weight_bytes <= written < made.weight_bytes + tensors * 4096 * 2


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(
    pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = planned(pair)
    free = SimpleNamespace(free=made.weight_bytes - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    output = tmp_path / "not" / "there" / "engine"
    with pytest.raises(BuildError, match="GB free"):
        build(made, output, force=False, progress=lambda *state: None)
    assert not list(tmp_path.iterdir())


def test_progress_runs_from_start_to_the_whole_size(pair: TinyPair, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    made = planned(pair, max_seq_len=32)
    build(made, tmp_path / "e", force=False, progress=lambda *state: seen.append(state))
    done = [state[1] for state in seen]
    assert done == sorted(done)
    assert done[-1] == made.source_bytes
    assert {state[2] for state in seen} == {made.source_bytes}
    weights = [state for state in seen if state[0] == "weights"]
    assert weights[-1][1] == made.source_bytes


def test_two_builds_of_one_pair_are_the_same_bytes(pair: TinyPair, tmp_path: Path) -> None:
    made = [
        build(planned(pair, max_seq_len=32), tmp_path / name, force=False,
              progress=lambda *state: None).manifest["files"]
        for name in "ab"
    ]  # fmt: skip
    assert made[0] == made[1]


@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_a_pair_with_a_weight_that_is_no_number_leaves_no_engine(
    precision: str, pair: TinyPair, tmp_path: Path
) -> None:
    shutil.copytree(pair.drafter_dir, tmp_path / "drafter")
    file = tmp_path / "drafter" / "model.safetensors"
    tensors = load_file(file)
    tensors["layers.0.mlp.up_proj.weight"][3, 7] = float("nan")
    save_file(tensors, file, {"format": "pt"})
    made = plan(str(pair.target_dir), str(tmp_path / "drafter"), {"precision": precision})
    (tmp_path / "out").mkdir()
    with pytest.raises(BadTensor, match="holds NaN or infinite"):
        build(made, tmp_path / "out" / "engine", force=False, progress=lambda *state: None)
    assert not list((tmp_path / "out").iterdir())
