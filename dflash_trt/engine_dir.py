"""The engine directory: what `build` writes and everything else loads. docs/engine-format.md.

`config.json` is written last: a directory without it is not an engine, however far a build came.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from dflash_trt import swap
from dflash_trt.config import BuildChoices, PairConfig
from dflash_trt.errors import BuildError, ConfigError, EngineDirError
from dflash_trt.flavor import ONNXRUNTIME, TENSORRT, TENSORRT_RTX, device_of, version
from dflash_trt.kv_plugin import LIBRARY

FORMAT = "dflash-trt"
FORMAT_VERSION = 2
CONFIG = "config.json"
MANIFEST = "manifest.json"
MODEL = "step.onnx"
WEIGHTS = "weights.bin"
ENGINE = "rank0.engine"
LAYERS = "layers.json"
NATIVE_LAYERS, BY_PLUGIN = "native layers", "plugin"  # how the drafter's caches are written
MAX_EXTRA_BYTES = 16 << 20  # of a file that the manifest does not list
MAX_DEPTH = 2  # files may lie in folders (extra chat templates), not deeper
REBUILD = "build the engine again"
# What a directory must hold besides its config, by backend; the first one is the step graph.
NEEDED: dict[str, tuple[str, str]] = {
    ONNXRUNTIME: (MODEL, WEIGHTS),
    TENSORRT: (ENGINE, LAYERS),
    TENSORRT_RTX: (ENGINE, LAYERS),
}
_CONFIG_DRAFT = f".{CONFIG}"  # the config of a build that has not finished


@dataclass(frozen=True)
class EngineConfig:
    """Everything needed to run an engine besides the files that `config.json` stands beside."""

    backend: str  # a `flavor.Backend`
    choices: BuildChoices
    pair: PairConfig
    tensorrt_version: str | None = None  # of the flavour that built it; None for ONNX Runtime
    kv_injection: str = NATIVE_LAYERS

    @property
    def needed(self) -> tuple[str, ...]:
        """Names of the files that the engine cannot run without."""
        plugin = (LIBRARY,) if self.kv_injection == BY_PLUGIN else ()
        return (CONFIG, *NEEDED[self.backend], *plugin)

    def to_json(self) -> dict[str, Any]:
        """The content of `config.json`."""
        data = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "backend": self.backend,
            "choices": dataclasses.asdict(self.choices),
            "pair": self.pair.to_json(),
        }
        if self.tensorrt_version is not None:
            capability = version(device_of(self.choices.device).capability)
            data["tensorrt"] = {
                "version": self.tensorrt_version, "compute_capability": capability,
                "kv_injection": self.kv_injection,
            }  # fmt: skip
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any], where: Path) -> EngineConfig:
        """Inverse of `to_json`. Raises `EngineDirError` naming the file."""
        if data.get("format") != FORMAT:
            raise EngineDirError(
                f"{where} is not the config of a dflash-trt engine",
                hint="give the folder that build wrote",
            )
        if data.get("format_version") != FORMAT_VERSION:
            raise EngineDirError(
                f"{where} has engine format version {data.get('format_version')!r}, "
                f"this program reads version {FORMAT_VERSION}",
                hint=REBUILD,
            )
        backend = data.get("backend")
        if not isinstance(backend, str) or backend not in NEEDED:
            raise EngineDirError(
                f"{where} is for backend {backend!r}, this program runs {', '.join(NEEDED)}",
                hint=REBUILD,
            )
        try:
            config = cls(
                backend=backend,
                choices=BuildChoices(**data["choices"]),
                pair=PairConfig.from_json(data["pair"]),
                tensorrt_version=_tensorrt_version(data),
                kv_injection=_kv_injection(data),
            )
        except (KeyError, TypeError, ConfigError) as error:
            raise EngineDirError(f"{where} cannot be read: {error}", hint=REBUILD) from error
        if device_of(config.choices.device).backend != backend:
            raise EngineDirError(
                f"{where} says device {config.choices.device} and backend {backend}, "
                "which do not belong together",
                hint=REBUILD,
            )
        return config


def _tensorrt_version(data: dict[str, Any]) -> str | None:
    """Raises `ConfigError` unless exactly an engine of TensorRT says which one built it."""
    if data["backend"] == ONNXRUNTIME:
        return None
    found = data["tensorrt"]["version"]
    if not isinstance(found, str):
        raise ConfigError(f"tensorrt version is {found!r}")
    return found


def _kv_injection(data: dict[str, Any]) -> str:
    """Raises `ConfigError` for a way that there is not, or that the backend does not have."""
    if data["backend"] == ONNXRUNTIME:
        return NATIVE_LAYERS
    found = data["tensorrt"].get("kv_injection", NATIVE_LAYERS)
    if found == BY_PLUGIN and data["backend"] == TENSORRT:
        return BY_PLUGIN
    if found != NATIVE_LAYERS:
        raise ConfigError(f"kv_injection of {data['backend']} is {found!r}")
    return NATIVE_LAYERS


@dataclass(frozen=True)
class EngineDir:
    """An engine directory that was opened and checked."""

    path: Path
    config: EngineConfig
    manifest: dict[str, Any]

    @property
    def model(self) -> Path:
        """The step graph: an ONNX model, or TensorRT's serialized engine."""
        return self.path / NEEDED[self.config.backend][0]

    @property
    def plugin(self) -> Path | None:
        """The library of the KV-injection plugin, which the step graph needs; None without."""
        return self.path / LIBRARY if self.config.kv_injection == BY_PLUGIN else None

    def check_runs_on(self, tensorrt_version: str, capability: tuple[int, int]) -> None:
        """Refuse another TensorRT or GPU than the engine was built for, before anything loads.

        Raises `EngineDirError` with both sides. TensorRT itself would take seconds, or crash.
        """
        device = device_of(self.config.choices.device)
        if tensorrt_version != self.config.tensorrt_version:
            raise EngineDirError(
                f"{self.path} was built by {self.config.backend} {self.config.tensorrt_version}, "
                f"this machine has {tensorrt_version}",
                hint=f"install {self.config.backend} {self.config.tensorrt_version}, or {REBUILD}",
            )
        if capability != device.capability:
            raise EngineDirError(
                f"{self.path} was built for compute capability {version(device.capability)}, "
                f"this GPU has {version(capability)}",
                hint="build with the --device of this GPU",
            )


