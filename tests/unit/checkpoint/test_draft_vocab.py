"""Draft vocabularies: `d2t` in a drafter's file, a list of ids from the user, rows of a head."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_files import drafter_tensors, save_drafter, save_gguf, save_hf
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.checkpoint import open_drafter, open_target, read_pair
from dflash_trt.checkpoint.draft_vocab import ChosenRows, read_ids
from dflash_trt.checkpoint.pair import read_facts
from dflash_trt.errors import BadTensor, CheckpointError, ConfigError, DFlashError, PairMismatch

VOCAB = 96
IDS = [3, 4, 5, 40, 41, 95]
HEAD = "lm_head.weight"


def tables(ids: list[int], dtype: torch.dtype = torch.int64) -> dict[str, torch.Tensor]:
    """What speculators stores: offsets, and marks."""
    tokens = torch.tensor(ids)
    marks = torch.zeros(VOCAB, dtype=torch.bool)
    marks[tokens] = True
    return {"d2t": (tokens - torch.arange(len(ids))).to(dtype), "t2d": marks}


def save(folder: Path, extra: dict[str, torch.Tensor], **changes: Any) -> Path:
    return save_drafter(folder, drafter_tensors() | extra, **changes)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_d2t_is_an_offset_and_no_id(tmp_path: Path, dtype: torch.dtype, prefix: str) -> None:
    extra = {prefix + name: tensor for name, tensor in tables(IDS, dtype).items()}
    drafter = open_drafter(save(tmp_path, extra, draft_vocab_size=len(IDS)))
    assert drafter.draft_ids is not None
    assert drafter.draft_ids.tolist() == IDS
    assert drafter.config.draft_vocab_size == drafter.config.head_rows == len(IDS)
    assert drafter.config.vocab_size == VOCAB
    assert not {"d2t", "t2d"} & set(drafter.source.names())


def test_the_config_need_not_count_what_the_file_names(tmp_path: Path) -> None:
    extra = {"d2t": tables(IDS)["d2t"]}
    assert open_drafter(save(tmp_path / "a", extra)).config.draft_vocab_size == len(IDS)
    nested = {"draft_vocab_size": len(IDS)}
    assert open_drafter(save(tmp_path / "b", extra, dflash_config=nested)).draft_ids is not None


def test_a_table_of_all_tokens_in_order_is_no_draft_vocabulary(tmp_path: Path) -> None:
    drafter = open_drafter(save(tmp_path, tables(list(range(VOCAB))), draft_vocab_size=VOCAB))
    assert drafter.draft_ids is None
    assert drafter.config.draft_vocab_size is None


def test_the_order_of_the_head_is_kept(tmp_path: Path) -> None:
    ids = [50, 2, 95, 7]
    head = {HEAD: torch.randn(4, 64)}
    drafter = open_drafter(save(tmp_path, tables(ids) | head, draft_vocab_size=4))
    assert drafter.draft_ids is not None
    assert drafter.draft_ids.tolist() == ids
    np.testing.assert_array_equal(drafter.source.read(HEAD), head[HEAD].numpy())


GOOD = tables(IDS)
BAD: list[tuple[dict[str, torch.Tensor], dict[str, Any], str]] = [
    ({"d2t": GOOD["d2t"]}, {"draft_vocab_size": 7}, "has 6 numbers, but draft_vocab_size is 7"),
    ({"d2t": GOOD["d2t"].float()}, {}, "d2t is F32 .*expected a list of whole numbers"),
    ({"d2t": GOOD["d2t"][None]}, {}, "d2t is I64"),
    ({"d2t": GOOD["d2t"][:0]}, {}, "d2t leads outside"),
    ({"d2t": GOOD["d2t"] + 1}, {}, "d2t leads outside the vocabulary's 96 tokens"),
    ({"d2t": GOOD["d2t"] - 4}, {}, "d2t leads outside"),
    ({"d2t": torch.tensor([2**63 - 1, 0])}, {}, "d2t leads outside"),
    ({"d2t": torch.tensor([-(2**63), 0])}, {}, "d2t leads outside"),
    ({"d2t": torch.tensor([1, 0, 1])}, {}, "d2t leads to the same token twice"),
    ({**GOOD, "t2d": ~GOOD["t2d"]}, {}, "t2d marks other tokens than d2t"),
    ({**GOOD, "t2d": GOOD["t2d"][:90]}, {}, r"t2d is BOOL \[90\], expected BOOL \[96\]"),
    ({**GOOD, "t2d": GOOD["t2d"].to(torch.int64)}, {}, "t2d is I64"),
    ({"t2d": GOOD["t2d"]}, {}, "t2d is there but no d2t"),
    ({**GOOD, HEAD: torch.ones(VOCAB, 64)}, {}, r"lm_head.weight has shape \[96, 64\]"),
    ({**GOOD, HEAD: torch.ones(5, 64)}, {}, r"shape \[5, 64\], but the config makes it \[6, 64\]"),
]  # fmt: skip


@pytest.mark.parametrize(("extra", "changes", "message"), BAD)
def test_tables_that_contradict_are_refused_by_name(
    tmp_path: Path, extra: dict[str, torch.Tensor], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadTensor, match=message) as caught:
        open_drafter(save(tmp_path, extra, **changes))
    assert str(tmp_path / "model.safetensors") in caught.value.message


@pytest.fixture
def target(tmp_path: Path) -> Path:
    save_hf(tmp_path / "target", "qwen3", num_hidden_layers=3)
    return tmp_path / "target"


def test_a_head_of_the_targets_rows(tmp_path: Path, target: Path) -> None:
    drafter = save(tmp_path / "d", tables(IDS), draft_vocab_size=len(IDS))
    pair = read_pair(target, drafter)
    weights = pair.weights()
    name = "drafter.lm_head.weight"
    assert weights.canonical(name) == name
    assert name in weights.names()
    assert weights.info(name).shape == (len(IDS), 64)
    wanted = weights.read("target.lm_head.weight")[IDS]
    np.testing.assert_array_equal(weights.read(name), wanted)
    np.testing.assert_array_equal(weights.read_rows(name, 2, 5), wanted[2:5])
    assert weights.canonical("drafter.embed_tokens.weight") == "target.embed_tokens.weight"


def test_a_head_of_its_own(tmp_path: Path, target: Path) -> None:
    own = torch.randn(len(IDS), 64)
    drafter = save(tmp_path / "d", tables(IDS) | {HEAD: own}, draft_vocab_size=len(IDS))
    weights = read_pair(target, drafter).weights()
    np.testing.assert_array_equal(weights.read("drafter.lm_head.weight"), own.numpy())


def test_a_head_of_some_tokens_need_not_count_the_padding_of_the_vocabulary(
    tmp_path: Path, target: Path
) -> None:
    own = {HEAD: torch.randn(len(IDS), 64)}
    for vocab_size in (97, 128):
        extra = tables(IDS) | own
        del extra["t2d"]
        drafter = save(tmp_path / f"d{vocab_size}", extra, vocab_size=vocab_size)
        pair = read_pair(target, drafter)
        assert pair.config.drafter.vocab_size == VOCAB
        (remark,) = (warning for warning in pair.warnings if "padding" in warning)
        assert remark.endswith("it uses the target's embedding")
    extra = {"d2t": torch.tensor([95, 95])} | {HEAD: torch.randn(2, 64)}
    with pytest.raises(PairMismatch, match="has token 96, the target 96 tokens"):
        read_pair(target, save(tmp_path / "d", extra, vocab_size=128))


def test_a_head_of_chosen_rows(tmp_path: Path, target: Path) -> None:
    file = tmp_path / "ids.json"
    file.write_text(json.dumps(IDS))
    own = torch.randn(VOCAB, 64)
    for extra, at in (({}, "target.lm_head.weight"), ({HEAD: own}, None)):
        drafter = save(tmp_path / f"d{at}", extra)
        pair = read_pair(target, drafter, file)
        assert pair.config.drafter.draft_vocab_size == len(IDS)
        assert pair.draft_ids is not None
        assert pair.draft_ids.tolist() == IDS
        weights = pair.weights()
        wanted = own.numpy() if at is None else weights.read(at)
        np.testing.assert_array_equal(weights.read("drafter.lm_head.weight"), wanted[IDS])


def test_one_vocabulary_is_enough(tmp_path: Path, target: Path) -> None:
    file = tmp_path / "ids.json"
    file.write_text(json.dumps(IDS))
    drafter = save(tmp_path / "d", tables(IDS), draft_vocab_size=len(IDS))
    with pytest.raises(ConfigError, match="has a draft vocabulary of its own: 6 tokens"):
        read_pair(target, drafter, file)


def test_facts_alone_may_have_a_draft_vocabulary(tmp_path: Path, target: Path) -> None:
    drafter = save(tmp_path / "d", tables(IDS), draft_vocab_size=len(IDS))
    (drafter / "model.safetensors").unlink()
    assert read_facts(target, drafter).drafter.draft_vocab_size == len(IDS)


def test_chosen_ids_are_sorted(tmp_path: Path) -> None:
    file = tmp_path / "ids.json"
    file.write_text("[7, 2, 90]")
    assert read_ids(file, VOCAB).tolist() == [2, 7, 90]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", r"is \[\], expected a list of token ids"),
        ("{}", "expected a list of token ids"),
        ("7", "expected a list of token ids"),
        ("[1, 96]", "96 is no token of the target, which has 0..95"),
        ("[-1]", "-1 is no token"),
        ("[1.0]", "1.0 is no token"),
        ("[true]", "True is no token"),
        ('["1"]', "'1' is no token"),
        ("[1, 2, 1, 2]", "names 2 tokens twice"),
        ("[1,", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("[1" + "0" * 5000 + "]", "is no token|is not valid JSON"),
        ("\x80\x04K\x01.", "is not valid JSON"),
    ],
)
def test_files_that_are_no_vocabulary(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "ids.json"
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(DFlashError, match=message) as caught:
        read_ids(file, VOCAB)
    assert str(file) in caught.value.message
    assert "\n" not in caught.value.message


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(CheckpointError, match="is not a file"):
            read_ids(place, VOCAB)
    for place in (tmp_path / "none.json", Path("a\0b")):
        with pytest.raises(CheckpointError, match="no such file") as caught:
            read_ids(place, VOCAB)
        assert "draft-vocab" in caught.value.hint
        assert caught.value.message.isprintable()


def test_a_large_number_in_a_config_takes_no_memory(tmp_path: Path) -> None:
    folder = save(tmp_path, {"d2t": tables(IDS)["d2t"]}, vocab_size=2**31 - 1)
    tracemalloc.start()
    drafter = open_drafter(folder)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert drafter.draft_ids is not None
    assert drafter.draft_ids.tolist() == IDS
    assert peak < 50e6


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return open_target(save_gguf(tmp_path_factory.mktemp("q") / "q.gguf", kind="Q4_1")).source


@settings(deadline=None, max_examples=40)
@given(
    ids=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30, unique=True), data=st.data()
)
def test_chosen_rows_are_rows_in_every_form(quantized: Any, ids: list[int], data: Any) -> None:
    stored = "model.embed_tokens.weight"
    rows = ChosenRows(quantized, stored, HEAD, np.array(ids, np.int32))
    wanted = quantized.read(stored)[ids]
    np.testing.assert_array_equal(rows.read(HEAD), wanted)
    start = data.draw(st.integers(0, len(ids)))
    stop = data.draw(st.integers(start, len(ids)))
    np.testing.assert_array_equal(rows.read_rows(HEAD, start, stop), wanted[start:stop])
    assert rows.info(HEAD).shape == wanted.shape
    mine, whole = rows.q4_blocks(HEAD), quantized.q4_blocks(stored)
    np.testing.assert_array_equal(mine.codes, whole.codes[ids])
    np.testing.assert_array_equal(mine.scales, whole.scales[ids])
    np.testing.assert_array_equal(mine.offsets, whole.offsets[ids])
    with pytest.raises(BadTensor, match="cannot be read"):
        rows.read_rows(HEAD, 0, len(ids) + 1)
