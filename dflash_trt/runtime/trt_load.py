"""TensorRT's side of a session: an engine file on the GPU, and contexts that run its steps.

Both flavours are alike here but for what RTX adds: kernels compiled on this GPU, kept in a cache.
"""

from __future__ import annotations

import logging
import mmap
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from dflash_trt.cache_files import CacheKey, read_cache, write_cache
from dflash_trt.errors import EngineDirError, GpuError
from dflash_trt.flavor import create, make_logger
from dflash_trt.runtime.cuda import Cuda
from dflash_trt.runtime.trt_engine import Shape, StepContext, TensorInfo

log = logging.getLogger(__name__)

TYPES: Mapping[str, Any] = {
    "FLOAT": np.float32,
    "HALF": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "INT32": np.int32,
    "INT64": np.int64,
}


class TrtEngine:
    """A serialized engine, loaded by either flavour's runtime."""

    def __init__(self, trt: Any, file: Path, cuda: Cuda, engine_sha256: str) -> None:
        """Put the weights on the GPU. `trt` is the flavour's module.

        Raises `EngineDirError` when TensorRT refuses the file.
        """
        self._trt, self._cuda = trt, cuda
        self._messages: list[str] = []
        self._logger = _error_logger(trt, self._messages)
        self._runtime = create(trt.Runtime, self._logger)
        with file.open("rb") as stream, mmap.mmap(
            stream.fileno(), 0, access=mmap.ACCESS_READ
        ) as content:  # fmt: skip
            self._engine = self._runtime.deserialize_cuda_engine(content)
        if self._engine is None:
            raise EngineDirError(
                f"{file}: TensorRT {trt.__version__} cannot load it: {self._cause()}",
                hint="build the engine again on or for this machine",
            )
        self._compiled: Any = None
        self._stored = b""
        self._cache_file: Path | None = None
        self._is_unsaved, self._next_save = False, 0.0
        self._configs: dict[bool, Any] = {}
        if hasattr(trt, "IRuntimeCache"):  # RTX: kernels are compiled here, not at build time
            key = CacheKey("runtime", engine_sha256, cuda.uuid, trt.__version__)
            self._cache_file = key.path
            self._configs = {fixed: self._config(fixed) for fixed in (False, True)}
        self.tensors = tuple(
            self._tensor(self._engine.get_tensor_name(index))
            for index in range(self._engine.num_io_tensors)
        )

    @property
    def num_profiles(self) -> int:
        """See `LoadedEngine`."""
        return int(self._engine.num_optimization_profiles)

    def scratch_bytes(self, profile: int) -> int:
        """See `LoadedEngine`."""
        return int(self._engine.get_device_memory_size_for_profile_v2(profile))

    def context(self, profile: int, scratch: int, num_bytes: int, *, fixed: bool) -> StepContext:
        """See `LoadedEngine`."""
        self._messages.clear()  # what was said before is no reason
        how = self._configs.get(fixed, self._trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        made = self._engine.create_execution_context(how)
        if made is None:
            raise GpuError(f"TensorRT makes no execution context: {self._cause()}")
        if num_bytes:
            made.set_device_memory(scratch, num_bytes)
        if hasattr(made, "nvtx_verbosity"):  # else as detailed as the build's, which costs time
            made.nvtx_verbosity = self._trt.ProfilingVerbosity.NONE
        try:
            is_set = made.set_optimization_profile_async(profile, self._cuda.stream)
        except RuntimeError:  # how its binding says no
            is_set = False
        if not is_set:
            raise GpuError(f"TensorRT does not take profile {profile}: {self._cause()}")
        self._cuda.synchronize()
        return TrtContext(made, self._cuda.stream, self._messages)

    def save_compiled(self, is_new: bool) -> None:
        """See `LoadedEngine`. It takes a tenth of the time at most: the cache may be large."""
        self._is_unsaved |= is_new
        begun = time.monotonic()
        if self._cache_file is None or not self._is_unsaved or begun < self._next_save:
            return
        content = bytes(self._compiled.serialize())
        if content != self._stored:
            self._stored = content
            write_cache(self._cache_file, content)
        self._is_unsaved = False
        ended = time.monotonic()
        self._next_save = ended + 9 * (ended - begun)

    def _config(self, fixed: bool) -> Any:
        """RTX: how kernels are compiled for the shapes that a context meets.

        A captured graph keeps the kernels that it was captured with: they must be the final ones.
        Elsewhere a new shape must not wait for a compiler.
        """
        trt = self._trt
        config = self._engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(
            trt.ExecutionContextAllocationStrategy.USER_MANAGED
        )
        kinds = trt.DynamicShapesKernelSpecializationStrategy
        config.dynamic_shapes_kernel_specialization_strategy = kinds.EAGER if fixed else kinds.LAZY
        if self._compiled is None:
            assert self._cache_file is not None
            self._compiled = config.create_runtime_cache()
            self._stored = read_cache(self._cache_file)
            if self._stored and not self._compiled.deserialize(self._stored):
                log.info("%s is of another driver or GPU: kernels are compiled", self._cache_file)
        config.set_runtime_cache(self._compiled)
        return config

    def _tensor(self, name: str) -> TensorInfo:
        engine = self._engine
        kind = engine.get_tensor_dtype(name).name
        if kind not in TYPES:
            raise EngineDirError(f"the engine's {name} has type {kind}, which no session binds")
        is_input = engine.get_tensor_mode(name) == self._trt.TensorIOMode.INPUT
        most = (
            tuple(engine.get_tensor_profile_shape(name, profile)[2])
            for profile in range(self.num_profiles if is_input else 0)
        )
        return TensorInfo(
            name, is_input, np.dtype(TYPES[kind]), tuple(engine.get_tensor_shape(name)),
            tuple(tuple(int(n) for n in shape) for shape in most),
        )  # fmt: skip

    def _cause(self) -> str:
        return cause(self._messages)


class TrtContext:
    """One execution context on the session's stream."""

    def __init__(self, context: Any, stream: int, messages: list[str]) -> None:
        self._context, self._stream, self._messages = context, stream, messages

    def set_shape(self, name: str, shape: Shape) -> None:
        """See `StepContext`."""
        self._messages.clear()
        if not self._context.set_input_shape(name, shape):
            raise GpuError(
                f"TensorRT does not take shape {list(shape)} for {name}: {self._cause()}"
            )

    def set_address(self, name: str, address: int) -> None:
        """See `StepContext`."""
        if not self._context.set_tensor_address(name, address):
            raise GpuError(f"TensorRT does not take an address for {name}: {self._cause()}")

    def enqueue(self) -> None:
        """See `StepContext`."""
        self._messages.clear()
        if not self._context.execute_async_v3(self._stream):
            raise GpuError(f"TensorRT cannot run the step: {self._cause()}")

    @property
    def is_capturable(self) -> bool:
        """See `StepContext`."""
        ask = getattr(self._context, "is_stream_capturable", None)  # RTX only
        return ask is None or bool(ask(self._stream))

    def _cause(self) -> str:
        return cause(self._messages)


def cause(messages: list[str]) -> str:
    """TensorRT's first error since the last one that was told; the others follow from it."""
    told = messages[0] if messages else "it does not say why"
    messages.clear()
    return told


def _error_logger(trt: Any, messages: list[str]) -> Any:
    """A logger that keeps TensorRT's errors, which its functions do not return."""
    levels = {
        trt.ILogger.INTERNAL_ERROR: logging.ERROR,
        trt.ILogger.ERROR: logging.ERROR,
        trt.ILogger.WARNING: logging.WARNING,
        trt.ILogger.INFO: logging.DEBUG,
        trt.ILogger.VERBOSE: logging.DEBUG - 1,
    }

    def take(severity: Any, text: str) -> None:
        level = levels.get(severity, logging.DEBUG)
        if level >= logging.ERROR:
            messages.append(" ".join(text.split()))
        log.log(level, "%s", text)

    return make_logger(trt, take)
