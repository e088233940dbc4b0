"""The engine directory under hostile edits, full disks and killed builds."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from dflash_trt.build.pipeline import build, plan
from dflash_trt.decode.engine import Engine
from dflash_trt.decode.request import SamplingParams
from dflash_trt.decode.stored_costs import STORED_AS
from dflash_trt.engine_dir import open_engine
from dflash_trt.errors import BuildError, EngineDirError
from dflash_trt.lower import onnx_weights
from tiny import EngineMaker, TinyEngine, TinyPair, build_engine, sign

FILES = [
    "config.json", "manifest.json", "step.onnx", "weights.bin", "tokenizer.json",
    "tokenizer_config.json",
]  # fmt: skip


@pytest.fixture
def folder(engine: TinyEngine, tmp_path: Path) -> Path:
    """A copy of an engine to spoil."""
    return Path(shutil.copytree(engine.directory.path, tmp_path / "spoiled"))


def refused(folder: Path, *words: str) -> None:
    """Opening and loading both fail with one line that has these words."""
    for action in (open_engine, Engine.load):
        with pytest.raises(EngineDirError) as caught:
            action(folder)
        assert "\n" not in caught.value.message
        for word in words:
            assert word in caught.value.message


def edit(file: Path, change: Callable[[Any], Any]) -> None:
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))


def test_the_engine_has_these_files_and_opens(engine: TinyEngine) -> None:
    # What another test measured there is no part of the engine.
    names = {p.name for p in engine.directory.path.iterdir()} - {STORED_AS}
    assert names == set(FILES)
    opened = open_engine(engine.directory.path)
    assert opened.config == engine.directory.config
    assert set(opened.manifest["files"]) == set(FILES) - {"manifest.json"}


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(name: str, folder: Path) -> None:
    (folder / name).unlink()
    refused(folder, name)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("keep", [0, 1, -1])
def test_a_truncated_file_is_named(name: str, keep: int, folder: Path) -> None:
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: keep if keep >= 0 else len(content) // 2])
    refused(folder, name)


@pytest.mark.parametrize("name", [n for n in FILES if n != "manifest.json"])
def test_an_altered_byte_is_named_although_the_size_is_right(name: str, folder: Path) -> None:
    content = bytearray((folder / name).read_bytes())
    at = content.index(b"4") if name == "config.json" else len(content) // 2
    content[at] = ord("5") if name == "config.json" else content[at] ^ 1
    (folder / name).write_bytes(content)
    refused(folder, name)


@pytest.mark.parametrize("name", FILES)
def test_a_folder_or_a_dangling_link_in_place_of_a_file_is_refused(name: str, folder: Path) -> None:
    (folder / name).unlink()
    (folder / name).mkdir()
    refused(folder, name)
    (folder / name).rmdir()
    (folder / name).symlink_to(folder / "nowhere")
    refused(folder, name)


@pytest.mark.parametrize("content", ["[]", "null", "{", "", "\x00", "[" * 100_000, "3", '"x"'])
@pytest.mark.parametrize("name", ["config.json", "manifest.json"])
def test_a_file_that_is_no_json_object_is_refused(name: str, content: str, folder: Path) -> None:
    (folder / name).write_text(content)
    refused(folder, name)


@pytest.mark.parametrize(
    "name",
    ["../secret", "..", ".", "", "/etc/passwd", "a/../../secret", "./step.onnx", "a//b", "nul\0",
     "a/b/c", "step.onnx/"],
)  # fmt: skip
def test_a_manifest_cannot_name_a_file_outside_of_the_engine(name: str, folder: Path) -> None:
    secret = folder.parent / "secret"
    secret.write_bytes(b"s")
    sums = {"bytes": 1, "sha256": hashlib.sha256(b"s").hexdigest()}
    edit(folder / "manifest.json", lambda data: data["files"].update({name: sums}))
    refused(folder)


@pytest.mark.parametrize("entry", [None, [], "x", 3, {}, {"bytes": "4"}, {"bytes": None}])
def test_a_manifest_entry_without_a_sum_is_refused(entry: object, folder: Path) -> None:
    edit(folder / "manifest.json", lambda data: data["files"].update({"weights.bin": entry}))
    refused(folder, "weights.bin")


@pytest.mark.parametrize("name", ["config.json", "step.onnx", "weights.bin"])
def test_a_manifest_that_leaves_out_a_needed_file_is_refused(name: str, folder: Path) -> None:
    edit(folder / "manifest.json", lambda data: data["files"].pop(name))
    refused(folder, "manifest.json", name)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "format": lambda c: c.update(format="other"),
    "format-version-before": lambda c: c.update(format_version=1),
    "format-version-as-text": lambda c: c.update(format_version="2"),
    "backend": lambda c: c.update(backend="tensorrt"),
    "backend-list": lambda c: c.update(backend=["onnxruntime"]),
    "no-choices": lambda c: c.pop("choices"),
    "null-choices": lambda c: c.update(choices=None),
    "unknown-choice": lambda c: c["choices"].update(turbo=True),
    "block-1": lambda c: c["choices"].update(block=1),
    "block-as-text": lambda c: c["choices"].update(block="4"),
    "precision": lambda c: c["choices"].update(precision="fp4"),
    "precision-list": lambda c: c["choices"].update(precision=[]),
    "slots": lambda c: c["choices"].update(max_slots=10**9),
    "text-for-a-pair": lambda c: c.update(pair="abc"),
    "text-for-a-target": lambda c: c["pair"].update(target="abc"),
    "missing-fact": lambda c: c["pair"]["target"].pop("vocab_size"),
    "unknown-fact": lambda c: c["pair"]["drafter"].update(colour="red"),
    "fact-as-text": lambda c: c["pair"]["target"].update(vocab_size="160"),
    "fact-as-float": lambda c: c["pair"]["target"].update(hidden_size=48.5),
    "fact-as-boolean": lambda c: c["pair"]["drafter"].update(block_size=True),
    "null-ids": lambda c: c["pair"]["target"].update(eos_token_ids=None),
    "ids-as-text": lambda c: c["pair"]["drafter"].update(target_layer_ids="02"),
    "no-kv-heads": lambda c: c["pair"]["target"]["attention"].update(num_kv_heads=0),
    "heads-as-text": lambda c: c["pair"]["target"]["attention"].update(num_heads="4"),
    "more-heads-than-the-graph": lambda c: c["pair"]["target"]["attention"].update(
        num_kv_heads=4
    ),
    "other-head-dim": lambda c: c["pair"]["drafter"]["attention"].update(head_dim=18),
    "rope-kind": lambda c: c["pair"]["target"]["attention"]["rope"].update(kind="spiral"),
    "rope-params-as-text": lambda c: c["pair"]["target"]["attention"]["rope"].update(params="x"),
    "a-layer-less": lambda c: c["pair"]["target"].update(num_layers=3),
    "billions-of-layers": lambda c: c["pair"]["target"].update(num_layers=10**9),
    "a-mask-less": lambda c: c["pair"]["drafter"]["masks"].pop(),
    "mask-as-text": lambda c: c["pair"]["drafter"].update(masks=["full", "full"]),
    "window-as-text": lambda c: c["pair"]["drafter"]["masks"][0].update(window="5"),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_wrong_config_fields_are_refused_even_with_a_matching_manifest(
    change: str, folder: Path
) -> None:
    edit(folder / "config.json", CHANGES[change])
    sign(folder, "config.json")
    with pytest.raises(EngineDirError) as caught:
        Engine.load(folder)
    assert "\n" not in caught.value.message
    assert "config.json" in caught.value.message or "step.onnx" in caught.value.message


@pytest.mark.parametrize("content", [b"", b"not a model", b"\x08\x0b"])
def test_a_model_that_is_none_is_refused_even_with_a_matching_manifest(
    content: bytes, folder: Path
) -> None:
    (folder / "step.onnx").write_bytes(content)
    sign(folder, "step.onnx")
    with pytest.raises(EngineDirError, match=r"step\.onnx") as caught:
        Engine.load(folder)
    assert "\n" not in caught.value.message


def test_the_step_graph_of_another_pair_is_refused(
    folder: Path, make_pair: Any, make_engine: EngineMaker
) -> None:
    other = make_engine(make_pair(target={"num_hidden_layers": 5}))
    for name in ("step.onnx", "weights.bin"):
        shutil.copy(other.directory.path / name, folder / name)
        sign(folder, name)
    with pytest.raises(EngineDirError, match=r"step\.onnx"):
        Engine.load(folder)


@pytest.mark.parametrize("kind", ["absent", "file", "empty folder"])
def test_what_is_no_engine_at_all_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "thing"
    if kind == "file":
        path.write_text("x")
    elif kind == "empty folder":
        path.mkdir()
    refused(path, "thing")


def test_an_engine_runs_from_any_working_directory_and_after_a_move(
    folder: Path, engine: TinyEngine, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = engine.generate(prompts[0], 10).token_ids
    moved = folder.rename(folder.parent / "moved")
    for where, name in ((folder.parent, "moved"), (moved, "."), (Path("/"), str(moved))):
        monkeypatch.chdir(where)
        loaded = Engine.load(Path(name), num_threads=1)
        made = loaded.generate(prompts[0], SamplingParams(max_tokens=10, ignore_eos=True))
        assert made.token_ids == wanted


def test_named_chat_templates_of_a_tokenizer_survive_the_build(
    pair: TinyPair, tmp_path: Path
) -> None:
    target = shutil.copytree(pair.target_dir, tmp_path / "target")
    listed = [{"name": n, "template": n + " {{ messages }}"} for n in ("default", "tool_use")]
    (target / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed}))
    made = build_engine(
        TinyPair(pair.target, pair.drafter, target, pair.drafter_dir), tmp_path / "engine"
    )
    template = made.directory.path / "additional_chat_templates" / "tool_use.jinja"
    assert template.read_text().startswith("tool_use")
    assert Engine.load(made.directory.path, num_threads=1).tokenizer.has_chat_template
    template.write_text("changed")
    refused(made.directory.path, "tool_use.jinja")


def leftovers(parent: Path) -> list[str]:
    return sorted(path.name for path in parent.iterdir())


def quiet(stage: str, done: int, total: int) -> None:
    """No progress."""


class FullDisk:
    """A file that takes some bytes and then says that the disk is full."""

    def __init__(self, file: BinaryIO, room: int) -> None:
        self._file, self._room = file, room

    def tell(self) -> int:
        return self._file.tell()

    def write(self, data: Any) -> int:
        self._room -= len(data)
        if self._room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._file.write(data)


@pytest.fixture(params=["weights", "weights-later", "model", "manifest", "sync", "rename"])
def failing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A build that fails at one place."""

    def full(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    where: str = request.param
    if where.startswith("weights"):
        room = 0 if where == "weights" else 50_000
        start = onnx_weights.OnnxWeights.__init__

        def init(self: Any, reader: Any, data: BinaryIO, *rest: Any) -> None:
            start(self, reader, FullDisk(data, room), *rest)  # type: ignore[arg-type]

        monkeypatch.setattr(onnx_weights.OnnxWeights, "__init__", init)
    elif where in ("model", "manifest"):
        write_bytes = Path.write_bytes
        name = {"model": "step.onnx", "manifest": "manifest.json"}[where]
        monkeypatch.setattr(
            Path, "write_bytes",
            lambda self, data: full() if self.name == name else write_bytes(self, data),
        )  # fmt: skip
    elif where == "sync":
        monkeypatch.setattr(os, "fsync", full)
    else:
        rename = Path.rename
        monkeypatch.setattr(
            Path, "rename",
            lambda self, to: full() if ".building-" in str(self) else rename(self, to),
        )  # fmt: skip
    return


@pytest.mark.usefixtures("failing")
def test_a_build_on_a_full_disk_fails_in_one_line_and_leaves_nothing(
    pair: TinyPair, tmp_path: Path
) -> None:
    planned = plan(str(pair.target_dir), str(pair.drafter_dir), {"max_seq_len": 32})
    parent = tmp_path / "engines"
    with pytest.raises(BuildError, match="No space left") as caught:
        build(planned, parent / "new", force=False, progress=quiet)
    assert "\n" not in caught.value.message
    assert leftovers(parent) == []


@pytest.mark.usefixtures("failing")
def test_a_forced_build_that_fails_keeps_the_old_engine(
    pair: TinyPair, folder: Path, engine: TinyEngine
) -> None:
    planned = plan(str(pair.target_dir), str(pair.drafter_dir), {"max_seq_len": 32})
    before = leftovers(folder.parent)
    with pytest.raises(BuildError):
        build(planned, folder, force=True, progress=quiet)
    assert leftovers(folder.parent) == before
    assert open_engine(folder).config == engine.directory.config


def test_force_replaces_an_engine_and_nothing_else(pair: TinyPair, folder: Path) -> None:
    planned = plan(str(pair.target_dir), str(pair.drafter_dir), {"max_seq_len": 32})
    with pytest.raises(BuildError, match="exists"):
        build(planned, folder, force=False, progress=quiet)
    build(planned, folder, force=True, progress=quiet)
    assert open_engine(folder).config.choices.max_seq_len == 32
    assert leftovers(folder.parent) == [folder.name]
    papers = folder.parent / "papers"
    papers.mkdir()
    (papers / "thesis.txt").write_text("years of work")
    with pytest.raises(BuildError, match="not an engine"):
        build(planned, papers, force=True, progress=quiet)
    assert (papers / "thesis.txt").read_text() == "years of work"


def test_what_a_killed_build_set_aside_replaces_nothing_of_others(
    pair: TinyPair, folder: Path
) -> None:
    planned = plan(str(pair.target_dir), str(pair.drafter_dir), {"max_seq_len": 32})
    aside = folder.parent / f".{folder.name}.replaced-1"
    aside.mkdir()
    folder.rename(aside / folder.name)
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    with pytest.raises(BuildError, match="not an engine"):
        build(planned, folder, force=True, progress=quiet)
    assert (folder / "thesis.txt").read_text() == "years of work"
    open_engine(aside / folder.name)


def test_force_on_a_link_replaces_the_engine_that_it_points_to(
    pair: TinyPair, folder: Path
) -> None:
    planned = plan(str(pair.target_dir), str(pair.drafter_dir), {"max_seq_len": 32})
    link = folder.parent / "current"
    link.symlink_to(folder.name)
    with pytest.raises(BuildError, match="exists"):
        build(planned, link, force=False, progress=quiet)
    build(planned, link, force=True, progress=quiet)
    assert link.is_symlink()
    assert open_engine(folder).config.choices.max_seq_len == 32
    assert leftovers(folder.parent) == sorted([folder.name, link.name])


def test_a_build_to_a_link_to_nowhere_makes_what_it_points_to(
    pair: TinyPair, tmp_path: Path
) -> None:
    planned = plan(str(pair.target_dir), str(pair.drafter_dir), {"max_seq_len": 32})
    (tmp_path / "current").symlink_to("first")
    build(planned, tmp_path / "current", force=False, progress=quiet)
    open_engine(tmp_path / "first")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(BuildError, match="loop"):
        build(planned, tmp_path / "loop", force=False, progress=quiet)
    assert leftovers(tmp_path) == ["current", "first", "loop"]
