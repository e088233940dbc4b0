"""The KV-injection plugin's library: where a build finds it, and how TensorRT takes it.

Loading the library runs native code. `build` loads what its user names or has compiled; a session
loads the copy in the engine directory, and only if its sum is the one in the manifest.
"""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path
from typing import Any

import dflash_trt
from dflash_trt.errors import PluginError

log = logging.getLogger(__name__)

NAME, VERSION, NAMESPACE = "DFlashKvInject", "1", "dflash"  # as in plugins/trt/kv_inject_plugin.h
LIBRARY = "libdflash_trt_plugin.so"
VARIABLE = "DFLASH_TRT_PLUGIN"  # the environment variable that names a library
HOW_TO = "make plugins TENSORRT_ROOT=.. builds it; docs/plugin.md"

# Sums of the libraries that are in this process. TensorRT's registry takes a creator once, keeps
# it, and does not tell from which file it came.
_loaded: set[str] = set()


def find_library() -> Path | None:
    """The library that `$DFLASH_TRT_PLUGIN` names, else what `make plugins` left in this checkout.

    None where there is neither. A file that the variable names may not exist.
    """
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    built = built_library()
    return built if built.is_file() else None


def built_library() -> Path:
    """Where `make plugins` leaves the library."""
    return Path(dflash_trt.__file__).parents[1] / "build" / "plugins" / "cuda" / LIBRARY


def load_plugin(trt: Any, library: Path, expected_sha256: str | None = None) -> Any:
    """The plugin's creator in TensorRT's registry, from a library; its code runs in this process.

    Raises `PluginError` when the file cannot be read, has another sum than the expected one, is
    refused by TensorRT, or when another library with this plugin is in the process already.
    """
    try:
        found = hashlib.sha256(library.read_bytes()).hexdigest()
    except OSError as error:
        raise PluginError(f"{library} cannot be read: {error.strerror}", hint=HOW_TO) from error
    if expected_sha256 not in (None, found):
        raise PluginError(
            f"{library} is not loaded: it is not the file that was built, its SHA-256 differs",
            hint="build the engine again",
        )
    registry = trt.get_plugin_registry()
    creator = registry.get_creator(NAME, VERSION, NAMESPACE)
    if creator is not None:
        if found not in _loaded:
            raise PluginError(
                f"{library} cannot be loaded: this process has the plugin {NAME} {VERSION} of "
                "another library",
                hint="engines with different plugin libraries need a process each",
            )
        return creator
    # An absolute path: a bare name would be looked for in the system's library folders.
    is_loaded = registry.load_library(str(library.absolute())) is not None
    creator = registry.get_creator(NAME, VERSION, NAMESPACE) if is_loaded else None
    if creator is None:
        raise PluginError(
            f"{library} is not a library with the TensorRT plugin {NAME} {VERSION}", hint=HOW_TO
        )
    _loaded.add(found)
    log.info("loaded the plugin %s %s from %s, SHA-256 %s", NAME, VERSION, library, found)
    return creator