def open_engine(path: Path, *, check_hashes: bool = True) -> EngineDir:
    """Open an engine directory; every listed file must be there, whole and unchanged.

    Raises `EngineDirError` that names the file. `check_hashes=False` compares sizes only.
    """
    if not (path / CONFIG).is_file():
        earlier = swap.left_aside(swap.real_path(path))
        if earlier is not None:
            raise EngineDirError(
                f"{path} is being replaced, or the build that did so was killed",
                hint=f"run dflash-trt build again; the engine before it is whole in {earlier}",
            )
        if not path.is_dir():
            raise EngineDirError(f"{path} is not a folder", hint="give the folder that build wrote")
        raise EngineDirError(
            f"{path} has no {CONFIG}: it is not an engine, or its build did not finish",
            hint="run dflash-trt build again",
        )
    config_bytes = _read(path / CONFIG)
    config = EngineConfig.from_json(_parse(config_bytes, path / CONFIG), path / CONFIG)
    manifest = _parse(_read(path / MANIFEST), path / MANIFEST)
    files = manifest.get("files")
    if not isinstance(files, dict):
        raise EngineDirError(f"{path / MANIFEST} lists no files", hint=REBUILD)
    for name in config.needed:
        if name not in files:
            raise EngineDirError(f"{path / MANIFEST} does not list {name}", hint=REBUILD)
    for name, entry in files.items():
        _check_file(path, name, entry, check_hashes or name == CONFIG)
    return EngineDir(path, config, manifest)


def _check_file(path: Path, name: str, entry: object, check_hash: bool) -> None:
    relative = PurePosixPath(name)
    # Only the one spelling that the writer uses: no parents, no root, no dots.
    is_plain = str(relative) == name and not {".", "..", "/"} & {name, *relative.parts}
    if not is_plain or len(relative.parts) > MAX_DEPTH:
        raise EngineDirError(f"{path / MANIFEST} names {name!r}, which is not a file of the engine")
    if not isinstance(entry, dict):
        raise EngineDirError(f"{path / MANIFEST} has no sum of {name!r}", hint=REBUILD)
    file = path / name
    try:
        if not file.is_file():
            raise EngineDirError(f"{file} is missing", hint=REBUILD)
        size = file.stat().st_size
        if size != entry.get("bytes"):
            raise EngineDirError(
                f"{file} has {size} bytes, the manifest says {entry.get('bytes')!r}", hint=REBUILD
            )
        is_changed = check_hash and sha256(file) != entry.get("sha256")
    except (OSError, ValueError) as error:
        raise EngineDirError(f"{str(file)!r} cannot be read: {error}", hint=REBUILD) from error
    if is_changed:
        raise EngineDirError(
            f"{file} is not the file that was built: its SHA-256 differs", hint=REBUILD
        )


