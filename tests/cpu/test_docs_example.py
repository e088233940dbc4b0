"""The example of docs/run-time.md, as it stands there, on a tiny engine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tiny import build_engine, save_pair

DOCUMENT = Path(__file__).parents[2] / "docs" / "run-time.md"
(EXAMPLE,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
PLACE = "out/first"


def test_the_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    longest = {"max_position_embeddings": 256}
    pair = save_pair(tmp_path, target=longest, **longest)
    (pair.target_dir / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    build_engine(pair, tmp_path / PLACE, max_seq_len=256, prefill_chunk=32)
    monkeypatch.chdir(tmp_path)
    assert f'Path("{PLACE}")' in EXAMPLE
    exec(compile(EXAMPLE, str(DOCUMENT), "exec"), {})
    out = capsys.readouterr().out
    assert re.search(r"(stop|length) after \d\.\d\d s, seed \d+\ncancelled\n", out)
    assert "dflash_generated_tokens_total" in out
