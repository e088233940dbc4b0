"""Which tokens a text is made of: the choice of a draft vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dflash_trt.errors import ConfigError
from dflash_trt.text.tokenizer import Tokenizer

Counts = npt.NDArray[np.int64]

CHUNK_CHARS = 1 << 20  # what is encoded at once; cut at the end of a line


@dataclass(frozen=True)
class Frequent:
    """The most frequent tokens of a text, ascending, and what share of the text they are."""

    ids: tuple[int, ...]
    num_tokens: int  # in the text
    num_distinct: int
    covered: float


def count_tokens(tokenizer: Tokenizer, texts: Iterable[str]) -> Counts:
    """How often each token occurs, int64 [vocab_size]. Raises `RequestError` for bad Unicode.

    Longer where the vocabulary has gaps, so that ids go beyond its size.
    """
    counts = np.zeros(tokenizer.vocab_size, np.int64)
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        found = np.bincount(ids, minlength=len(counts))
        found[: len(counts)] += counts
        counts = found
    return counts


def most_frequent(counts: Counts, size: int, always: Collection[int]) -> Frequent:
    """The `size` tokens that occur most often, with those of `always`: the ends of texts.

    What the text has too few of is filled up with the lowest ids: a tokenizer learns frequent
    tokens first. Raises `ConfigError` for a size that the vocabulary has not, or an empty text.
    """
    if not 1 <= size <= len(counts):
        raise ConfigError(f"size is {size}, the target's vocabulary has {len(counts)} tokens")
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


def read_texts(files: Iterable[Path], on_bytes: Callable[[int], None]) -> Iterator[str]:
    """Pieces of text files, in order; `on_bytes` is told how many were read.

    Raises `ConfigError` for a file that cannot be read or is not UTF-8.
    """
    for file in files:
        try:
            with file.open(encoding="utf-8") as stream:
                while piece := stream.read(CHUNK_CHARS):
                    piece += stream.readline()
                    on_bytes(len(piece.encode()))
                    yield piece
        except OSError as error:
            raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{file}: is not UTF-8 text") from error
