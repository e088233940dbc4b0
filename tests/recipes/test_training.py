"""Batches, loss and the whole of train.py, against the `dflash` package and plain softmax."""

from __future__ import annotations

import json
import random
from argparse import Namespace
from pathlib import Path
from typing import Any

import batches
import drafter as drafters
import pytest
import target as targets
import torch
import train
from dflash.model import DFlashDraftModel
from origin import Origin
from responses import Writer
from scripts import Script
from shards import PREFIX, Text, read_shards, write_file, write_shard
from target import ChatFormat
from task import make_task
from torch.nn.functional import embedding

from dflash_trt.checkpoint.pair import read_pair
from dflash_trt.errors import DFlashError
from tiny import save_drafter, save_target
from tiny.models import add_draft_vocabulary

CHAT = ChatFormat(before=(1, 7, 9, 11), after=(2, 12, 13), ends=frozenset({2}))
LAYERS, MASK, BLOCK = (0, 2, 4), 5, 4


@pytest.fixture
def data(target: Any, target_folder: Path, options: Namespace, tmp_path: Path) -> Path:
    """A folder of 60 texts as responses.py leaves it."""
    waiting = [Script(i, (20 + i % 40, 30), False, 0.0) for i in range(60)]
    folder = tmp_path / "data"
    Origin(str(target_folder), LAYERS, seed=0).keep(folder)
    texts: list[Text] = []
    with torch.inference_mode():
        writer = Writer(target, CHAT, LAYERS, options, seed=0)
        while waiting or any(writer.slots):
            writer.fill(waiting)
            texts += writer.step()
    target.set_attn_implementation("sdpa")
    prefix = {"tokens": torch.tensor(CHAT.before[:-1]), "features": writer.prefix_features}
    write_file(folder / PREFIX, prefix)
    write_shard(folder / "shard-00-0-59.safetensors", texts)
    return folder


@pytest.fixture
def drafter(target: Any, data: Path) -> DFlashDraftModel:
    shape = drafters.Shape(LAYERS, layers=2, block=BLOCK, intermediate=96)
    config = drafters.make_config(target.config, shape, MASK)
    features = torch.cat([text.features for text in read_shards(data)])
    torch.manual_seed(0)
    return drafters.from_target(config, target, features).eval()


def a_batch(data: Path, width: int | None = None) -> tuple[batches.Batch, list[Text]]:
    texts = list(read_shards(data))[:3]
    maker = batches.Batches(data, BLOCK, anchors=5, mask_token_id=MASK)
    return maker.batch(texts, random.Random(0), width), texts


