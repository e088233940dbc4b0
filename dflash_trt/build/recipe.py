"""Recipes: `engines/NAME.yaml`, what `--target NAME` names."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from dflash_trt.config import BuildChoices
from dflash_trt.errors import ConfigError, DFlashError
from dflash_trt.flavor import CPU

PACKAGED = "dflash_trt.recipes"  # the folder engines/ as it is installed
CHOICES = tuple(field.name for field in dataclasses.fields(BuildChoices))
HOW_TO = "engines/README.md says what a recipe looks like"
DRAFT_VOCAB = "draft_vocab"
_FIELDS = {"target", "drafter", "description", DRAFT_VOCAB, *CHOICES}


@dataclass(frozen=True)
class Recipe:
    """A named pair with its choices; references are relative to the recipe's folder."""

    file: Path
    target: str
    drafter: str
    choices: Mapping[str, Any]
    draft_vocab: Path | None = None

    @property
    def name(self) -> str:
        """What users call it."""
        return self.file.stem

    @property
    def base(self) -> Path:
        """Where its relative references start."""
        return self.file.parent

    def choices_for(self, device: str | None) -> dict[str, Any]:
        """The choices for a device, None for the recipe's own; elsewhere its precision is unfit."""
        if device in (None, self.choices.get("device", CPU)):
            return dict(self.choices)
        kept = {key: value for key, value in self.choices.items() if key != "precision"}
        return {**kept, "device": device}

    @contextlib.contextmanager
    def blamed(self, flags: Collection[str]) -> Iterator[None]:
        """Name the file in an error about a choice that it made, and not one of `flags`."""
        try:
            yield
        except DFlashError as error:
            if error.choice in flags or error.choice not in self.choices:
                raise
            message = f"recipe {self.file}: {error.message}"
            raise type(error)(message, error.hint, choice=error.choice) from error


def recipe_folder() -> Path:
    """Where the packaged recipes are."""
    return Path(str(resources.files(PACKAGED)))


def recipe_names() -> list[str]:
    """Names of the packaged recipes."""
    return sorted(file.stem for file in recipe_folder().glob("*.yaml"))


def find_recipe(name: str) -> Recipe | None:
    """The recipe of a name, or of a path to a .yaml file; None when `name` is neither.

    Raises `ConfigError` when the file is not a recipe.
    """
    file = Path(name)
    if file.suffix not in (".yaml", ".yml"):
        if name not in recipe_names():
            return None
        file = recipe_folder() / f"{name}.yaml"
    return read_recipe(file)


def remarks(name: str) -> list[str]:
    """What a user should know of a name: a recipe's wins over a file or folder of that name."""
    if name in recipe_names() and os.path.exists(name):
        return [f"{name}: the recipe is meant, not what is here; write ./{name} for that"]
    return []


def read_recipe(file: Path) -> Recipe:
    """Read one recipe file. Raises `ConfigError` naming the file and the key."""
    try:
        data = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"recipe {file} cannot be read: {reason}", hint=HOW_TO) from error
    if not isinstance(data, dict):
        raise ConfigError(f"recipe {file} is not a mapping", hint=HOW_TO)
    unknown = sorted(str(key) for key in set(data) - _FIELDS)
    if unknown:
        raise ConfigError(
            f"recipe {file} has unknown keys: {', '.join(unknown)}",
            hint=f"known keys are {', '.join(sorted(_FIELDS))}",
        )
    for key in ("target", "drafter"):
        if not isinstance(data.get(key), str):
            raise ConfigError(f"recipe {file} has no {key}", hint=HOW_TO)
    vocab = data.get(DRAFT_VOCAB)
    if vocab is not None and not (isinstance(vocab, str) and vocab.strip() and vocab.isprintable()):
        raise ConfigError(
            f"recipe {file}: {DRAFT_VOCAB} is {vocab!r}, expected the name of a file", hint=HOW_TO
        )
    choices = {key: data[key] for key in CHOICES if key in data}
    chosen = None if vocab is None else file.parent / vocab
    return Recipe(file, data["target"], data["drafter"], choices, chosen)
