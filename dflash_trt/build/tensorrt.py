"""From a network definition to a serialized engine on disk, with either flavour of TensorRT."""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

from dflash_trt import contract
from dflash_trt.build.heap import return_large_blocks
from dflash_trt.build.network_hash import hash_network
from dflash_trt.build.trt_layers import read_layers
from dflash_trt.build.trt_log import Messages, logger_into, make_monitor
from dflash_trt.cache_files import CacheKey, read_cache, write_cache
from dflash_trt.errors import BuildError, ConfigError, GpuError
from dflash_trt.flavor import TENSORRT, TENSORRT_RTX, Device, create, load_flavor, version
from dflash_trt.gpu import first_gpu, load_runtime

Report = Callable[[str, float], None]  # phase of the build, fraction of the whole
POLL_SECONDS = 0.05


@dataclass(frozen=True)
class BuiltEngine:
    """What is known of an engine once it is on disk."""

    network_sha256: str
    num_layers: int  # of the network definition
    tensors: list[dict[str, Any]]  # its inputs and outputs, with the names of their dims
    layers: dict[str, Any]  # the content of layers.json
    warnings: tuple[str, ...]


def check_buildable(device: Device) -> dict[str, str]:
    """Versions of the packages that would build for a device, before anything else is read.

    Raises `MissingPackage` without its flavour, `ConfigError` where that flavour cannot build.
    """
    trt = load_flavor(device.backend)
    if device.backend == TENSORRT:
        _check_gpu(device)
    elif not hasattr(trt.ComputeCapability, device.name.upper()):
        raise ConfigError(f"{device.backend} {trt.__version__} does not build for {device.name}")
    return {device.backend: trt.__version__}


def _check_gpu(device: Device) -> None:
    """The data-center flavour builds for the GPU that is there, whatever it is asked for."""
    hint = f"build on a machine with an {device.name} GPU"
    try:
        found = first_gpu(load_runtime())
    except GpuError as error:
        raise ConfigError(
            f"{device.backend} builds for {device.name} on such a GPU only: {error.message}", hint
        ) from error
    if found.capability != device.capability:
        raise ConfigError(
            f"{device.backend} builds for the GPU that it runs on: {device.name} has compute "
            f"capability {version(device.capability)}, the {found.name} here "
            f"{version(found.capability)}",
            hint,
        )


def build_engine(
    trt: Any,
    device: Device,
    define: Callable[[Any], Sequence[npt.NDArray[Any]]],
    profiles: Sequence[contract.Profile],
    file: Path,
    report: Report,
) -> BuiltEngine:
    """Write the engine of the network that `define(network)` fills; one profile per `profiles`.

    `define` returns the arrays that the network points at: they are kept until the build is over.
    Ctrl-C ends the build at TensorRT's next step. Raises `BuildError` with TensorRT's first error,
    `OSError` when the file cannot be written, and what `define` raises.
    """
    return_large_blocks()
    # The RTX flavour builds without a driver, and each of its calls says that there is none.
    messages = Messages(needs_driver=device.backend == TENSORRT)
    try:
        builder = create(trt.Builder, logger_into(trt, messages))
    except TypeError as error:  # what its bindings raise where CUDA does not start
        raise BuildError(
            f"TensorRT {trt.__version__} does not start: {messages.cause}",
            hint="dflash-trt doctor says what is missing",
        ) from error
    flags = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(flags)
    try:
        kept = define(network)
    except BuildError as error:
        if not messages.errors:
            raise
        raise BuildError(f"{error.message}: {messages.cause}", error.hint) from error
    with messages.muted():
        digest = hash_network(trt, network, kept, profiles)
    config = _configure(trt, builder, device)
    for profile in profiles:
        config.add_optimization_profile(_profile(builder, network, profile))
    cache = _timing_cache(trt, config, device, digest)
    _run(trt, builder, network, config, file, messages, report)
    if cache is not None and (timings := config.get_timing_cache()) is not None:
        write_cache(cache, bytes(timings.serialize()))
    return BuiltEngine(
        network_sha256=digest,
        num_layers=network.num_layers,
        tensors=_tensors(network),
        layers=read_layers(messages.layers, messages.num_engines),
        warnings=tuple(messages.warnings),
    )


