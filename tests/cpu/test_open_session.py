"""From an engine directory to the session of its backend: what is chosen, and what is refused.

The GPU is a stand-in, and so is TensorRT's runtime; its classes and constants are the real ones of
`tensorrt_rtx`, so a method that does not exist there fails here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tensorrt_rtx

import dflash_trt.runtime.cuda
import dflash_trt.runtime.open
from dflash_trt import contract as c
from dflash_trt import kv_plugin
from dflash_trt.cache_files import CacheKey
from dflash_trt.decode.engine import Engine
from dflash_trt.decode.request import SamplingParams
from dflash_trt.engine_dir import ENGINE, EngineDir
from dflash_trt.errors import (
    ConfigError,
    DFlashError,
    EngineDirError,
    GpuError,
    GpuMemoryError,
    PluginError,
)
from dflash_trt.kv_plugin import LIBRARY
from dflash_trt.runtime.open import limits_of, open_session
from dflash_trt.runtime.ort import OrtSession
from dflash_trt.runtime.trt import TrtSession
from dflash_trt.runtime.trt_load import TrtEngine
from tiny import TinyEngine
from tiny.fake_gpu import FakeCuda, FakeEngine, OnnxStep, engine_tensors
from tiny.fake_plugin import CONTENT, Registry
from tiny.fake_trt import FakeTrt, hollow_directory

Maker = Callable[..., EngineDir]


@pytest.fixture
def gpu_dir(engine: TinyEngine, tmp_path: Path) -> Maker:
    """An engine directory for a GPU whose engine file holds nothing of use."""
    folder = tmp_path / "gpu"
    return lambda *version, **choices: hollow_directory(engine.facts, folder, *version, **choices)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """The stand-in, in place of the GPU."""
    cuda = FakeCuda()
    monkeypatch.setattr(dflash_trt.runtime.cuda, "CudaDevice", lambda: cuda)
    return cuda


def test_the_backend_chooses_the_session(engine: TinyEngine) -> None:
    assert isinstance(open_session(engine.directory), OrtSession)


def test_limits_are_those_of_the_build(gpu_dir: Maker, engine: TinyEngine) -> None:
    limits = limits_of(gpu_dir().config)
    assert (limits.block, limits.max_slots, limits.has_logits) == (4, 3, False)
    assert limits.max_adjusted == 160  # the vocabulary is smaller than what a text may touch
    assert limits_of(engine.directory.config).max_adjusted is None


def test_without_a_gpu(gpu_dir: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(runtime: Any, function: Any, *arguments: Any) -> Any:
        raise GpuError(f"{function.__name__}: no driver")

    monkeypatch.setattr("dflash_trt.gpu.call", refuse)
    with pytest.raises(GpuError, match="no GPU can be used: cudaSetDevice: no driver") as refusal:
        open_session(gpu_dir())
    assert "doctor" in refusal.value.hint


def test_without_cuda_python(gpu_dir: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cuda.bindings", None)
    with pytest.raises(DFlashError, match="need the package cuda-bindings"):
        open_session(gpu_dir())


def test_threads_are_no_choice_on_a_gpu(gpu_dir: Maker) -> None:
    with pytest.raises(ConfigError, match="threads is 2"):
        open_session(gpu_dir(), num_threads=2)


def test_another_gpu_or_tensorrt_is_refused_before_the_engine_is_read(
    gpu_dir: Maker, gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorrt_rtx, "Runtime", None)
    gpu.capability = (8, 9)
    with pytest.raises(EngineDirError, match=r"12\.0, this GPU has 8\.9"):
        open_session(gpu_dir())
    gpu.capability = (12, 0)
    with pytest.raises(EngineDirError, match=r"built by tensorrt_rtx 1\.2\.3"):
        open_session(gpu_dir("1.2.3"))
    gpu.total = 100_000
    with pytest.raises(GpuMemoryError, match="the engine needs"):
        open_session(gpu_dir())


@pytest.fixture
def loaded(
    gpu_dir: Maker, gpu: FakeCuda, engine: TinyEngine, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> tuple[EngineDir, FakeTrt]:  # fmt: skip
    """A directory that opens, and the TensorRT that it opens with."""
    directory = gpu_dir(logits=True)
    limits = limits_of(directory.config)
    tensors = engine_tensors(engine.facts, limits, most_adjusted=160)
    trt = FakeTrt(FakeEngine(gpu, tensors, OnnxStep(engine.directory.model, limits.block)))
    monkeypatch.setattr(dflash_trt.runtime.open, "load_flavor", lambda backend: trt.module)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return directory, trt


def test_an_engine_for_a_gpu_generates(
    loaded: tuple[EngineDir, FakeTrt], engine: TinyEngine, prompts: list[list[int]]
) -> None:
    directory, _ = loaded
    session = open_session(directory)
    assert isinstance(session, TrtSession)
    jobs = [(p, SamplingParams(max_tokens=12, ignore_eos=True)) for p in prompts[:5]]
    made = Engine(session, engine.tokenizer, []).generate_all(jobs)
    wanted = engine.engine().generate_all(jobs)
    assert [g.token_ids for g in made] == [g.token_ids for g in wanted]
    assert session.num_graphs > 0


@pytest.fixture
def with_plugin(
    loaded: tuple[EngineDir, FakeTrt], gpu_dir: Maker, gpu: FakeCuda,
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[EngineDir, Registry]:  # fmt: skip
    """A directory whose engine needs the plugin, and a registry that has none yet."""
    registry = Registry()
    _, trt = loaded
    trt.module.get_plugin_registry = lambda: registry
    make = trt.module.Runtime

    def runtime(logger: Any) -> Any:
        assert registry.creator is not None, "the engine's plugin comes before the engine"
        return make(logger)

    trt.module.Runtime = runtime
    monkeypatch.setattr(kv_plugin, "_loaded", set())
    gpu.capability = (9, 0)
    return gpu_dir(device="sm90", logits=True, plugin=CONTENT), registry


def test_an_engine_with_a_plugin_brings_its_library(
    with_plugin: tuple[EngineDir, Registry], engine: TinyEngine, prompts: list[list[int]]
) -> None:
    directory, registry = with_plugin
    session = open_session(directory)
    assert registry.loaded == [str(directory.path / LIBRARY)]
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    made = Engine(session, engine.tokenizer, []).generate(prompts[0], params)
    assert made.token_ids == engine.engine().generate(prompts[0], params).token_ids
    open_session(directory)
    assert len(registry.loaded) == 1


def test_a_library_with_another_sum_is_not_loaded(
    with_plugin: tuple[EngineDir, Registry],
) -> None:
    """It changed after the directory was opened, or its sums were not checked then."""
    directory, registry = with_plugin
    (directory.path / LIBRARY).write_bytes(CONTENT + b"!")
    with pytest.raises(PluginError, match="SHA-256 differs"):
        open_session(directory)
    assert registry.loaded == []


def test_kernels_are_final_where_a_graph_keeps_them(loaded: tuple[EngineDir, FakeTrt]) -> None:
    directory, trt = loaded
    open_session(directory)
    lazy, eager = trt.configs
    kinds = tensorrt_rtx.DynamicShapesKernelSpecializationStrategy
    assert lazy.dynamic_shapes_kernel_specialization_strategy == kinds.LAZY
    assert eager.dynamic_shapes_kernel_specialization_strategy == kinds.EAGER
    own = tensorrt_rtx.ExecutionContextAllocationStrategy.USER_MANAGED
    for config in trt.configs:
        config.set_execution_context_allocation_strategy.assert_called_once_with(own)
        config.set_runtime_cache.assert_called_once_with(
            lazy.create_runtime_cache.return_value
        )  # one for both


def test_compiled_kernels_are_kept_for_the_next_start(
    loaded: tuple[EngineDir, FakeTrt], gpu: FakeCuda
) -> None:
    directory, trt = loaded
    sha256 = directory.manifest["files"][ENGINE]["sha256"]
    key = CacheKey("runtime", sha256, gpu.uuid, tensorrt_rtx.__version__)
    engine = TrtEngine(trt.module, directory.model, gpu, sha256)
    engine.save_compiled(is_new=True)
    assert key.path.read_bytes() == b"kernels"
    TrtEngine(trt.module, directory.model, gpu, sha256)
    again = trt.configs[2].create_runtime_cache.return_value
    again.deserialize.assert_called_once_with(b"kernels")


def test_saving_takes_a_tenth_of_the_time(
    loaded: tuple[EngineDir, FakeTrt], gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, trt = loaded
    engine = TrtEngine(trt.module, directory.model, gpu, "0" * 64)
    serialize = trt.configs[-2].create_runtime_cache.return_value.serialize
    now = [100.0]

    def slow() -> bytes:
        now[0] += 2
        return b"kernels %d" % now[0]

    serialize.side_effect = slow
    monkeypatch.setattr("dflash_trt.runtime.trt_load.time.monotonic", lambda: now[0])
    engine.save_compiled(is_new=False)
    assert serialize.call_count == 0
    for later, is_new, saved in ((0, True, 1), (1, True, 1), (16, False, 1), (1, False, 2)):
        now[0] += later
        engine.save_compiled(is_new)
        assert serialize.call_count == saved
    now[0] += 1000
    engine.save_compiled(is_new=False)
    assert serialize.call_count == 2


def test_what_tensorrt_refuses_is_told_with_its_reason(
    loaded: tuple[EngineDir, FakeTrt], gpu: FakeCuda
) -> None:
    directory, trt = loaded
    loggers: list[Any] = []

    def refuse(logger: Any) -> Any:
        loggers.append(logger)
        runtime = mock.create_autospec(tensorrt_rtx.Runtime, instance=True)
        levels = tensorrt_rtx.ILogger

        def fail(content: Any) -> None:
            logger.log(levels.WARNING, "something else")
            logger.log(levels.ERROR, "header.magicTag\n differs")
            logger.log(levels.ERROR, "and so it failed")

        runtime.deserialize_cuda_engine.side_effect = fail
        return runtime

    trt.module.Runtime = refuse
    with pytest.raises(EngineDirError, match=r"cannot load it: header\.magicTag differs") as told:
        open_session(directory)
    assert ENGINE in told.value.message


def test_a_type_that_no_session_binds(loaded: tuple[EngineDir, FakeTrt]) -> None:
    directory, trt = loaded
    make = trt._engine

    def odd(content: bytes) -> Any:
        engine = make(content)
        engine.get_tensor_dtype.side_effect = lambda name: tensorrt_rtx.fp8
        return engine

    trt._engine = odd  # type: ignore[method-assign]
    with pytest.raises(EngineDirError, match=f"{c.TOKENS} has type FP8"):
        open_session(directory)


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("set_optimization_profile_async", "does not take profile 1"),
        ("set_optimization_profile_async raises", "does not take profile 1"),
        ("set_input_shape", "does not take shape"),
        ("set_tensor_address", "does not take an address"),
        ("execute_async_v3", "cannot run the step"),
    ],
)
def test_a_call_that_fails(
    method: str, words: str, loaded: tuple[EngineDir, FakeTrt], engine: TinyEngine
) -> None:
    directory, trt = loaded
    make = trt._context

    def broken(how: Any) -> Any:
        context = make(how)
        name, _, raises = method.partition(" ")
        getattr(context, name).side_effect = RuntimeError if raises else None
        getattr(context, name).return_value = False
        return context

    trt._context = broken  # type: ignore[method-assign]
    session = open_session(directory)
    loaded_engine = Engine(session, engine.tokenizer, [])
    with pytest.raises(DFlashError, match=words):
        loaded_engine.generate([1, 2, 3], SamplingParams(max_tokens=3))
