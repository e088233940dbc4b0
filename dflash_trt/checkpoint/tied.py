"""A target's head that is tied to the embedding and stored as well: a copy, or a contradiction."""

from __future__ import annotations

import numpy as np

from dflash_trt.checkpoint.shapes import EMBEDDING, LM_HEAD
from dflash_trt.checkpoint.tensors import TensorSource
from dflash_trt.config import TargetConfig
from dflash_trt.errors import BadTensor

PIECE_ROWS = 1024  # a few megabytes of float32


def check_tied_head(config: TargetConfig, source: TensorSource) -> None:
    """Compare a stored head with the embedding that it is tied to; reads both, piece by piece.

    Raises `BadTensor` where they differ. Tools disagree on which of the two is then the head, so
    either choice would be a guess at the model.
    """
    if not config.tie_word_embeddings or LM_HEAD not in source.names():
        return
    for start in range(0, config.vocab_size, PIECE_ROWS):
        stop = min(start + PIECE_ROWS, config.vocab_size)
        one, other = (source.read_rows(name, start, stop) for name in (EMBEDDING, LM_HEAD))
        # As bits: a NaN equals itself, and is refused later for what it is.
        if not np.array_equal(one.view(np.uint32), other.view(np.uint32)):
            raise BadTensor(
                f"{source.info(LM_HEAD).file}: {LM_HEAD} differs from {EMBEDDING}, although "
                "tie_word_embeddings is true",
                "set tie_word_embeddings to false in config.json if the stored head is the "
                f"model's, or remove the tensor {LM_HEAD} if the embedding is",
            )