def _configure(trt: Any, builder: Any, device: Device) -> Any:
    config = builder.create_builder_config()
    # Names and types of every kernel, for `inspect`; the kernels themselves are the same.
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if device.backend == TENSORRT_RTX:
        config.num_compute_capabilities = 1
        config.set_compute_capability(getattr(trt.ComputeCapability, device.name.upper()), 0)
        # An engine that allocated memory while it runs could not become part of a CUDA graph.
        config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
    return config


def _profile(builder: Any, network: Any, profile: contract.Profile) -> Any:
    made = builder.create_optimization_profile()
    for name, shapes in profile_shapes(network, profile).items():
        made.set_shape(name, *shapes)
    return made


def profile_shapes(
    network: Any, profile: contract.Profile
) -> dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """(least, tuned for, most) shape of each network input in a profile."""
    shapes = {}
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        ranges = [
            profile.dims[tensor.get_dimension_name(axis)] if size < 0 else (size, size, size)
            for axis, size in enumerate(tensor.shape)
        ]
        least, tuned, most = (tuple(r[i] for r in ranges) for i in range(3))
        shapes[tensor.name] = (least, tuned, most)
    return shapes


def _tensors(network: Any) -> list[dict[str, Any]]:
    """Name, mode, type and dims of each input and output; a dim that varies goes by its name."""
    modes = {
        "input": (network.num_inputs, network.get_input),
        "output": (network.num_outputs, network.get_output),
    }
    return [
        {
            "name": tensor.name,
            "mode": mode,
            "dtype": tensor.dtype.name.lower(),
            "dims": [
                size if size >= 0 else tensor.get_dimension_name(axis) or "any"
                for axis, size in enumerate(tensor.shape)
            ],
        }
        for mode, (count, get) in modes.items()
        for tensor in map(get, range(count))
    ]


def _timing_cache(trt: Any, config: Any, device: Device, digest: str) -> Path | None:
    """Set what an earlier build of this network measured on this GPU, and say where it is kept.

    RTX engines are built without timing. A file that TensorRT refuses is as good as none.
    """
    if device.backend == TENSORRT_RTX:
        return None
    path = CacheKey("timing", digest, first_gpu(load_runtime()).uuid, trt.__version__).path
    for content in (read_cache(path), b""):
        cache = config.create_timing_cache(content)
        if cache is not None and config.set_timing_cache(cache, ignore_mismatch=False):
            return path
    return None


def _run(
    trt: Any, builder: Any, network: Any, config: Any, file: Path, messages: Messages,
    report: Report,
) -> None:  # fmt: skip
    """Build in a thread of its own.

    Python handles signals in the main thread, between its own instructions: were that thread inside
    TensorRT, a KeyboardInterrupt would rise in a callback and fly through C++.
    """
    cancelled, ended = threading.Event(), threading.Event()
    monitor = make_monitor(trt, report, cancelled.is_set)
    config.progress_monitor = monitor
    outcome: list[bool] = []
    with file.open("wb", buffering=0) as stream:
        writer = _make_writer(trt, stream)

        def work() -> None:
            try:
                done = builder.build_serialized_network_to_stream(network, config, writer)
                outcome.append(bool(done))
            finally:
                ended.set()

        thread = threading.Thread(target=work, name="tensorrt-build")
        thread.start()
        # Not thread.join: an interrupted join takes a running thread for an ended one.
        try:
            while not ended.wait(POLL_SECONDS):
                pass
        finally:
            cancelled.set()
            while not ended.is_set():
                with contextlib.suppress(KeyboardInterrupt):  # impatience: it is ending already
                    ended.wait()
        thread.join()
    if writer.error is not None:
        raise writer.error
    if outcome != [True]:
        raise _refused(trt, messages)


def _refused(trt: Any, messages: Messages) -> BuildError:
    return BuildError(f"TensorRT {trt.__version__} cannot build the engine: {messages.cause}")


def _make_writer(trt: Any, stream: io.RawIOBase | io.FileIO) -> Any:
    """TensorRT's stream writer onto a file: the engine is never whole in memory."""

    class Writer(trt.IStreamWriter):  # type: ignore[misc]  # trt is a value: the base class is Any
        def __init__(self) -> None:
            trt.IStreamWriter.__init__(self)
            self.error: OSError | None = None

        def write(self, data: bytes) -> int:
            left = memoryview(data)
            try:
                while left:
                    left = left[stream.write(left) or 0 :]
            except OSError as error:  # it cannot cross C++: kept, and the build ends by the count
                self.error = error
                return 0
            return len(data)

    return Writer()
