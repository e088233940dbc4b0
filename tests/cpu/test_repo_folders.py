"""Where `repo` and `serve --repo` write: they replace what is theirs, and nothing of others."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from dflash_trt import swap
from dflash_trt.errors import ConfigError
from dflash_trt.serve import launch
from dflash_trt.serve.launch import Ports, serve_with_triton
from dflash_trt.serve.options import ServeOptions
from dflash_trt.serve.repository import ALIAS, MODEL, write_repository
from dflash_trt.serve.tritonserver import TritonServer
from tiny import TinyEngine

OPTIONS = ServeOptions(engine="/engines/one")


def strangers_file(folder: Path) -> Path:
    (folder / "papers").mkdir()
    (folder / "papers" / "thesis.txt").write_text("years of work")
    return folder / "papers"


def plain_file(folder: Path) -> Path:
    (folder / "notes.txt").write_text("years of work")
    return folder / "notes.txt"


def another_ensemble(folder: Path) -> Path:
    """As NVIDIA's own examples have it."""
    (folder / "repo" / MODEL).mkdir(parents=True)
    (folder / "repo" / MODEL / "config.pbtxt").write_text('name: "ensemble"\n')
    return folder / "repo"


def a_model_beside_ours(folder: Path) -> Path:
    made = write_repository(folder / "repo", OPTIONS)
    (made / "reranker").mkdir()
    (made / "reranker" / "model.py").write_text("years of work")
    return made


OTHERS = [strangers_file, plain_file, another_ensemble, a_model_beside_ours]


def content(path: Path) -> dict[str, bytes]:
    files = [path] if path.is_file() else path.rglob("*")
    return {str(file): file.read_bytes() for file in files if file.is_file()}


@pytest.mark.parametrize("others", OTHERS)
@pytest.mark.parametrize("force", [False, True])
def test_what_is_not_ours_stays(others: Any, force: bool, tmp_path: Path) -> None:
    place = others(tmp_path)
    before = content(place)
    with pytest.raises(ConfigError, match="it is not replaced") as caught:
        write_repository(place, OPTIONS, force=force)
    assert "--force" not in caught.value.hint
    assert content(place) == before
    assert [path.name for path in tmp_path.iterdir()] == [place.name]


def test_an_engine_is_not_replaced(engine: TinyEngine, tmp_path: Path) -> None:
    copy = shutil.copytree(engine.directory.path, tmp_path / "engine")
    before = content(copy)
    with pytest.raises(ConfigError, match="not a model repository"):
        write_repository(copy, OPTIONS, force=True)
    assert content(copy) == before


def test_what_a_server_runs_from_is_not_replaced(tmp_path: Path) -> None:
    made = write_repository(tmp_path / "repo", OPTIONS)
    before = content(made)
    with swap.held(made), pytest.raises(ConfigError, match="of a server that runs"):
        write_repository(made, ServeOptions(engine="/engines/two"), force=True)
    assert content(made) == before
    write_repository(made, ServeOptions(engine="/engines/two"), force=True)
    assert content(made) != before


def test_an_empty_folder_is_filled_when_told_to(tmp_path: Path) -> None:
    (tmp_path / "repo").mkdir()
    with pytest.raises(ConfigError, match="exists already") as caught:
        write_repository(tmp_path / "repo", OPTIONS)
    assert "--force" in caught.value.hint
    made = write_repository(tmp_path / "repo", OPTIONS, force=True)
    assert {path.name for path in made.iterdir()} == {MODEL, ALIAS}


def test_what_a_killed_writer_set_aside_replaces_nothing_of_others(tmp_path: Path) -> None:
    aside = tmp_path / ".papers.replaced-1" / "papers"
    write_repository(aside, OPTIONS)
    place = strangers_file(tmp_path)
    with pytest.raises(ConfigError, match="it is not replaced"):
        write_repository(place, OPTIONS, force=True)
    assert (place / "thesis.txt").read_text() == "years of work"
    assert (aside / MODEL).is_dir()
    shutil.rmtree(place)
    with pytest.raises(ConfigError, match="exists already"):
        write_repository(place, OPTIONS)  # now it came back


def test_a_path_that_is_not_utf8_is_refused_in_one_line(tmp_path: Path) -> None:
    options = ServeOptions(engine=os.fsdecode(b"/engines/\xff"))
    with pytest.raises(ConfigError, match=r"engine is .*UTF-8") as caught:
        write_repository(tmp_path / "repo", options)
    assert "\n" not in caught.value.message
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def serve(engine: TinyEngine, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`serve --repo` up to the point where it would start a tritonserver."""

    class Started:
        def __init__(self, *_: Any) -> None:
            """Take what a supervisor takes."""

        def run(self, _: Any) -> int:
            return 0

    monkeypatch.setattr(launch, "find_tritonserver", lambda: TritonServer(Path("/triton")))
    monkeypatch.setattr(launch, "Supervisor", Started)
    monkeypatch.setattr(launch, "check_ports", lambda *_: None)

    def run(repository: Path, **changes: Any) -> int:
        options = ServeOptions(engine=str(engine.directory.path), **changes)
        return serve_with_triton(options, Ports(), print, repository=repository)

    return run


def test_serve_starts_again_with_its_own_repository(serve: Any, tmp_path: Path) -> None:
    for queue in (5, 6):
        assert serve(tmp_path / "repo", queue=queue) == 0
        text = (tmp_path / "repo" / MODEL / "config.pbtxt").read_text()
        assert f'key: "queue", value: {{ string_value: "{queue}" }}' in text


@pytest.mark.parametrize("others", OTHERS)
def test_serve_replaces_nothing_of_others(others: Any, serve: Any, tmp_path: Path) -> None:
    place = others(tmp_path)
    before = content(place)
    with pytest.raises(ConfigError, match="it is not replaced") as caught:
        serve(place)
    assert "--force" not in caught.value.hint
    assert content(place) == before
