"""`draft-vocab` and `build --draft-vocab`: texts to an engine that drafts their tokens alone."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from dflash_trt.decode.request import SamplingParams
from dflash_trt.engine_dir import open_engine
from dflash_trt.errors import ConfigError
from dflash_trt.text import Tokenizer
from dflash_trt.text.frequency import count_tokens, most_frequent, read_texts
from tiny import EngineMaker, PairMaker, Recording, Run, TinyEngine, TinyPair

SMALL = ("--max-seq-len", "64", "--max-slots", "1", "--prefill-chunk", "8")


def choose(run: Run, pair: TinyPair, text: Path, size: int, output: Path, *more: str) -> Any:
    return run(
        "draft-vocab", text, "--target", pair.target_dir, "--size", size, "-o", output, *more
    )


def test_from_texts_to_an_engine(run: Run, pair: TinyPair, tmp_path: Path) -> None:
    one, other, ids = tmp_path / "a.txt", tmp_path / "b.txt", tmp_path / "ids.json"
    one.write_text("bbbb" + "aaa" + "zz" + "q")
    other.write_text("aaaa")
    code, out, err = run("draft-vocab", one, other, "--target", pair.target_dir, "--size", "3",
                         "-o", ids)  # fmt: skip
    assert (code, err) == (0, "")
    assert "14 tokens, 4 distinct" in out
    assert "covered      92.9% of the text" in out
    tokenizer = Tokenizer.load(pair.target_dir)
    chosen = json.loads(ids.read_text())
    assert [tokenizer.decode([token]) for token in chosen] == ["a", "b", "z"]
    engine = tmp_path / "engine"
    code, out, _ = run("build", "--target", pair.target_dir, "--drafter", pair.drafter_dir,
                       "--draft-vocab", ids, "-o", engine, *SMALL)  # fmt: skip
    assert code == 0
    assert "draft vocab   3 tokens" in out
    assert open_engine(engine).config.pair.drafter.draft_vocab_size == 3
    assert "draft vocab" in run("inspect", engine)[1]
    sources = json.loads(run("inspect", engine, "--json")[1])["sources"]
    assert sources["draft_vocab"]["reference"] == str(ids)
    assert run("verify", engine, "--prompts", one, "--max-tokens", "8")[0] == 0


def test_a_recipe_may_name_one_for_its_own_drafter(
    run: Run, pair: TinyPair, make_pair: PairMaker, tmp_path: Path
) -> None:
    recipe = tmp_path / "mine.yaml"
    lines = f"target: {pair.target_dir}\ndrafter: {pair.drafter_dir}\n"
    (tmp_path / "ids.json").write_text("[1, 2]")
    recipe.write_text(f"{lines}draft_vocab: ids.json\n")
    command = ("build", "--target", recipe, "--json", *SMALL)
    assert json.loads(run(*command, "-o", tmp_path / "a")[1])["draft_vocab_size"] == 2
    other = make_pair(draft_ids=[4, 5, 6]).drafter_dir
    made = run(*command, "--drafter", other, "-o", tmp_path / "b")[1]
    assert json.loads(made)["draft_vocab_size"] == 3
    for value in ("7", '""', '"a\\0b"'):
        recipe.write_text(f"{lines}draft_vocab: {value}\n")
        code, _, err = run(*command, "-o", tmp_path / "c")
        assert (code, "expected the name of a file" in err) == (2, True)
        assert str(recipe) in err


def test_inspect_says_which_kind_of_drafter_it_is(
    run: Run, make_pair: PairMaker, tmp_path: Path
) -> None:
    for kind, options in (("DFlash 2, 2 layers", {"dflash2": {}}), ("2 layers", {})):
        pair, engine = make_pair(**options), tmp_path / f"engine{len(options)}"
        run(
            "build",
            "--target",
            pair.target_dir,
            "--drafter",
            pair.drafter_dir,
            "-o",
            engine,
            *SMALL,
        )
        lines = run("inspect", engine)[1].splitlines()
        at = next(i for i, line in enumerate(lines) if line.startswith("drafter "))
        assert lines[at + 1].strip().startswith(f"{kind}, hidden 48")


BAD: list[tuple[str, tuple[str, ...], str]] = [
    ("text", ("--size", "0"), "size is 0, the target's vocabulary has 160 tokens"),
    ("text", ("--size", "161"), "size is 161"),
    ("", ("--size", "4"), "the text is empty"),
    ("\udcff", ("--size", "4"), "is not UTF-8 text"),
]


@pytest.mark.parametrize(("content", "options", "message"), BAD)
def test_texts_and_sizes_that_give_no_vocabulary(
    content: str, options: tuple[str, ...], message: str, run: Run, pair: TinyPair, tmp_path: Path
) -> None:
    text, output = tmp_path / "text", tmp_path / "ids.json"
    text.write_bytes(content.encode("utf-8", "surrogateescape"))
    code, out, err = run("draft-vocab", text, "--target", pair.target_dir, "-o", output, *options)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.strip().splitlines()) <= 2
    assert not output.exists()


def test_only_a_draft_vocabulary_is_replaced(run: Run, pair: TinyPair, tmp_path: Path) -> None:
    text, output = tmp_path / "text", tmp_path / "ids.json"
    text.write_text("aab")
    assert choose(run, pair, text, 1, output)[0] == 0
    before = output.read_bytes()
    assert "exists" in choose(run, pair, text, 2, output)[2]
    assert output.read_bytes() == before
    assert choose(run, pair, text, 2, output, "--force")[0] == 0
    assert len(json.loads(output.read_text())) == 2
    for content in ('{"a": 1}', "[1.5]", "[true]", "[]", "notes"):
        output.write_text(content)
        assert "no draft vocabulary" in choose(run, pair, text, 2, output, "--force")[2]
        assert output.read_text() == content
    os.mkfifo(tmp_path / "pipe")
    for device in (tmp_path / "pipe", "/dev/zero"):
        assert "no draft vocabulary" in choose(run, pair, text, 2, device, "--force")[2]
    assert "cannot be written" in choose(run, pair, text, 2, tmp_path / "none" / "x")[2]
    output.unlink()
    output.symlink_to(tmp_path / "real.json")
    (tmp_path / "real.json").write_text("[1]")
    assert choose(run, pair, text, 2, output, "--force")[0] == 0
    assert output.is_symlink()
    assert len(json.loads((tmp_path / "real.json").read_text())) == 2


def test_what_cannot_be_done_is_said_before_texts_are_read(
    run: Run, pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, output = tmp_path / "text", tmp_path / "ids.json"
    text.write_text("aab")
    monkeypatch.setattr("dflash_trt.cli.draft_vocab.read_texts", lambda *_: pytest.fail("read"))
    command = ("draft-vocab", text, "--target", pair.target_dir, "-o", output)
    assert "size is 0" in run(*command, "--size", 0)[2]
    for other, message in ((tmp_path, "is a folder"), (tmp_path / "none", "No such file")):
        code, _, err = run(*command, other, "--size", 2)
        assert (code, f"{other}: cannot be read" in err, message in err) == (2, True, True)


def test_what_is_counted_does_not_depend_on_how_it_is_read(
    pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer.load(pair.target_dir)
    text = tmp_path / "text"
    text.write_text("one line\n\nand another é\n" * 20)
    told: list[int] = []
    whole = count_tokens(tokenizer, read_texts([text], told.append))
    assert sum(told) == text.stat().st_size
    monkeypatch.setattr("dflash_trt.text.frequency.CHUNK_CHARS", 7)
    assert (count_tokens(tokenizer, read_texts([text], told.append)) == whole).all()
    # A file of one line is not read at once, and Windows' byte order mark is no token.
    text.write_bytes(b"\xef\xbb\xbf" + b"a" * 200)
    pieces = list(read_texts([text], told.append))
    assert "".join(pieces) == "a" * 200
    assert max(map(len, pieces)) <= 14


def test_a_vocabulary_with_gaps(pair: TinyPair, tmp_path: Path) -> None:
    folder = tmp_path / "target"
    shutil.copytree(pair.target_dir, folder)
    data = json.loads((folder / "tokenizer.json").read_text())
    data["model"]["vocab"]["z"] = 400
    (folder / "tokenizer.json").write_text(json.dumps(data))
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.vocab_size == 160
    counts = count_tokens(tokenizer, ["az", "zb"])
    assert counts.sum() == 4
    assert most_frequent(counts, 1, ()).ids == (400,)


def test_the_tokens_that_end_a_text_are_always_drafted(pair: TinyPair, tmp_path: Path) -> None:
    folder = tmp_path / "target"
    shutil.copytree(pair.target_dir, folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [150, 151]}')
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.stop_ids == (150, 151)
    counts = count_tokens(tokenizer, ["aaab"])
    found = most_frequent(counts, 3, tokenizer.stop_ids)
    assert found.ids == tuple(sorted([*tokenizer.encode("a"), 150, 151]))
    assert found.covered == 0.75
    assert most_frequent(counts, 3, [5000]).ids == most_frequent(counts, 3, ()).ids  # no token
    # Too few tokens in the text: the tokenizer's first ones fill up.
    assert set(range(10)) < set(most_frequent(counts, 14, tokenizer.stop_ids).ids)
    with pytest.raises(ConfigError, match="empty"):
        most_frequent(count_tokens(tokenizer, []), 3, ())


@pytest.mark.parametrize("has_own_head", [False, True])
def test_outputs_do_not_depend_on_what_can_be_drafted(
    has_own_head: bool, make_pair: PairMaker, make_engine: EngineMaker, prompts: list[list[int]]
) -> None:
    """Greedy, sampled and adjusted requests side by side, and no draft outside the vocabulary."""
    ids = range(0, 160, 2)
    some = make_engine(make_pair(draft_ids=ids, has_own_head=has_own_head))
    every = make_engine(make_pair())
    jobs = [
        (prompts[0], SamplingParams(max_tokens=20)),
        (prompts[25], SamplingParams(max_tokens=20, temperature=0.9, seed=3)),
        (prompts[31], SamplingParams(max_tokens=20, temperature=1.2, top_k=9, top_p=0.9, seed=4)),
        (prompts[7], SamplingParams(max_tokens=20, repetition_penalty=1.3, logit_bias={5: 3.0})),
    ]
    watched = Recording(some.session())
    made = some.engine(watched).generate_all(jobs)
    wanted = every.engine().generate_all(jobs)
    assert [g.token_ids for g in made] == [g.token_ids for g in wanted]
    drafts = {
        int(d) for s in watched.steps for d in s.result.next_tokens[s.rows.count > 0][:, 1:].flat
    }
    assert drafts
    assert drafts <= set(ids)


def test_copies_of_the_targets_tensors_are_stored_once(
    pair: TinyPair, make_engine: EngineMaker, tmp_path: Path
) -> None:
    """Older `speculators` files have an embedding of their own; it may also be another one."""
    target = load_file(pair.target_dir / "model.safetensors")

    def engine(name: str, scale: float) -> TinyEngine:
        folder = tmp_path / name
        shutil.copytree(pair.drafter_dir, folder)
        tensors = load_file(folder / "model.safetensors")
        tensors["embed_tokens.weight"] = target["model.embed_tokens.weight"] * scale
        tensors["lm_head.weight"] = target["lm_head.weight"] * scale
        save_file(tensors, folder / "model.safetensors")
        return make_engine(TinyPair(pair.target, pair.drafter, pair.target_dir, folder))

    copies, others, shared = engine("copies", 1.0), engine("others", 2.0), make_engine(pair)
    assert not copies.facts.drafter.own_embedding
    assert not copies.facts.drafter.own_lm_head
    assert copies.facts == shared.facts
    assert others.facts.drafter.own_embedding
    assert others.facts.drafter.own_lm_head
    sizes = [
        e.directory.manifest["files"]["weights.bin"]["bytes"] for e in (shared, copies, others)
    ]
    assert sizes[0] == sizes[1] < sizes[2]
