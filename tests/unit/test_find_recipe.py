"""Whose name a recipe's name is, where a folder has it too."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from dflash_trt.build.recipe import find_recipe


def test_a_recipe_wins_over_what_is_here_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    found = find_recipe("qwen3-4b")
    assert found is not None
    assert not caplog.records
    (tmp_path / "qwen3-4b").mkdir()
    with caplog.at_level(logging.WARNING):
        assert find_recipe("qwen3-4b") == found
    (record,) = caplog.records
    assert "qwen3-4b: the recipe of this name is meant" in record.getMessage()
    assert "./qwen3-4b" in record.getMessage()
    assert find_recipe("./qwen3-4b") is None
    assert len(caplog.records) == 1
