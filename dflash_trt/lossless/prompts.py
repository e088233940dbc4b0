"""Prompts to verify and measure with: the bundled ones by class, or a file of the user's."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import yaml

from dflash_trt.errors import ConfigError

BUNDLED = "prompts.yaml"


def bundled_prompts() -> dict[str, list[str]]:
    """Prompt class (`code`, `chat`, `held_out`) -> prompts."""
    text = (resources.files("dflash_trt.lossless") / BUNDLED).read_text(encoding="utf-8")
    data: dict[str, list[str]] = yaml.safe_load(text)
    return data


def interleaved(classes: dict[str, list[str]]) -> list[str]:
    """One prompt of each class in turn, so that any leading part is mixed."""
    longest = max(len(prompts) for prompts in classes.values())
    return [prompts[i] for i in range(longest) for prompts in classes.values() if i < len(prompts)]


def read_prompts(file: Path) -> list[tuple[int, str]]:
    """Prompts of a text file with their line numbers, one a line; blank lines are passed over.

    Raises `ConfigError` when the file cannot be read or has none.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"prompts {file} cannot be read: {error}", hint="give a UTF-8 text file"
        ) from error
    prompts = [(i, line.strip()) for i, line in enumerate(lines, start=1) if line.strip()]
    if not prompts:
        raise ConfigError(f"prompts {file} has no prompts", hint="write one prompt a line")
    return prompts
