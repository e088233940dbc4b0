"""The demo pair's target: a file of a package, found where it is installed."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from dflash_trt.build.recipe import find_recipe
from dflash_trt.checkpoint.locate import PACKAGE, locate

RECIPE = "smollm2-135m"


def find_demo_target() -> Path:
    """The recipe's target. Skips without its package; a package that lacks the file is a fault."""
    recipe = find_recipe(RECIPE)
    assert recipe is not None
    name = recipe.target.removeprefix(PACKAGE).partition("/")[0]
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"needs the package {name}: make demo")
    return locate(recipe.target, recipe.base)
