"""Which way an engine writes the drafter's caches: the plugin, or native layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash_trt.errors import ConfigError
from dflash_trt.flavor import PRECISION_TABLE, Device, load_flavor
from dflash_trt.kv_plugin import find_library, load_plugin
from dflash_trt.lower.trt_plugin import HEAD_DIMS, has_kernel

AUTO, OFF = "auto", "off"


def choose_plugin(choice: str, device: Device, precision: str, head_dim: int) -> Path | None:
    """The plugin library that a build uses, loaded to see that it can be; None for native layers.

    `auto` takes the library that `find_library` finds, where the plugin has a kernel; `off` none;
    a path is required. Raises `ConfigError` where the plugin cannot serve this engine,
    `PluginError` for a library that cannot be loaded.
    """
    is_required = choice not in (AUTO, OFF)
    if choice == OFF or not (is_required or device.has_plugins):
        return None
    if not device.has_plugins:
        raise ConfigError(
            f"plugin is {choice}: engines for {device.name} run on {device.backend}, which has no "
            "plugin layers",
            hint="leave --plugin out: native layers do the same",
        )
    if not has_kernel(head_dim, PRECISION_TABLE[precision].compute):
        if not is_required:
            return None
        dims = ", ".join(map(str, HEAD_DIMS))
        raise ConfigError(
            f"plugin is {choice}: it has kernels for head_dim {dims}, the drafter has {head_dim}",
            hint="leave --plugin out: native layers do the same",
        )
    library = Path(choice) if is_required else find_library()
    if library is not None:
        trt: Any = load_flavor(device.backend)
        load_plugin(trt, library)
    return library
