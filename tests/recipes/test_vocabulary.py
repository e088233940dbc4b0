"""vocabulary.py: which tokens it counts, and what it says of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import vocabulary
from origin import Origin
from shards import PREFIX, Text, write_file, write_shard

from dflash_trt.checkpoint.draft_vocab import read_ids


@pytest.fixture
def data(target_folder: Path, tmp_path: Path) -> Path:
    """Texts whose prompts are of token 9 alone."""
    folder = tmp_path / "data"
    folder.mkdir()
    Origin(str(target_folder), (0, 2), 0).keep(folder)
    write_file(folder / PREFIX, {"tokens": torch.zeros(1)})

    def text(script: int, *answer: int) -> Text:
        tokens = torch.tensor([9, 9, 9, *answer], dtype=torch.int32)
        nothing = torch.zeros(len(tokens), 1)
        return Text(script, 3, tokens, nothing, nothing, nothing)

    write_shard(folder / "shard-00-000000-000001.safetensors", [text(0, 40, 41, 40), text(1, 250)])
    write_shard(folder / "shard-00-000002-000002.safetensors", [text(2, 40, 41, 60)])
    return folder


def count(monkeypatch: pytest.MonkeyPatch, data: Path, output: Path, *options: object) -> list[int]:
    command = ["vocabulary.py", data, "-o", output, *options]
    monkeypatch.setattr("sys.argv", list(map(str, command)))
    vocabulary.main()
    ids: list[int] = json.loads(output.read_text())
    return ids


def test_the_answers_are_counted_and_not_the_prompts(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = count(monkeypatch, data, tmp_path / "ids.json", "--size", 4)
    assert {40, 41} <= set(ids)
    assert 9 not in ids
    assert len(read_ids(tmp_path / "ids.json", 256)) == 4
    said = capsys.readouterr().out
    assert "4 of 256 tokens" in said
    assert "of the answers' 7" in said


def test_a_share_of_the_vocabulary_is_the_default(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(count(monkeypatch, data, tmp_path / "ids.json")) == 256 // vocabulary.SHARE
