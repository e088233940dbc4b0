"""`dflash-trt draft-vocab`: the tokens that a drafter shall draft, counted in text."""

from __future__ import annotations

import os
from pathlib import Path

import typer

from dflash_trt import swap
from dflash_trt.build.recipe import find_recipe
from dflash_trt.checkpoint.draft_vocab import read_ids, write_ids
from dflash_trt.checkpoint.facts import MAX_SIZE
from dflash_trt.checkpoint.locate import locate
from dflash_trt.checkpoint.target import load_tokenizer
from dflash_trt.cli.output import JSON_OPTION, print_json, print_rows, progress_bar
from dflash_trt.errors import ConfigError, DFlashError
from dflash_trt.text.frequency import (
    check_size,
    count_tokens,
    most_frequent,
    num_bytes,
    read_texts,
)


def draft_vocab(
    texts: list[Path] = typer.Argument(
        help="UTF-8 text files: what the target answers is the best text to count."
    ),
    target: str = typer.Option(
        ...,
        help="Whose tokens: recipe name, recipe file, checkpoint folder, .gguf file, hf:ORG/NAME.",
    ),
    size: int = typer.Option(..., help="Tokens that the drafter shall draft."),
    output: Path = typer.Option(..., "--output", "-o", help="JSON file to write."),
    force: bool = typer.Option(False, "--force", help="Replace a draft vocabulary that is there."),
    as_json: bool = JSON_OPTION,
) -> None:
    """Choose a draft vocabulary, for `build --draft-vocab`: the most frequent tokens of texts."""
    place = swap.real_path(output)
    _check_place(place, force)
    total = num_bytes(texts)
    recipe = find_recipe(target)
    reference = (target, None) if recipe is None else (recipe.target, recipe.base)
    tokenizer = load_tokenizer(locate(*reference, facts_only=True))
    check_size(size, tokenizer.vocab_size)  # before texts are read
    with progress_bar() as bar:
        task = bar.add_task("tokens", total=total)
        pieces = read_texts(texts, lambda count: bar.advance(task, count))
        found = most_frequent(count_tokens(tokenizer, pieces), size, tokenizer.stop_ids)
    write_ids(place, found.ids)
    figures = {
        "draft_vocab": str(output),
        "draft_vocab_size": len(found.ids),
        "vocab_size": tokenizer.vocab_size,
        "tokens": found.num_tokens,
        "distinct": found.num_distinct,
        "covered": round(found.covered, 4),
    }
    if as_json:
        print_json(figures)
        return
    print_rows(
        [
            ("draft vocab", figures["draft_vocab"]),
            ("size", f"{len(found.ids):,} of {tokenizer.vocab_size:,} tokens"),
            ("text", f"{found.num_tokens:,} tokens, {found.num_distinct:,} distinct"),
            ("covered", f"{found.covered:.1%} of the text"),
        ]
    )


def _check_place(output: Path, force: bool) -> None:
    """Refuse a place where something else is, or nothing can be written, before the work."""
    try:
        if os.path.lexists(output):
            if not force:
                raise ConfigError(f"{output} exists", hint="choose another --output, or --force")
            if not _is_vocabulary(output):
                raise ConfigError(f"{output} is no draft vocabulary: it is not replaced")
        swap.try_to_write(output)
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error.strerror}") from error


def _is_vocabulary(file: Path) -> bool:
    try:
        read_ids(file, MAX_SIZE)
    except DFlashError:
        return False
    return True
