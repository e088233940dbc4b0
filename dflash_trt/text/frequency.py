"""Which tokens a text is made of: the choice of a draft vocabulary."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dflash_trt.errors import ConfigError
from dflash_trt.text.tokenizer import Tokenizer

Counts = npt.NDArray[np.int64]

CHUNK_CHARS = 1 << 20  # what is encoded at once, up to twice; cut at the end of a line if it can be


@dataclass(frozen=True)
class Frequent:
    """The most frequent tokens of a text, ascending, and what share of the text they are."""

    ids: tuple[int, ...]
    num_tokens: int  # in the text
    num_distinct: int
    covered: float


def count_tokens(tokenizer: Tokenizer, texts: Iterable[str]) -> Counts:
    """How often each token occurs: see `count_ids`. Raises `RequestError` for bad Unicode."""
    every = (tokenizer.encode(text, add_special_tokens=False) for text in texts)
    return count_ids(tokenizer, every)


def count_ids(tokenizer: Tokenizer, texts: Iterable[Sequence[int]]) -> Counts:
    """How often each token occurs in texts of ids: int64 [vocab_size].

    Longer where the vocabulary has gaps, so that ids go beyond its size.
    """
    counts = np.zeros(max(tokenizer.vocab_size, *(i + 1 for i in tokenizer.stop_ids), 0), np.int64)
    for ids in texts:
        found = np.bincount(ids, minlength=len(counts))
        found[: len(counts)] += counts
        counts = found
    return counts


def most_frequent(counts: Counts, size: int, always: Collection[int]) -> Frequent:
    """The `size` tokens that occur most often, with those of `always`: the ends of texts.

    What the text has too few of is filled up with the lowest ids: a tokenizer learns frequent
    tokens first. Raises `ConfigError` for a size that the vocabulary has not, or an empty text.
    """
    check_size(size, len(counts))
    total = int(counts.sum())
    if total == 0:
        raise ConfigError("the text is empty: there is nothing to count")
    order = np.argsort(-counts, kind="stable")
    first = [token for token in always if token < len(counts)][:size]
    rest = order[~np.isin(order, first)]
    chosen = np.sort([*first, *rest[: size - len(first)]])
    return Frequent(
        ids=tuple(int(token) for token in chosen),
        num_tokens=total,
        num_distinct=int(np.count_nonzero(counts)),
        covered=float(counts[chosen].sum() / total),
    )


def check_size(size: int, vocab_size: int) -> None:
    """Raises `ConfigError` for a draft vocabulary that is empty or larger than the target's."""
    if not 1 <= size <= vocab_size:
        raise ConfigError(f"size is {size}, the target's vocabulary has {vocab_size} tokens")


def num_bytes(files: Iterable[Path]) -> int:
    """Bytes of text files, 0 of a pipe. Raises `ConfigError` for one that cannot be read."""
    total = 0
    for file in files:
        try:
            if file.is_dir():
                raise ConfigError(f"{file}: cannot be read: it is a folder")
            total += os.path.getsize(file)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"{file}: cannot be read: {reason}") from error
    return total


def read_texts(files: Iterable[Path], on_bytes: Callable[[int], None]) -> Iterator[str]:
    """Pieces of text files, in order; `on_bytes` is told how many were read.

    Raises `ConfigError` for a file that cannot be read or is not UTF-8.
    """
    for file in files:
        try:
            with file.open(encoding="utf-8-sig") as stream:
                while piece := stream.read(CHUNK_CHARS):
                    piece += stream.readline(CHUNK_CHARS)  # a file may be one line
                    on_bytes(len(piece.encode()))
                    yield piece
        except OSError as error:
            raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{file}: is not UTF-8 text") from error
