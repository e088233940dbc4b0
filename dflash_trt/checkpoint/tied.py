"""Tensors that should be one: a head tied to the embedding, a drafter's copies of the target's."""

from __future__ import annotations

import dataclasses

import numpy as np

from dflash_trt.checkpoint.drafter import EMBEDDING as DRAFTER_EMBEDDING
from dflash_trt.checkpoint.pair import Pair
from dflash_trt.checkpoint.shapes import EMBEDDING, LM_HEAD
from dflash_trt.checkpoint.tensors import TensorSource
from dflash_trt.config import PairConfig, TargetConfig
from dflash_trt.errors import BadTensor

PIECE_ROWS = 1024  # a few megabytes of float32

Place = tuple[TensorSource, str]


def check_tied_head(config: TargetConfig, source: TensorSource) -> None:
    """Compare a stored head with the embedding that it is tied to; reads both, piece by piece.

    Raises `BadTensor` where they differ. Tools disagree on which of the two is then the head, so
    either choice would be a guess at the model.
    """
    if not config.tie_word_embeddings or LM_HEAD not in source.names():
        return
    if not _same((source, EMBEDDING), (source, LM_HEAD)):
        raise BadTensor(
            f"{source.info(LM_HEAD).file}: {LM_HEAD} differs from {EMBEDDING}, although "
            "tie_word_embeddings is true",
            "set tie_word_embeddings to false in config.json if the stored head is the "
            f"model's, or remove the tensor {LM_HEAD} if the embedding is",
        )


def without_copies(pair: Pair) -> Pair:
    """The pair with one embedding and head where the drafter's are copies of the target's.

    Older `speculators` files have the target's embedding: a gigabyte of Qwen3-8B. Reads both.
    """
    config, target, drafter = pair.config, pair.target_source, pair.drafter_source
    own_embedding, own_lm_head = config.drafter.own_embedding, config.drafter.own_lm_head
    if own_embedding:
        own_embedding = not _same((target, EMBEDDING), (drafter, DRAFTER_EMBEDDING))
    if own_lm_head and pair.draft_ids is None:
        head = EMBEDDING if config.target.tie_word_embeddings else LM_HEAD
        own_lm_head = not _same((target, head), (drafter, LM_HEAD))
    facts = dataclasses.replace(
        config.drafter, own_embedding=own_embedding, own_lm_head=own_lm_head
    )
    return dataclasses.replace(pair, config=PairConfig(config.target, facts))


def _same(one: Place, other: Place) -> bool:
    """Whether two tensors have the same shape and the same values, as bits.

    So a NaN equals itself: it is refused later, for what it is.
    """
    shape = one[0].info(one[1]).shape
    if other[0].info(other[1]).shape != shape:
        return False
    for start in range(0, shape[0], PIECE_ROWS):
        stop = min(start + PIECE_ROWS, shape[0])
        mine, theirs = (source.read_rows(name, start, stop) for source, name in (one, other))
        if not np.array_equal(mine.view(np.uint32), theirs.view(np.uint32)):
            return False
    return True
