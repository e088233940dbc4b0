"""Batches of anchored blocks from texts: what the drafter reads, and what it should have said."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from safetensors.torch import load_file
from shards import PREFIX, Text

POOL = 16
"""Batches are cut from so many batches' worth of texts, sorted by length: little padding."""
MULTIPLE = 32
"""Of tokens in a batch's contexts: few shapes, since oneDNN keeps kernels and memory for each."""
USER_SHARE = 0.25
"""How often an anchor in the user's message is taken, over one in the answer."""


@dataclass
class Batch:
    """B texts of C context tokens at most, A anchors each, blocks of K."""

    features: torch.Tensor
    """[B, C, F]"""
    blocks: torch.Tensor
    """[B, A * K] token ids: anchor, mask, mask, .."""
    positions: torch.Tensor
    """[B, C + A * K]"""
    mask: torch.Tensor
    """[B, 1, A * K, C + A * K], true where a row may look: before its anchor, and its own block."""
    label_ids: torch.Tensor
    """[B, A, K - 1, TOP] the target's likeliest tokens at every drafted row."""
    label_probs: torch.Tensor
    """The same shape; all zero where the text has no such row."""

    @property
    def real(self) -> torch.Tensor:
        """[B, A, K - 1], true for drafted rows that the text has."""
        return self.label_probs.sum(-1) > 0

    def to(self, device: str) -> Batch:
        """The batch on a device."""
        return Batch(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})


class Batches:
    """Makes batches of texts."""

    def __init__(
        self,
        folder: Path,
        block: int,
        anchors: int,
        mask_token_id: int,
        columns: slice | torch.Tensor = slice(None),
    ) -> None:
        """`anchors` a text, of `block` rows each; `columns` of the features go to the drafter."""
        prefix = load_file(folder / PREFIX)
        self.prefix_tokens = prefix["tokens"].int()
        self.columns = columns
        self.prefix_features = prefix["features"][:, columns]
        self.block, self.anchors, self.mask_token_id = block, anchors, mask_token_id

    def epoch(
        self, texts: list[Text], size: int, choose: random.Random, widths: Sequence[int] = ()
    ) -> Iterator[Batch]:
        """All texts once, `size` a batch, in an order and with anchors that `choose` draws.

        Each batch has one of `widths`, the block's if there are none.
        """
        widths = widths or (self.block,)
        order = list(range(len(texts)))
        choose.shuffle(order)
        for start in range(0, len(order), size * POOL):
            pool = sorted(order[start : start + size * POOL], key=lambda i: len(texts[i].tokens))
            groups = [pool[i : i + size] for i in range(0, len(pool), size)]
            choose.shuffle(groups)
            for group in groups:
                yield self.batch([texts[i] for i in group], choose, choose.choice(widths))

    def batch(self, texts: list[Text], choose: random.Random, width: int | None = None) -> Batch:
        """One batch, of blocks of `width` rows: where they are shorter there are more of them."""
        block = width or self.block
        count, anchors = len(self.prefix_tokens), max(1, self.anchors * self.block // block)
        own = torch.kron(torch.eye(anchors), torch.ones(block, block)).bool()
        longest = max(len(text.tokens) for text in texts)
        size = -(-(count + longest) // MULTIPLE) * MULTIPLE
        features = self.prefix_features.new_zeros(len(texts), size, self.prefix_features.shape[1])
        blocks = torch.full((len(texts), anchors, block), self.mask_token_id)
        starts = torch.zeros(len(texts), anchors, dtype=torch.long)
        shape = (len(texts), anchors, block - 1, texts[0].top_ids.shape[1])
        label_ids = torch.zeros(shape, dtype=torch.long)
        label_probs = torch.zeros(shape)
        for i, text in enumerate(texts):
            length = len(text.tokens)
            features[i, :count] = self.prefix_features
            features[i, count : count + length] = text.features[:, self.columns]
            at = torch.tensor(_anchors(text, choose, anchors))
            starts[i] = at + count
            blocks[i, :, 0] = text.tokens[at]
            rows = at[:, None] + torch.arange(block - 1)
            real = rows < length
            rows = rows.clamp_max(length - 1)
            label_ids[i] = text.top_ids[rows].long()
            label_probs[i] = text.top_probs[rows].float() * real[..., None]
        positions = torch.cat(
            [
                torch.arange(size).expand(len(texts), -1),
                (starts[..., None] + torch.arange(block)).flatten(1),
            ],
            1,
        )
        before = torch.arange(size) < starts.repeat_interleave(block, 1)[..., None]
        mask = torch.cat([before, own.expand(len(texts), -1, -1)], -1)[:, None]
        return Batch(features, blocks.flatten(1), positions, mask, label_ids, label_probs)


def _anchors(text: Text, choose: random.Random, count: int) -> list[int]:
    last = len(text.tokens) - 1
    answer = range(max(0, min(text.answer_start - 1, last)), last)
    user = range(answer.start)
    weights = [USER_SHARE] * len(user) + [1.0] * len(answer)
    picked = {i: choose.random() ** (1 / w) for i, w in enumerate(weights)}
    best = sorted(picked, key=picked.__getitem__, reverse=True)[:count] or [0]
    return [best[i % len(best)] for i in range(count)]
