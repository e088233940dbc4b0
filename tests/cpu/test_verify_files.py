"""The files of `verify`: what a certificate may replace, and which prompt an error names."""

from __future__ import annotations

import errno
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_trt import swap
from dflash_trt.cli import main
from tiny import TinyEngine

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def verify(
    engine: TinyEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Run:  # fmt: skip
    """`verify` of one short prompt; exit code, standard output and standard error."""
    (tmp_path / "prompts.txt").write_text("one\n")
    command = ["verify", engine.directory.path, "--prompts", tmp_path / "prompts.txt"]

    def run(*arguments: Any) -> tuple[int, str, str]:
        words = map(str, [*command, "--max-tokens", "4", "--threads", "1", *arguments])
        monkeypatch.setattr(sys, "argv", ["dflash-trt", *words])
        with pytest.raises(SystemExit) as end:
            main()
        captured = capsys.readouterr()
        return int(end.value.code or 0), captured.out, captured.err

    return run


def test_a_certificate_replaces_only_a_certificate(
    verify: Run, engine: TinyEngine, tmp_path: Path
) -> None:
    copy = shutil.copytree(engine.directory.path, tmp_path / "engine")
    config = tmp_path / "config.json"
    config.write_text('{"format": "another"}')
    (tmp_path / "link").symlink_to("nowhere")
    others = [copy / "weights.bin", copy / "manifest.json", tmp_path / "prompts.txt", config, copy]
    for place in others:
        before = place.read_bytes() if place.is_file() else None
        code, out, said = verify("--certificate", place)
        assert (code, out) == (2, "")
        assert f"error: {place} exists and is no lossless certificate" in said
        assert before is None or place.read_bytes() == before
    assert verify("--certificate", tmp_path / "link")[0] == 2
    kept = copy / "lossless.json"
    for max_tokens in (3, 4):
        assert verify("--certificate", kept, "--max-tokens", max_tokens)[0] == 0
        assert json.loads(kept.read_text())["settings"]["max_tokens"] == max_tokens


def test_a_place_that_cannot_be_written_is_refused_before_the_work(
    verify: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_trt.cli.verify.open_engine", None)  # not even opened
    for place in (tmp_path / "no" / "such.json", Path("/proc/such.json"), tmp_path / ("n" * 250)):
        code, out, said = verify("--certificate", place)
        assert (code, out) == (2, "")
        assert said.startswith(f"error: {place} cannot be written: ")
    assert [file.name for file in tmp_path.iterdir()] == ["prompts.txt"]


def test_a_certificate_that_cannot_be_written_after_all_was_printed(
    verify: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(swap, "write_file", full)
    code, out, said = verify("--certificate", tmp_path / "c.json", "--json")
    assert (code, json.loads(out)["lossless"]) == (2, True)
    assert "c.json cannot be written: No space left on device" in said


def test_a_certificate_is_kept_when_nobody_reads_what_is_printed(
    verify: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: Any, **__: Any) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr("dflash_trt.cli.verify.print_json", gone)
    assert verify("--certificate", tmp_path / "c.json", "--json")[0] == 141
    assert json.loads((tmp_path / "c.json").read_text())["lossless"]


def test_a_prompt_that_does_not_fit_is_named(verify: Run, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("one\n\n" + "long " * 200 + "\nthree\n")
    code, out, said = verify()
    assert (code, out) == (2, "")
    assert said.startswith(f"error: prompts {tmp_path / 'prompts.txt'}, line 3: the prompt has ")
