"""Whose name a recipe's name is, where a folder has it too."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_trt.build.recipe import find_recipe, remarks


def test_a_recipe_wins_over_what_is_here_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = find_recipe("qwen3-4b")
    assert found is not None
    assert remarks("qwen3-4b") == []
    (tmp_path / "qwen3-4b").mkdir()
    assert find_recipe("qwen3-4b") == found
    assert remarks("qwen3-4b") == [
        "qwen3-4b: the recipe is meant, not what is here; write ./qwen3-4b for that"
    ]
    assert find_recipe("./qwen3-4b") is None
    assert remarks("./qwen3-4b") == []
