"""Devices an engine can be built for, and TensorRT's two flavours; the one place that imports them.

`tensorrt` serves data-center GPUs and has plugins. `tensorrt_rtx` serves RTX GPUs, has none, and
builds where there is no GPU at all. Both have the same network API.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from dflash_trt.errors import ConfigError, MissingPackage
from dflash_trt.gpu import no_collection

Backend = Literal["onnxruntime", "tensorrt", "tensorrt_rtx"]
Compute = Literal["fp32", "fp16", "bf16"]

ONNXRUNTIME: Backend = "onnxruntime"
TENSORRT: Backend = "tensorrt"
TENSORRT_RTX: Backend = "tensorrt_rtx"
CPU = "cpu"
# Flavour -> extra of pyproject.toml.
EXTRAS: dict[str, str] = {TENSORRT: "tensorrt", TENSORRT_RTX: "tensorrt-rtx"}


@dataclass(frozen=True)
class Precision:
    """How an engine stores its linear weights, and the type that activations and caches have."""

    name: str
    compute: Compute
    needs: tuple[int, int]  # compute capability; (0, 0): the CPU's own

    @property
    def compute_bytes(self) -> int:
        """Bytes of an activation, and of a value in a cache."""
        return 4 if self.compute == "fp32" else 2


# Quantized engines compute in BF16: FP16 ends at 65504, and residual streams pass it.
PRECISION_TABLE = {
    p.name: p
    for p in (
        Precision("fp32", "fp32", (0, 0)),
        Precision("int4", "fp32", (0, 0)),
        Precision("bf16", "bf16", (8, 0)),
        Precision("fp16", "fp16", (7, 5)),
        Precision("fp8", "bf16", (8, 9)),
        Precision("nvfp4", "bf16", (10, 0)),
    )
}
PRECISIONS = tuple(PRECISION_TABLE)


@dataclass(frozen=True)
class Device:
    """What an engine is built for: the CPU, or GPUs of one compute capability."""

    name: str
    backend: Backend
    capability: tuple[int, int]  # (0, 0) for the CPU

    @property
    def is_gpu(self) -> bool:
        """Whether TensorRT runs the engine."""
        return self.backend != ONNXRUNTIME

    @property
    def has_plugins(self) -> bool:
        """Whether engines can have layers of plugins."""
        return self.backend == TENSORRT

    @property
    def precisions(self) -> tuple[str, ...]:
        """Names of the precisions that this device can do; the first one is the default."""
        return tuple(
            p.name
            for p in PRECISION_TABLE.values()
            if (p.needs != (0, 0)) == self.is_gpu and p.needs <= self.capability
        )


DEVICE_TABLE = {
    device.name: device
    for device in (
        Device(CPU, ONNXRUNTIME, (0, 0)),
        Device("sm86", TENSORRT_RTX, (8, 6)),
        Device("sm89", TENSORRT_RTX, (8, 9)),
        Device("sm90", TENSORRT, (9, 0)),
        Device("sm100", TENSORRT, (10, 0)),
        Device("sm103", TENSORRT, (10, 3)),
        Device("sm120", TENSORRT_RTX, (12, 0)),
        Device("sm121", TENSORRT_RTX, (12, 1)),
    )
}
DEVICES = tuple(DEVICE_TABLE)


def device_of(name: str) -> Device:
    """The device of a name. Raises `ConfigError` listing the known ones."""
    if name not in DEVICES:  # a tuple: a name from a recipe may be unhashable
        raise ConfigError(f"device {name!r} is not one of {', '.join(DEVICES)}", choice="device")
    return DEVICE_TABLE[name]


def precision_on(device: Device, name: str) -> Precision:
    """The precision of a name, if the device can do it. Raises `ConfigError` that says why not."""
    if name not in PRECISIONS:
        raise ConfigError(
            f"precision {name!r} is not one of {', '.join(PRECISIONS)}", choice="precision"
        )
    if name in device.precisions:
        return PRECISION_TABLE[name]
    needs = PRECISION_TABLE[name].needs
    if device.is_gpu and needs != (0, 0):
        reason = f"needs compute capability {version(needs)}, {device.name} has "
        reason += version(device.capability)
    else:
        reason = f"is not for device {device.name}"
    raise ConfigError(
        f"precision {name} {reason}",
        hint=f"{device.name} can do {', '.join(device.precisions)}",
        choice="precision",
    )


_LOGGERS: list[Any] = []


def make_logger(trt: Any, log: Callable[[Any, str], None]) -> Any:
    """A logger of TensorRT's that calls `log(severity, text)`, for as long as the process lives.

    TensorRT keeps a pointer to the first one that it gets, and may use it for all that follows.
    """

    class Logger(trt.ILogger):  # type: ignore[misc]  # trt is a value: the base class is Any
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, text: str) -> None:
            log(severity, text)

    _LOGGERS.append(Logger())
    return _LOGGERS[-1]


def create(kind: Callable[[Any], Any], logger: Any) -> Any:
    """A builder or a runtime of TensorRT's (`kind`).

    While it makes one, TensorRT holds a lock that it also takes to free one, and a logger in Python
    gives the garbage collector an occasion in between: it would wait for itself.
    """
    with no_collection():
        return kind(logger)


def version(capability: tuple[int, int]) -> str:
    """`12.0` for (12, 0)."""
    return f"{capability[0]}.{capability[1]}"


def load_flavor(flavor: str) -> Any:
    """TensorRT's module of a flavour. Raises `MissingPackage` that names the extra to install."""
    try:
        module = importlib.import_module(flavor)
    except (ImportError, OSError) as error:  # OSError: its shared libraries cannot be loaded
        reason = " ".join(str(error).split())
        raise MissingPackage(
            f"TensorRT's package {flavor} cannot be used: {reason}",
            hint=f"pip install 'dflash-trt[{EXTRAS[flavor]}]'",
        ) from error
    if not hasattr(module, "Builder"):  # bindings without libraries, or another package
        raise MissingPackage(
            f"the package {flavor} at {getattr(module, '__file__', None)} is not TensorRT",
            hint=f"pip install 'dflash-trt[{EXTRAS[flavor]}]'",
        )
    return module
