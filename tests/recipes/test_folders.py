"""responses.py on a small target: it goes on in its folder, and in no folder of other texts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import responses
import torch
from command import alone
from origin import Origin
from scripts import Script, Source, read_scripts, write_scripts
from shards import PREFIX, read_shards, write_file
from target import DTYPE, read_facts

from dflash_trt.errors import CheckpointError

SIZES = ("--slots=2", "--workers=1", "--threads=1", "--max-tokens=40", "--user=8", "--answer=8")
Respond = Callable[..., None]


def a_file(file: Path, target: Path | str, count: int, first: int = 30, seed: int = 0) -> Path:
    rows = [Script(i, (first + i, 9), i % 2 == 0, 0.0) for i in range(count)]
    write_scripts(file, Source(str(target), seed), rows)
    return file


@pytest.fixture
def respond(monkeypatch: pytest.MonkeyPatch) -> Respond:
    """What responses.py does with some arguments."""

    def call(*arguments: object) -> None:
        monkeypatch.setattr("sys.argv", ["responses.py", *map(str, arguments), *SIZES])
        responses.main()

    return call


@pytest.mark.slow
def test_a_folder_is_of_one_target_seed_and_choice_of_features(
    respond: Respond, target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data"
    respond(a_file(tmp_path / "3", target_folder, 3), "-o", data, "--features=0,2")
    assert Origin.read(data) == Origin(str(target_folder), (0, 2), 0)
    more = a_file(tmp_path / "5", target_folder, 5)
    respond(more, "-o", data, "--features=0,2")
    texts = list(read_shards(data))
    assert sorted(text.script for text in texts) == [0, 1, 2, 3, 4]
    assert {text.features.shape[1] for text in texts} == {2 * 48}

    others = a_file(tmp_path / "others", target_folder, 5, first=50)
    again = a_file(tmp_path / "again", target_folder, 5, seed=1)
    demo = a_file(tmp_path / "demo", "smollm2-135m", 5)
    for arguments, said in (
        ((more, "--features=2"), "target_layer_ids (0, 2), not (1, 3)"),
        ((again, "--features=0,2"), "seed 0, not 1"),
        ((demo, "--features=0,2"), f"target {target_folder}, not smollm2-135m"),
        ((others, "--features=0,2"), "has texts of other scripts"),
    ):
        capsys.readouterr()
        with pytest.raises(SystemExit):
            respond(*arguments, "-o", data)
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line


def test_a_shard_that_is_not_whole_is_named(tmp_path: Path) -> None:
    file = tmp_path / "shard-00-000000-000001.safetensors"
    for content in (b"", b"\x10", b"\xff" * 64):
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"000001\.safetensors: is no whole shard"):
            list(read_shards(tmp_path))


def test_a_second_run_in_a_folder_is_kept_out(
    respond: Respond, target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, file = tmp_path / "data", a_file(tmp_path / "2", target_folder, 2)
    data.mkdir()
    with alone(data), pytest.raises(SystemExit):
        respond(file, "-o", data, "--features=0,2")
    assert "another run is at work" in capsys.readouterr().err
    with alone(data):  # whoever held it has let go
        pass


def test_a_file_without_scripts_is_said(
    respond: Respond, target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        respond(a_file(tmp_path / "0", target_folder, 0), "-o", tmp_path / "a")
    assert "has no scripts" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"target": "a"}', '{"target": "a", "seed": 0}\n{"id": 3}']
)
def test_a_file_that_is_none_of_scripts_is_named(text: str, tmp_path: Path) -> None:
    file = tmp_path / "scripts.jsonl"
    file.write_text(text)
    with pytest.raises(CheckpointError, match="jsonl: is not what scripts"):
        read_scripts(file)


@pytest.mark.parametrize("text", ["", "{", "{}", "[]", '{"target": "a", "seed": 0}'])
def test_an_origin_that_says_nothing_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "texts.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"texts\.json: does not say"):
        Origin.read(tmp_path)


def test_a_file_of_something_else_is_no_shard(tmp_path: Path) -> None:
    write_file(tmp_path / "shard-x.safetensors", {"tokens": torch.zeros(3)})
    with pytest.raises(CheckpointError, match="is no shard of texts"):
        list(read_shards(tmp_path))


def test_texts_go_on_behind_the_prefix_of_the_first(target_folder: Path, tmp_path: Path) -> None:
    """A chat template may write the date."""
    today = responses.find_chat(target_folder, tmp_path)
    write_file(tmp_path / PREFIX, {"tokens": torch.tensor([3, 4, 5])})
    chat = responses.find_chat(target_folder, tmp_path)
    assert chat.before == (3, 4, 5, today.before[-1])
    assert (chat.after, chat.ends) == (today.after, today.ends)


def test_as_many_slots_as_memory_has_room_for(
    target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = read_facts(target_folder)
    assert responses.slots_that_fit(facts, 320) == 128
    size = 2 * 6 * 2 * 8 * 320 * DTYPE.itemsize  # layers, heads, their width
    monkeypatch.setattr(responses, "RING_BYTES", 10 * size)
    assert responses.slots_that_fit(facts, 320) == 10
    assert responses.slots_that_fit(facts, 320_000) == 1


def test_texts_of_unknown_origin_are_refused(tmp_path: Path) -> None:
    (tmp_path / "shard-00-000000-000001.safetensors").write_bytes(b"")
    with pytest.raises(SystemExit):
        Origin("smollm2-135m", (1, 2), 0).keep(tmp_path)