@pytest.mark.parametrize(("width", "anchors"), [(BLOCK, 5), (BLOCK // 2, 10)])
def test_a_block_sees_what_it_would_when_decoding(
    target: Any, data: Path, drafter: DFlashDraftModel, width: int, anchors: int
) -> None:
    """Every anchor's rows in the batch equal a forward of that block alone, with no mask."""
    batch, texts = a_batch(data, width)
    head = train.Head(target)
    with torch.no_grad():
        found = train.draft(drafter, head, batch)
    size = batch.features.shape[1]
    starts = batch.positions[:, size::width]
    for i in range(len(texts)):
        for a in range(anchors):
            start = int(starts[i, a])
            block = batch.blocks[i].view(anchors, width)[a]
            assert block.tolist()[1:] == [MASK] * (width - 1)
            tokens = [*CHAT.before[:-1], *texts[i].tokens.tolist()]
            assert int(block[0]) == tokens[start]
            with torch.no_grad():
                alone = drafter(
                    position_ids=torch.arange(start + width)[None],
                    noise_embedding=embedding(block, head.embedding)[None],
                    target_hidden=batch.features[i : i + 1, :start].float(),
                )[0, 1:]
            torch.testing.assert_close(found[i, a], alone, atol=1e-5, rtol=1e-4)


def test_labels_are_the_tokens_that_follow_the_anchor(data: Path) -> None:
    batch, texts = a_batch(data)
    size = batch.features.shape[1]
    real = batch.label_probs.sum(-1) > 0
    for i, text in enumerate(texts):
        tokens = text.tokens.tolist()
        for a, start in enumerate(batch.positions[i, size::BLOCK].tolist()):
            at = start - (len(CHAT.before) - 1)
            for k in range(BLOCK - 1):
                assert bool(real[i, a, k]) == (at + k < len(tokens))
                if text.answer_start <= at + k + 1 < len(tokens):  # greedy there
                    assert int(batch.label_ids[i, a, k, 0]) == tokens[at + k + 1]


def test_loss_is_the_cross_entropy_over_the_whole_vocabulary(
    target: Any, data: Path, drafter: DFlashDraftModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With so many other tokens drawn that all are."""
    monkeypatch.setattr(train, "OTHERS", 20_000)
    batch, _ = a_batch(data)
    head = train.Head(target)
    weights = train.row_weights(BLOCK)
    with torch.no_grad():
        hidden = train.draft(drafter, head, batch)
        found = train.loss_of(hidden, head, batch, weights)
    logprobs = (hidden @ head.output.T).log_softmax(-1)
    wanted, total = 0.0, 0.0
    for i, a, k in torch.ones(batch.label_probs.shape[:3]).nonzero().tolist():
        probs = batch.label_probs[i, a, k]
        if probs.sum() > 0:
            picked = logprobs[i, a, k, batch.label_ids[i, a, k]]
            wanted += float(-(probs / probs.sum() * picked).sum()) * float(weights[k])
            total += float(weights[k])
    assert float(found) == pytest.approx(wanted / total, rel=1e-4)


def options_of_training(data: Path, output: Path, **changes: Any) -> Namespace:
    output.mkdir(exist_ok=True)
    defaults = {
        "data": data, "output": output, "features": None, "mask_token": str(MASK),
        "init": "target", "minutes": 1, "steps": 80,
        "block": BLOCK, "widths": None, "layers": 2, "intermediate": None,
        "anchors": 6, "texts": 6, "lr": 3e-3, "weight_decay": 0.0,
        "every": 10**9, "seed": 0, "workers": 1, "threads": 1,
    }  # fmt: skip
    return Namespace(**(defaults | changes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_learns_and_what_it_saves_is_a_drafter(
    data: Path, target_folder: Path, tmp_path: Path, dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for module in (train, targets):
        monkeypatch.setattr(module, "DTYPE", dtype)
    output = tmp_path / "drafter"
    train.work(0, options_of_training(data, output, steps=1))
    before = json.loads((output / "curve.json").read_text())[-1]
    train.work(0, options_of_training(data, output))
    after = json.loads((output / "curve.json").read_text())[-1]
    assert after["loss"] < before["loss"] - 1
    assert 1 <= after["at_width_4"] <= after["acceptance_length"] <= BLOCK

    pair = read_pair(target_folder, output)
    assert pair.config.drafter.block_size == BLOCK
    assert pair.config.drafter.target_layer_ids == LAYERS
    assert pair.config.drafter.mask_token_id == MASK
    again = drafters.load(output)
    theirs = DFlashDraftModel.from_pretrained(output, dtype=torch.float32)
    for name, tensor in again.state_dict().items():
        assert torch.equal(theirs.state_dict()[name], tensor), name


def test_blocks_of_training_may_be_shorter_than_the_drafters(data: Path, tmp_path: Path) -> None:
    def trained(output: Path, widths: list[int] | None) -> dict[str, Any]:
        train.work(0, options_of_training(data, output, steps=3, widths=widths))
        return json.loads((output / "curve.json").read_text())[-1]

    output = tmp_path / "drafter"
    row = trained(output, [BLOCK // 2])
    assert row["anchors"] == 2 * trained(tmp_path / "whole", None)["anchors"]
    assert drafters.load(output).config.block_size == BLOCK
    assert len(row["conditional"]) == BLOCK - 1  # measured at the whole block


def test_a_drafter_may_read_some_of_the_features(
    data: Path, target_folder: Path, tmp_path: Path
) -> None:
    output = tmp_path / "drafter"
    train.work(0, options_of_training(data, output, steps=2, features=(0, 4)))
    assert read_pair(target_folder, output).config.drafter.target_layer_ids == (0, 4)
    texts = list(read_shards(data))[:2]
    columns = Origin.read(data).columns((0, 4), 48)
    batch = batches.Batches(data, BLOCK, 5, MASK, columns).batch(texts, random.Random(0))
    whole = batches.Batches(data, BLOCK, 5, MASK).batch(texts, random.Random(0))
    assert torch.equal(
        batch.features, torch.cat([whole.features[..., :48], whole.features[..., 96:]], -1)
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"features": (0, 3)}, "have features of layers (0, 2, 4), not all of (0, 3)"),
        ({"features": 99}, "too many for 6 layers"),
        ({"features": (0, 5)}, "must ascend and be of 0 to 4"),
        ({"mask_token": None}, "no special token"),
        ({"mask_token": "256"}, "none of the target's 256 tokens"),
        ({"layers": 7}, "--layers 7: target has 6"),
        ({"intermediate": 97}, "--intermediate 97: target has 96"),
        ({"widths": [2, 9]}, "--widths 9 is above the block"),
    ],
)
def test_what_does_not_fit_is_refused(
    data: Path, changes: dict[str, Any], said: str, tmp_path: Path, capsys: Any
) -> None:
    args = options_of_training(data, tmp_path / "drafter", **changes)
    with pytest.raises((DFlashError, SystemExit)) as error:
        make_task(Origin.read(data), args)
    assert said in f"{error.value} {capsys.readouterr().err}"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mask_token": "6"}, "has mask token 5, not 6"),
        ({"features": (2, 4)}, "reads layers (0, 4), not all of (2, 4)"),
        ({"layers": 3}, "has 2 to start from"),
        ({"intermediate": 97}, "has 96 to start from"),
        ({"layers": 1, "output": "start"}, "replaced by a drafter of another shape"),
    ],
)
def test_a_start_has_all_that_is_asked_for(
    data: Path, drafter: DFlashDraftModel, changes: dict[str, Any], said: str, tmp_path: Path,
    capsys: Any,
) -> None:  # fmt: skip
    start = tmp_path / "start"
    drafters.save(drafter, tmp_path / "whole")
    some = drafters.Shape((0, 4), layers=2, block=BLOCK, intermediate=96)
    drafters.save(drafters.load(tmp_path / "whole", some), start)
    origin = Origin.read(data)
    args = options_of_training(data, tmp_path / "drafter", init=str(start), mask_token=None)
    task = make_task(origin, args)
    assert (task.mask_token_id, task.shape) == (MASK, some)
    changes = {**changes, "output": tmp_path / changes.get("output", "drafter")}
    with pytest.raises(SystemExit):
        make_task(origin, Namespace(**(vars(args) | changes)))
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("what", ["draft vocabulary of its own", "DFlash 2's convolutions"])
def test_a_start_with_what_training_leaves_out_is_refused(
    what: str, data: Path, target: Any, tmp_path: Path, capsys: Any
) -> None:
    start = tmp_path / "start"
    is_dflash2 = what.startswith("DFlash")
    save_drafter(start, target, layer_ids=LAYERS, dflash2={} if is_dflash2 else None)
    if not is_dflash2:
        add_draft_vocabulary(start, target, range(9, 200, 3), has_own_head=False)
    args = options_of_training(data, tmp_path / "drafter", init=str(start), mask_token=None)
    capsys.readouterr()
    with pytest.raises(SystemExit):
        make_task(Origin.read(data), args)
    said = capsys.readouterr().err
    assert what in said
    assert "cannot be trained on here" in said
    assert len(said.splitlines()) == 1


def test_a_part_of_a_drafter_is_trained_on(
    data: Path, drafter: DFlashDraftModel, target_folder: Path, tmp_path: Path
) -> None:
    drafters.save(drafter, tmp_path / "start")
    before = (tmp_path / "start/model.safetensors").read_bytes()
    output = tmp_path / "drafter"
    args = options_of_training(
        data, output, init=str(tmp_path / "start"), mask_token=None, block=6,
        steps=3, layers=1, intermediate=64, features=(0, 4),
    )  # fmt: skip
    train.work(0, args)
    found = read_pair(target_folder, output).config.drafter
    assert drafters.shape_of(found) == drafters.Shape((0, 4), 1, 6, 64)
    assert (tmp_path / "start/model.safetensors").read_bytes() == before


def test_a_drafter_turns_as_its_target(tmp_path: Path) -> None:
    """The rotary rule goes with the layers that it starts from."""
    rope = {
        "rope_type": "llama3", "rope_theta": 1000.0, "factor": 4.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    }  # fmt: skip
    target = save_target(tmp_path / "target", "llama", rope_parameters=rope)
    shape = drafters.Shape((0, 1), 2, BLOCK, target.config.intermediate_size)
    config = drafters.make_config(target.config, shape, MASK)
    drafter = drafters.from_target(config, target, torch.randn(20, 2 * config.hidden_size))
    drafters.save(drafter, tmp_path / "drafter")
    wanted = target.model.rotary_emb.inv_freq
    for found in (
        drafter,
        drafters.load(tmp_path / "drafter"),
        DFlashDraftModel.from_pretrained(tmp_path / "drafter"),
    ):
        torch.testing.assert_close(found.rotary_emb.inv_freq, wanted)
    pair = read_pair(tmp_path / "target", tmp_path / "drafter").config
    assert pair.drafter.attention.rope == pair.target.attention.rope
