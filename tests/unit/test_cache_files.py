"""Cache files: where they lie, that no two keys share one, and that a lost one does not matter."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from dflash_trt.cache_files import CacheKey, cache_home, read_cache, write_cache


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "dflash-trt"


def test_no_two_keys_share_a_file(home: Path) -> None:
    parts = (("timing", "runtime"), ("a" * 64, "b" * 64), ("sm120", "sm121"), ("1.7.1", "1.7.2"))
    paths = {CacheKey(*key).path for key in itertools.product(*parts)}  # type: ignore[arg-type]
    assert len(paths) == 16
    assert all(path.is_relative_to(home) for path in paths)


@pytest.mark.parametrize("value", ["", "relative/path"])
def test_without_an_absolute_xdg_folder_it_is_the_home(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_home() == tmp_path / ".cache" / "dflash-trt"


@pytest.mark.parametrize("part", ["../x", "a/b", "", "-x"])
def test_a_part_that_leaves_its_folder_is_a_bug(part: str) -> None:
    with pytest.raises(AssertionError):
        CacheKey("timing", "a" * 64, part, "1.7")


def test_what_is_written_is_read_and_nothing_else_stays(home: Path) -> None:
    path = CacheKey("runtime", "a" * 64, "sm120", "1.7").path
    assert read_cache(path) == b""
    for content in (b"one", b"two"):
        assert write_cache(path, content)
        assert read_cache(path) == content
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_folder_that_cannot_be_written_is_no_error(home: Path) -> None:
    path = CacheKey("runtime", "a" * 64, "sm120", "1.7").path
    home.parent.mkdir(exist_ok=True)
    home.write_text("a file where the folder should be")
    assert not write_cache(path, b"content")
    assert read_cache(path) == b""


def test_a_write_that_fails_leaves_the_old_cache(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = CacheKey("runtime", "a" * 64, "sm120", "1.7").path
    write_cache(path, b"old")

    def fail(self: Path, target: Path) -> None:
        raise OSError("full")

    monkeypatch.setattr(Path, "rename", fail)
    assert not write_cache(path, b"new")
    assert read_cache(path) == b"old"
    assert os.listdir(path.parent) == [path.name]
