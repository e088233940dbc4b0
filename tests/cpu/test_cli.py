"""The command line on a tiny pair: what it prints, its exit codes, and what must never happen."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tiny import Run, TinyEngine, TinyPair

SMALL = ("--max-seq-len", "64", "--max-slots", "1", "--prefill-chunk", "8")


def refused(result: tuple[int, str, str], *words: str) -> None:
    """Exit 2 and one `error:` line that has the words; at most a hint follows."""
    code, out, err = result
    assert code == 2
    assert not out
    said = [line for line in err.splitlines() if not line.startswith("warning: ")]
    first, _, rest = "\n".join(said).partition("\n")
    assert first.startswith("error: ")
    assert all(word in first for word in words)
    assert not rest.strip() or rest.strip().startswith("hint: ")
    assert len(rest.strip().splitlines()) <= 1


def test_the_four_verbs_in_turn(run: Run, pair: TinyPair, tmp_path: Path) -> None:
    engine = tmp_path / "tiny [/b] [red] engine"  # brackets are no markup
    code, out, _ = run("build", "--target", pair.target_dir, "--drafter", pair.drafter_dir,
                       "-o", engine, "--json", *SMALL)  # fmt: skip
    assert code == 0
    assert json.loads(out)["engine"] == str(engine)
    code, out, err = run("generate", engine, "-p", "hello", "--max-tokens", 6, "--width", 2)
    assert (code, out.endswith("\n")) == (0, True)
    assert "6 tokens" in err
    made = json.loads(run("generate", engine, "-p", "hello", "--max-tokens", 6, "--json")[1])
    assert made["completion_tokens"] == len(made["token_ids"]) == 6
    wanted = {"text", "prompt_tokens", "finish_reason", "steps", "acceptance_length",
              "accepted_per_position", "ttft_s", "decode_tokens_per_s"}  # fmt: skip
    assert wanted <= set(made)
    code, out, _ = run("inspect", engine)
    assert code == 0
    assert str(engine) in out.replace("\n", "")
    kept, prompts = engine / "lossless.json", tmp_path / "prompts.txt"
    prompts.write_text("one\n\ntwo\nthree\n")
    limits = ("--num-prompts", 2, "--max-tokens", 5)
    code, out, _ = run(
        "verify", engine, "--prompts", prompts, *limits, "--certificate", kept, "--json"
    )
    report = json.loads(out)
    assert (code, report["lossless"], len(report["runs"])) == (0, True, 4)
    shown = json.loads(run("inspect", engine, "--json")[1])
    assert shown["certificate"] == {"lossless": True, "is_of_this_engine": True}


@pytest.mark.parametrize(
    "records",
    [
        {"sources": None, "versions": None}, {"sources": {"target": None}, "versions": []},
        {"sources": {"target": {}}, "versions": {}},
        {"choices": 1, "target": 2, "caches": 3, "certificate": 4, "engine": [], "tensorrt": 5},
    ],
)  # fmt: skip
def test_what_is_for_people_in_a_manifest_never_stops_inspect(
    records: dict[str, Any], run: Run, engine: TinyEngine, tmp_path: Path
) -> None:
    copy = shutil.copytree(engine.directory.path, tmp_path / "engine")
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps(manifest | records))
    code, out, err = run("inspect", copy)
    assert (code, err) == (0, "")
    assert str(copy) in out
    assert json.loads(run("inspect", copy, "--json")[1])["engine"] == str(copy)


@pytest.mark.parametrize(
    "put",
    [
        lambda file: file.write_bytes(b"[" * 100_000), lambda file: file.write_bytes(b"\xff"),
        lambda file: file.write_text("[1]"), lambda file: file.write_text('{"lossless": true}'),
        lambda file: (file.touch(), os.truncate(file, 1 << 40)),
        lambda file: file.symlink_to("/dev/zero"), os.mkfifo, os.mkdir,
    ],
)  # fmt: skip
def test_a_certificate_that_is_none_is_not_shown(
    put: Callable[[Path], object], run: Run, engine: TinyEngine, tmp_path: Path
) -> None:
    copy = shutil.copytree(engine.directory.path, tmp_path / "engine")
    put(copy / "lossless.json")
    code, out, _ = run("inspect", copy, "--json")
    assert code == 0
    assert json.loads(out)["certificate"] is None


def test_force_replaces_engines_only(run: Run, pair: TinyPair, tmp_path: Path) -> None:
    """A checkpoint has a config.json too."""
    target = shutil.copytree(pair.target_dir, tmp_path / "target")
    before = sorted(path.name for path in target.iterdir())
    refused(run("build", "--target", target, "--drafter", pair.drafter_dir, "-o", target,
                "--force", *SMALL), "not an engine")  # fmt: skip
    assert sorted(path.name for path in target.iterdir()) == before


def test_force_is_advised_only_where_it_helps(run: Run, pair: TinyPair, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("years of work")
    (tmp_path / "empty").mkdir()
    build = ("build", "--target", pair.target_dir, "--drafter", pair.drafter_dir, *SMALL)
    for place in (tmp_path, tmp_path / "notes.txt"):
        result = run(*build, "-o", place)
        refused(result, str(place), "not an engine")
        assert "--force" not in result[2]
    assert "--force" in run(*build, "-o", tmp_path / "empty")[2]


def test_the_working_directory_can_be_replaced(
    run: Run, pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, _ = run("build", "--target", pair.target_dir, "--drafter", pair.drafter_dir,
                     "-o", ".", "--force", *SMALL)  # fmt: skip
    assert code == 0
    assert run("inspect", tmp_path)[0] == 0


def test_odd_files_in_a_checkpoint(run: Run, pair: TinyPair, tmp_path: Path) -> None:
    target = shutil.copytree(pair.target_dir, tmp_path / "target")
    (target / "other.json").symlink_to("/nonexistent")
    build = ("build", "--target", target, "--drafter", pair.drafter_dir, *SMALL)
    assert run(*build, "-o", tmp_path / "a")[0] == 0
    (target / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\n")
    refused(run(*build, "-o", tmp_path / "b"), "tokenizer.json", "LFS")
    (target / "tokenizer.json").unlink()
    os.mkfifo(target / "tokenizer.json")
    refused(run(*build, "-o", tmp_path / "b"), "tokenizer.json", "regular file")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("generate", "ENGINE", "-p", "x", "--max-tokens", "abc"), "--max-tokens"),
        (("generate", "ENGINE", "-p", "x", "--threads", "0"), "threads"),
        (("generate", "ENGINE", "-p", "x", "--threads", str(10**22)), "threads"),
        (("generate", "ENGINE", "-p", "x", "--width", "99"), "width"),
        (("generate", "ENGINE", "-p", "x", "--temperature", "nan"), "temperature"),
        (("generate", "ENGINE", "-p", " "), "prompt"),
        (("generate", "ENGINE", "-p", "x", "--stop", ""), "stop"),
        (("generate", "ENGINE", "-p", "x", "--stop", "a\udcff"), "character 1 of a stop string"),
        (("generate", "ENGINE", "-p", "x", "--bad-word", "\udcff"), "character 0 of a bad word"),
        (("generate", "ENGINE", "-p", "ab\udcff"), "character 2 of the prompt"),
        (("generate", "ENGINE", "-p", "x", "--system", "\udcff"), "character 0 of --system"),
        (("generate", "ENGINE", "-p", "x", "--logprobs", "2"), "--json"),
        (("generate", "ENGINE", "-p", "x", "--width", "9" * 5000), "width"),
        (("generate", "n" * 300, "-p", "x"), "nnn"),
        (("inspect", "no/[/b]/such"), "no/[/b]/such"),
        (("verify", "ENGINE", "--num-prompts", "0"), "num_prompts"),
        (("verify", "ENGINE", "--num-prompts", "9999"), "9999"),
        (("build", "--target", "nope"), "nope"),
        (("build", "--target", ""), "--target is empty"),
        (("build", "--target", "smollm2-135m", "--drafter", "", "-o", "x"), "''"),
        (("serve", "ENGINE", "--queue", "-1"), "queue is -1, allowed are 0 to 1048576"),
        (("serve", "ENGINE", "--drain-seconds", "-1"), "allowed are 0 to 1000000"),
        (("build", "--target", "smollm2-135m", "--block", "17", "-o", "x"), "17"),
        (("sing",), "sing"),
    ],
)
def test_bad_input_is_one_line(
    arguments: tuple[str, ...], word: str, run: Run, engine: TinyEngine
) -> None:
    folder = str(engine.directory.path)
    refused(run(*(folder if part == "ENGINE" else part for part in arguments)), word)


@pytest.mark.parametrize(
    "line",
    [
        "block: 1", "block: 65", "block: 5", "block: '4'", "block: true", "block: [4]",
        "max_seq_len: 1", "max_seq_len: 513", "max_seq_len: 1e9", "max_slots: 0", "max_slots: -1",
        "prefill_chunk: 100000", "precision: fp4", "precision: {}", "precision: bf16",
        "device: sm1", "device: [cpu]", "logits: 3", "max_slots: .nan", "max_slots: null",
    ],
)  # fmt: skip
def test_a_value_of_a_recipe_is_refused_with_its_file_and_key(
    line: str, run: Run, pair: TinyPair, tmp_path: Path
) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"target: {pair.target_dir}\ndrafter: {pair.drafter_dir}\n{line}\n")
    key = line.partition(":")[0]
    command = ("build", "--target", recipe, "-o", tmp_path / "engine")
    refused(run(*command), f"recipe {recipe}: ", key)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["mine.yaml"]


def test_a_flag_is_not_blamed_on_the_recipe(run: Run, pair: TinyPair, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"target: {pair.target_dir}\ndrafter: {pair.drafter_dir}\nblock: 65\n")
    result = run("build", "--target", recipe, "--block", 1, "-o", tmp_path / "engine")
    refused(result, "block is 1, allowed are 2 to 64")
    assert "mine.yaml" not in result[2]
    assert run("build", "--target", recipe, "--block", 2, "-o", tmp_path / "e", *SMALL)[0] == 0
    recipe.write_text("[" * 50_000)
    refused(run("build", "--target", recipe), f"recipe {recipe} cannot be read")


class Endless(io.RawIOBase):
    """A stream of text without an end."""

    num_bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        buffer[:] = b"a" * len(buffer)
        self.num_bytes += len(buffer)
        return len(buffer)


def test_standard_input(run: Run, engine: TinyEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ("generate", engine.directory.path, "-p", "-", "--max-tokens", 2)
    for content, word in ((b"\xff\xfe", "UTF-8"), (b"", "empty")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        refused(run(*command), word)
    monkeypatch.setattr(sys, "stdin", None)
    refused(run(*command), "closed")
    endless = Endless()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(endless)))
    refused(run(*command), "more than")
    assert endless.num_bytes < 8 << 20
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello")))
    assert run(*command)[0] == 0


def test_a_seed_that_was_drawn_is_told(run: Run, engine: TinyEngine) -> None:
    command = ("generate", engine.directory.path, "-p", "x", "--max-tokens", 8, "--temperature", 1)
    _, text, summary = run(*command)
    seed = summary.partition("seed ")[2].split()[0]
    again = json.loads(run(*command, "--seed", seed, "--json")[1])
    assert (again["text"] + "\n", again["seed"]) == (text, int(seed))
    assert "seed" not in run(*command[:-2])[2]


def test_a_config_that_asks_for_more_than_was_built(
    run: Run, engine: TinyEngine, tmp_path: Path
) -> None:
    """Hashes fit, but the graph has no positions for such lengths."""
    import hashlib

    copy = shutil.copytree(engine.directory.path, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    config["choices"]["max_seq_len"] = 5000
    text = json.dumps(config).encode()
    (copy / "config.json").write_bytes(text)
    manifest = json.loads((copy / "manifest.json").read_text())
    entry = {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}
    manifest["files"]["config.json"] = entry
    (copy / "manifest.json").write_text(json.dumps(manifest))
    refused(run("generate", copy, "-p", "x"), "max_seq_len", "5000")
