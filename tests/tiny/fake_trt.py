"""TensorRT's runtime as a stand-in, and an engine directory that only it can load.

Its classes are specified by the real ones of `tensorrt_rtx`: a method that does not exist there
fails.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import tensorrt_rtx

from dflash_trt.config import BuildChoices, PairConfig
from dflash_trt.engine_dir import (
    BY_PLUGIN,
    ENGINE,
    LAYERS,
    NATIVE_LAYERS,
    EngineConfig,
    EngineDir,
    open_engine,
    writing_engine,
)
from dflash_trt.flavor import device_of
from dflash_trt.kv_plugin import LIBRARY
from tiny.fake_gpu import FakeEngine

CONTENT = b"no engine" * 100


def hollow_directory(
    facts: PairConfig, folder: Path, version: str = tensorrt_rtx.__version__,
    plugin: bytes | None = None, **choices: Any,
) -> EngineDir:  # fmt: skip
    """An engine directory for a GPU whose engine file holds nothing of use.

    `plugin`: the content of its plugin library, None for native layers.
    """
    base: dict[str, Any] = {
        "block": 4, "max_seq_len": 96, "max_slots": 3, "prefill_chunk": 8, "device": "sm120",
        "precision": "bf16", "logits": False,
    }  # fmt: skip
    chosen = BuildChoices(**{**base, **choices})
    way = NATIVE_LAYERS if plugin is None else BY_PLUGIN
    config = EngineConfig(device_of(chosen.device).backend, chosen, facts, version, way)
    with writing_engine(folder, config, {}, force=True) as temporary:
        (temporary / ENGINE).write_bytes(CONTENT)
        (temporary / LAYERS).write_text("{}\n")
        if plugin is not None:
            (temporary / LIBRARY).write_bytes(plugin)
    return open_engine(folder)


class FakeTrt:
    """`tensorrt_rtx` whose runtime loads an engine that a stand-in computes."""

    def __init__(self, fake: FakeEngine) -> None:
        self.fake = fake
        self.contexts: list[Any] = []
        self.configs: list[Any] = []
        self.compiled = b"kernels"
        names = ("ILogger", "DataType", "TensorIOMode", "IRuntimeCache", "__version__")
        names += ("ProfilingVerbosity",)
        names += ("ExecutionContextAllocationStrategy", "DynamicShapesKernelSpecializationStrategy")
        self.module = types.SimpleNamespace(
            Runtime=self._runtime, **{name: getattr(tensorrt_rtx, name) for name in names}
        )

    def _runtime(self, logger: Any) -> Any:
        runtime = mock.create_autospec(tensorrt_rtx.Runtime, instance=True)
        runtime.deserialize_cuda_engine.side_effect = lambda content: self._engine(content[:])
        return runtime

    def _engine(self, content: bytes) -> Any:
        assert content == CONTENT
        trt, fake = tensorrt_rtx, self.fake
        tensors = {tensor.name: tensor for tensor in fake.tensors}
        types_of = {"float32": trt.float32, "int32": trt.int32, "int64": trt.int64}
        engine = mock.create_autospec(trt.ICudaEngine, instance=True)
        engine.num_io_tensors, engine.num_optimization_profiles = len(tensors), fake.num_profiles
        engine.get_tensor_name.side_effect = list(tensors).__getitem__
        engine.get_tensor_dtype.side_effect = lambda name: types_of[str(tensors[name].dtype)]
        engine.get_tensor_shape.side_effect = lambda name: tensors[name].shape
        modes = trt.TensorIOMode
        engine.get_tensor_mode.side_effect = lambda name: (
            modes.INPUT if tensors[name].is_input else modes.OUTPUT
        )
        engine.get_tensor_profile_shape.side_effect = lambda name, profile: (
            [None, None, tensors[name].most[profile]]
        )
        engine.get_device_memory_size_for_profile_v2.side_effect = fake.scratch_bytes
        # Which output aliases which input is the contract's: a plugin's pairs are not declared.
        engine.get_aliased_input_tensor.side_effect = AssertionError
        engine.create_runtime_config.side_effect = self._config
        engine.create_execution_context.side_effect = self._context
        return engine

    def _config(self) -> Any:
        config = mock.create_autospec(tensorrt_rtx.IRuntimeConfig, instance=True)
        cache = mock.create_autospec(tensorrt_rtx.IRuntimeCache, instance=True)
        cache.serialize.side_effect = lambda: self.compiled
        config.create_runtime_cache.return_value = cache
        self.configs.append(config)
        return config

    def _context(self, how: Any) -> Any:
        """A context that hands everything to the stand-in's."""
        context = mock.create_autospec(tensorrt_rtx.IExecutionContext, instance=True)
        state: dict[str, Any] = {}
        kinds = tensorrt_rtx.DynamicShapesKernelSpecializationStrategy
        is_fixed = how.dynamic_shapes_kernel_specialization_strategy == kinds.EAGER

        def choose(profile: int, stream: int) -> bool:
            state["own"] = self.fake.context(profile, *state["memory"], fixed=is_fixed)
            return True

        def done(call: Callable[..., None]) -> Callable[..., bool]:
            return lambda *arguments: call(*arguments) is None

        context.set_device_memory.side_effect = lambda *memory: state.update(memory=memory)
        context.set_optimization_profile_async.side_effect = choose
        context.set_input_shape.side_effect = done(lambda *a: state["own"].set_shape(*a))
        context.set_tensor_address.side_effect = done(lambda *a: state["own"].set_address(*a))
        context.execute_async_v3.side_effect = done(lambda stream: state["own"].enqueue())
        context.is_stream_capturable.return_value = True
        self.contexts.append(context)
        return context
