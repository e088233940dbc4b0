"""What a folder's texts come from: written first, and compared when the folder is used again."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from command import fail
from dflash.model import build_target_layer_ids
from shards import ORIGIN, shard_files

from dflash_trt import swap
from dflash_trt.errors import CheckpointError

FEATURES = 5
"""So many context features z-lab's drafters have."""


@dataclass(frozen=True)
class Origin:
    """What must be the same for all texts of a folder."""

    target: str
    """As `--target` names it; a path is absolute."""
    target_layer_ids: tuple[int, ...]
    """Whose outputs the texts have as context features."""
    seed: int

    @classmethod
    def read(cls, folder: Path) -> Origin:
        """What a folder says. Raises `CheckpointError` if it says nothing of use."""
        file = folder / ORIGIN
        try:
            facts = json.loads(file.read_text())
            layer_ids = tuple(int(layer) for layer in facts.pop("target_layer_ids"))
            return cls(str(facts.pop("target")), layer_ids, int(facts.pop("seed")))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{file}: does not say what the texts come from") from error

    def keep(self, folder: Path) -> None:
        """Write it into a new folder; end with a line if the folder's texts have another."""
        self.check(folder)
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(dataclasses.asdict(self), indent=2) + "\n"
        swap.write_file(folder / ORIGIN, text.encode())

    def check(self, folder: Path) -> None:
        """End with a line if a folder has texts of another origin."""
        if not (folder / ORIGIN).exists():
            if shard_files(folder):
                fail(f"{folder} has texts, but no {ORIGIN} says what from: take another folder")
            return
        known = dataclasses.asdict(Origin.read(folder))
        for name, wanted in dataclasses.asdict(self).items():
            if known[name] != wanted:
                fail(
                    f"{folder} is for texts of {name} {known[name]}, not {wanted}: "
                    "take another folder"
                )

    def columns(self, layer_ids: tuple[int, ...], hidden_size: int) -> slice | torch.Tensor:
        """Where some layers' outputs are in the features of a text."""
        if layer_ids == self.target_layer_ids:
            return slice(None)
        starts = [hidden_size * self.target_layer_ids.index(layer) for layer in layer_ids]
        return torch.cat([start + torch.arange(hidden_size) for start in starts])


def choose_layers(features: int | tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    """The target's layers that `--features` names, or so many by the `dflash` package's rule.

    The last layer is never among them: transformers gives its output only behind the final norm.
    """
    by_rule = isinstance(features, int)
    ids = tuple(build_target_layer_ids(num_layers, features)) if by_rule else features
    if list(ids) != sorted(set(ids)) or not 0 <= ids[0] <= ids[-1] < num_layers - 1:
        if by_rule:
            fail(f"--features {features} is too many for {num_layers} layers")
        fail(f"--features: layers {ids} must ascend and be of 0 to {num_layers - 2}")
    return ids
