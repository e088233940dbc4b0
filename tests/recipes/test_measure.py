"""What measure.py reports, from engines of a tiny pair."""

from __future__ import annotations

import json
from pathlib import Path

import measure
import pytest

from tiny import EngineMaker, PairMaker


def test_figures_are_the_engines_own(
    make_pair: PairMaker,
    make_engine: EngineMaker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = make_pair(seed=77)  # of its own: it gets a chat template
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (pair.target_dir / "chat_template.jinja").write_text(template)
    path = make_engine(pair).directory.path
    monkeypatch.setattr(measure, "prompt_sets", lambda: {"few": ["ab cd", "ef", "gh"]})
    output = tmp_path / "measured.json"
    arguments = ["measure.py", f"one={path}", f"two={path}", "-o", str(output)]
    monkeypatch.setattr("sys.argv", [*arguments, "--widths", "2", "4", "99", "--tokens", "12"])
    measure.main()
    found = json.loads(output.read_text())["few"]
    assert found.pop("prompts") == 3
    assert set(found) == {"one 2", "one 4", "two 2", "two 4"}  # no engine has a block of 99
    for figures in found.values():
        assert figures["same_tokens"] == 3
        assert 1 <= figures["acceptance_length"] <= 4
        assert all(0 <= share <= 1 for share in figures["accepted_per_position"])
        assert figures.pop("over_plain") > 0
        assert figures.pop("tokens_per_s") > 0
    assert len(found["one 4"]["accepted_per_position"]) == 3
    for width in (2, 4):
        assert found[f"one {width}"] == found[f"two {width}"]