def read_extra(file: Path) -> dict[str, Any] | None:
    """The JSON object in a file that the manifest does not list; None where there is none.

    Anything may stand under such a name: a pipe would never end, a device never be whole.
    """
    try:
        if not file.is_file() or file.stat().st_size > MAX_EXTRA_BYTES:
            return None
        return _parse(_read(file), file)
    except (OSError, EngineDirError):
        return None


def sha256(file: Path) -> str:
    """Hex digest of a file, read in pieces."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextlib.contextmanager
def writing_engine(
    path: Path, config: EngineConfig, manifest: dict[str, Any], *, force: bool
) -> Iterator[Path]:
    """A temporary folder beside `path` to write files into; on leaving it becomes the engine.

    On any error nothing is left. Raises `BuildError` when `path` exists (unless `force` and it is
    an engine), or when the disk is full or not writable.
    """
    path = swap.real_path(path)
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            swap.clean_up(path, _is_engine, _is_unfinished)
            _refuse_existing(path, force)
            temporary = stack.enter_context(swap.building(path))
        except OSError as error:
            raise BuildError(
                f"{path.parent} cannot be written: {error.strerror}",
                hint="choose another output folder",
            ) from error
        try:
            yield temporary
            _finish(temporary, path, config, manifest, force)
        except OSError as error:
            raise BuildError(
                f"writing {path} failed: {error.strerror or error}",
                hint="free space or choose another output folder; nothing was left behind",
            ) from error


def _refuse_existing(path: Path, force: bool) -> None:
    if not path.exists() or _is_unfinished(path):
        return
    if not swap.may_replace(path, _is_engine):
        raise BuildError(
            f"{path} exists and is not an engine: it is not replaced",
            hint="choose another --output",
        )
    if not force:
        raise BuildError(f"{path} exists", hint="pass --force to replace it, or another --output")


def _is_engine(path: Path) -> bool:
    """Whether a folder is ours to replace: a checkpoint has a `config.json` too."""
    try:
        return _parse(_read(path / CONFIG), path / CONFIG).get("format") == FORMAT
    except EngineDirError:
        return False


def _is_unfinished(path: Path) -> bool:
    """Whether a build was killed between its last two steps: everything but the config's name."""
    return (path / _CONFIG_DRAFT).is_file() and not (path / CONFIG).exists()


def _finish(
    temporary: Path, path: Path, config: EngineConfig, manifest: dict[str, Any], force: bool
) -> None:
    config_bytes = _dump(config.to_json())
    written = [file for file in sorted(temporary.rglob("*")) if file.is_file()]
    files = {
        file.relative_to(temporary).as_posix(): {
            "bytes": file.stat().st_size,
            "sha256": sha256(file),
        }
        for file in written
    }
    files[CONFIG] = {
        "bytes": len(config_bytes),
        "sha256": hashlib.sha256(config_bytes).hexdigest(),
    }
    (temporary / MANIFEST).write_bytes(_dump({**manifest, "files": files}))
    (temporary / _CONFIG_DRAFT).write_bytes(config_bytes)
    for file in (*temporary.rglob("*"), temporary):
        _sync(file)
    temporary.chmod(0o755)  # mkdtemp makes it private
    _refuse_existing(path, force)
    with swap.set_aside(path):
        temporary.rename(path)
        try:
            (path / _CONFIG_DRAFT).rename(path / CONFIG)
            _sync(path)
            _sync(path.parent)
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _dump(data: dict[str, Any]) -> bytes:
    return (json.dumps(data, indent=2) + "\n").encode()


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise EngineDirError(f"{file} cannot be read: {error.strerror}", hint=REBUILD) from error


def _parse(content: bytes, file: Path) -> dict[str, Any]:
    try:
        data = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise EngineDirError(f"{file} is not JSON: {error}", hint=REBUILD) from error
    if not isinstance(data, dict):
        raise EngineDirError(f"{file} is not a JSON object", hint=REBUILD)
    return data
