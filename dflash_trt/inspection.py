"""What an engine directory is, as plain types: its facts, files, and what TensorRT says of it."""

from __future__ import annotations

import dataclasses
import json
import mmap
from collections import Counter
from collections.abc import Iterable
from typing import Any

from dflash_trt import contract
from dflash_trt.engine_dir import (
    ENGINE,
    LAYERS,
    MANIFEST,
    REBUILD,
    EngineDir,
    read_extra,
    sha256,
)
from dflash_trt.errors import EngineDirError, MissingPackage
from dflash_trt.flavor import TENSORRT_RTX, create, device_of, load_flavor, make_logger, version
from dflash_trt.lossless.certificate import STORED_AS

# What hand-made JSON in the place of ours ends in.
_UNREADABLE = (
    OSError, AttributeError, ValueError, KeyError, TypeError, OverflowError, RecursionError,
)  # fmt: skip


def describe(engine: EngineDir) -> dict[str, Any]:
    """Everything `inspect` shows. Raises `EngineDirError` for a `layers.json` that is not one."""
    config = engine.config
    rows = contract.cache_rows(config.choices.max_seq_len, config.choices.block)
    caches = contract.all_caches(config.pair)
    device = device_of(config.choices.device)
    return {
        **_records(engine.manifest),
        "engine": str(engine.path),
        "backend": config.backend,
        "choices": dataclasses.asdict(config.choices),
        "max_drafts": config.choices.block - 1,
        "kv_injection": config.kv_injection,
        "target": dataclasses.asdict(config.pair.target),
        "drafter": dataclasses.asdict(config.pair.drafter),
        "context_feature": {
            f"target layer {i}": f"output of target.layers.{i} (before layer {i + 1} or the norm)"
            for i in config.pair.drafter.target_layer_ids
        },
        "caches": {
            "count": len(caches),
            "rows": rows,
            "bytes_per_slot": contract.cache_bytes_per_slot(config.pair, config.choices),
        },
        "certificate": _certificate(engine),
        "tensorrt": _tensorrt(engine) if device.is_gpu else None,
    }


def _records(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest; its `sources` and `versions`, which no reader depends on, without nonsense."""
    sources, versions = (
        found if isinstance(found := manifest.get(key), dict) else {}
        for key in ("sources", "versions")
    )
    known = {side: entry for side, entry in sources.items() if isinstance(entry, dict)}
    return {**manifest, "sources": known, "versions": versions}


def _certificate(engine: EngineDir) -> dict[str, Any] | None:
    """The verdict of a lossless certificate that is kept in the directory."""
    data = read_extra(engine.path / STORED_AS)
    if data is None or not {"engine_sha256", "lossless"} <= data.keys():
        return None
    stands = data["engine_sha256"] == sha256(engine.path / MANIFEST)
    return {"lossless": data["lossless"], "is_of_this_engine": stands}


def _tensorrt(engine: EngineDir) -> dict[str, Any]:
    config = engine.config
    caches = {spec.name for spec in contract.all_caches(config.pair)}
    try:
        layers = json.loads((engine.path / LAYERS).read_bytes())
        network = engine.manifest["network"]
        return {
            "version": config.tensorrt_version,
            "compute_capability": version(device_of(config.choices.device).capability),
            "layers": int(network["layers"]),
            "sha256": str(network["sha256"]),
            "profiles": {
                str(profile["name"]): {
                    str(dim): [int(least), int(most)]
                    for dim, (least, _, most) in profile["dims"].items()
                }
                for profile in network["profiles"]
            },
            "step": _step(layers, caches),
            "kernels": {
                "count": len(layers["layers"]),
                "types": _counted(kernel["type"] for kernel in layers["layers"]),
                "weights": _counted(t for kernel in layers["layers"] for t in kernel["constants"]),
            },
            "check": check_of_tensorrt(engine),
        }
    except _UNREADABLE as error:
        raise EngineDirError(
            f"{engine.path}: what TensorRT said of the engine cannot be read: {error!r}",
            hint=REBUILD,
        ) from error


def _counted(things: Iterable[str]) -> dict[str, int]:
    return dict(Counter(things).most_common())


def _step(layers: dict[str, Any], caches: set[str]) -> dict[str, Any]:
    """What a step crosses: how many engines, which tensors, and where they are."""
    names: dict[str, list[str]] = {"input": [], "output": []}
    for tensor in layers["tensors"]:
        names[tensor["mode"]].append(tensor["name"])
    updated = {contract.UPDATED + name for name in caches}
    return {
        "engines": layers["engines"],
        "inputs": [name for name in names["input"] if name not in caches],
        "outputs": [name for name in names["output"] if name not in updated],
        "caches_in_place": len(updated & set(names["output"]) & {
            contract.UPDATED + name for name in names["input"]
        }),
        "on_host": [
            tensor["name"]
            for tensor in layers["tensors"]
            if tensor["location"] != "device" or tensor["is_shape"]
        ],
    }  # fmt: skip


def check_of_tensorrt(engine: EngineDir) -> str:
    """What TensorRT's own validity check says of the engine file on this machine, in words."""
    backend = engine.config.backend
    try:
        trt = load_flavor(backend)
    except MissingPackage:
        return f"not asked: {backend} is not installed here"
    if backend != TENSORRT_RTX:
        return f"not asked: {backend} has no such check"
    runtime = create(trt.Runtime, make_logger(trt, lambda *_: None))  # only its verdict counts
    with (
        (engine.path / ENGINE).open("rb") as stream,
        mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        verdict, flags = runtime.get_engine_validity(content)
    if verdict == trt.EngineValidity.VALID:
        return "valid on this machine"
    kinds = trt.EngineInvalidityDiagnostics.__members__.items()
    reasons = [name.lower().replace("_", " ") for name, kind in kinds if flags & int(kind)]
    if reasons:
        return f"{verdict.name.lower()} on this machine: {', '.join(reasons)}"
    # It compares the header first, then the GPU; without one it ends there and gives no reason.
    return "its header is one of this version; there is no GPU here to compare with"
