"""Texts on disk: what the target said, what it saw, and what it nearly said.

A shard is one safetensors file of whole texts, laid end to end. Each text starts after the prefix
that all share (`prefix.safetensors`), and token i of it has

- `features[i]`: outputs of the target's layers after it read the token, [F] in FEATURES_DTYPE;
- `top_ids[i]`, `top_probs[i]`: its likeliest next tokens and their probabilities, [TOP].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from dflash_trt import swap
from dflash_trt.errors import CheckpointError

TOP = 8
FEATURES_DTYPE = torch.bfloat16
PARTS = ("tokens", "features", "top_ids", "top_probs")
"""Of a text, one after another as in `Text`."""
PREFIX = "prefix.safetensors"
ORIGIN = "texts.json"
WEIGHTS = "model.safetensors"
"""A drafter's, in its folder."""


@dataclass
class Text:
    """One script's text: T tokens after the prefix."""

    script: int
    answer_start: int
    tokens: torch.Tensor
    """[T] int32; what followed the last one is the first of its `top_ids`, if it was greedy."""
    features: torch.Tensor
    top_ids: torch.Tensor
    top_probs: torch.Tensor


def write_file(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write a safetensors file that appears whole."""
    whole = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    swap.write_file(file, save(whole, metadata={"format": "pt"}))


def write_shard(file: Path, texts: list[Text]) -> None:
    """Write texts as one shard."""
    write_file(
        file,
        {
            "scripts": torch.tensor([text.script for text in texts]),
            "answer_starts": torch.tensor([text.answer_start for text in texts]),
            "lengths": torch.tensor([len(text.tokens) for text in texts]),
            **{name: torch.cat([getattr(text, name) for text in texts]) for name in PARTS},
        },
    )


def shard_files(folder: Path) -> list[Path]:
    """Shards of a folder, in the order in which they are read."""
    return sorted(folder.glob("shard-*.safetensors"))


def finished_ids(folder: Path) -> set[int]:
    """Scripts whose texts are in a folder's shards."""
    return {text.script for text in read_shards(folder)}


def read_shards(folder: Path) -> Iterator[Text]:
    """All texts of a folder: views of the mapped files, so memory holds what is looked at."""
    for file in shard_files(folder):
        try:
            with safe_open(file, "pt") as shard:
                whole = {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise CheckpointError(
                f"{file}: is no whole shard: {error}", hint="delete it: its texts are made again"
            ) from error
        missing = {"scripts", "answer_starts", "lengths", *PARTS} - set(whole)
        if missing:
            raise CheckpointError(f"{file}: is no shard of texts: has no {min(missing)}")
        lengths = whole["lengths"].tolist()
        parts = [whole[name].split(lengths) for name in PARTS]
        rows = zip(whole["scripts"].tolist(), whole["answer_starts"].tolist(), *parts, strict=True)
        yield from (Text(*row) for row in rows)
