"""An engine directory to the session that runs it: the one place that knows all backends."""

from __future__ import annotations

from dflash_trt import contract
from dflash_trt.engine_dir import ENGINE, EngineConfig, EngineDir
from dflash_trt.errors import ConfigError
from dflash_trt.flavor import ONNXRUNTIME, load_flavor
from dflash_trt.kv_plugin import load_plugin
from dflash_trt.runtime.session import Session, SessionLimits
from dflash_trt.runtime.trt_graphs import MAX_GRAPHS


def limits_of(config: EngineConfig) -> SessionLimits:
    """What an engine was built for, as a session tells it."""
    choices, vocab_size = config.choices, config.pair.target.vocab_size
    is_gpu = config.backend != ONNXRUNTIME
    return SessionLimits(
        block=choices.block,
        max_seq_len=choices.max_seq_len,
        max_slots=choices.max_slots,
        prefill_chunk=choices.prefill_chunk,
        vocab_size=vocab_size,
        has_logits=choices.logits,
        max_adjusted=contract.max_adjusted(choices, vocab_size) if is_gpu else None,
    )


def open_session(
    directory: EngineDir, num_threads: int | None = None, max_graphs: int = MAX_GRAPHS
) -> Session:
    """Load an engine directory that is already open. `num_threads` is for the CPU.

    An engine with a plugin brings native code: it is loaded if its sum is the manifest's. Raises
    `EngineDirError`, `MissingPackage`, `ConfigError`; on a GPU also `GpuError`, `PluginError`.
    """
    if directory.config.backend == ONNXRUNTIME:
        from dflash_trt.runtime.ort import OrtSession

        limits = limits_of(directory.config)
        return OrtSession(directory.model, directory.config.pair, limits, num_threads)
    if num_threads is not None:
        raise ConfigError(
            f"threads is {num_threads}: {directory.path} runs on a GPU", hint="leave --threads out"
        )
    return _trt_session(directory, max_graphs)


def _trt_session(directory: EngineDir, max_graphs: int) -> Session:
    """Everything that can be refused is, before the engine is read."""
    from dflash_trt.runtime.cuda import CudaDevice
    from dflash_trt.runtime.trt import GpuNeed, TrtSession
    from dflash_trt.runtime.trt_load import TrtEngine

    config = directory.config
    trt = load_flavor(config.backend)
    cuda = CudaDevice()
    directory.check_runs_on(trt.__version__, cuda.capability)
    caches = contract.cache_bytes_per_slot(config.pair, config.choices)
    weights = directory.model.stat().st_size
    GpuNeed(weights, caches, config.choices.max_slots, 0).check(cuda.memory())
    files = directory.manifest["files"]
    if directory.plugin is not None:  # TensorRT looks for its creator when it loads the engine
        load_plugin(trt, directory.plugin, files[directory.plugin.name]["sha256"])
    engine = TrtEngine(trt, directory.model, cuda, files[ENGINE]["sha256"])
    return TrtSession(engine, cuda, config.pair, limits_of(config), max_graphs)
