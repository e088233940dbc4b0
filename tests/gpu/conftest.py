"""Skips this folder without a GPU, and builds the tiny pair's engine for the one that is there.

With `STAND_IN` set, the tests run on the stand-in of `tiny.fake_gpu`: they are dry-run that way.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import dflash_trt.runtime.cuda
import dflash_trt.runtime.open
from dflash_trt.engine_dir import EngineDir
from dflash_trt.errors import DFlashError
from dflash_trt.flavor import DEVICE_TABLE, Device, load_flavor
from dflash_trt.runtime.cuda import CudaDevice
from dflash_trt.runtime.open import limits_of
from tiny import TinyEngine, TinyPair, build_engine
from tiny.fake_gpu import FakeCuda, FakeEngine, OnnxStep, engine_tensors
from tiny.fake_trt import FakeTrt, hollow_directory

NEEDED = "DFLASH_TRT_NEEDS_GPU"  # set: a machine without a GPU fails instead of skipping
STAND_IN = "DFLASH_TRT_STAND_IN"
PRECISIONS = ("fp16", "bf16")[: 1 if os.environ.get(STAND_IN) else None]


@pytest.fixture(scope="session")
def cuda() -> CudaDevice:
    """The GPU."""
    if os.environ.get(STAND_IN):
        return FakeCuda()  # type: ignore[return-value]
    try:
        return CudaDevice()
    except DFlashError as error:
        return _absent(error.message)


@pytest.fixture(scope="session")
def device(cuda: CudaDevice) -> Device:
    """What engines for this GPU are built for; its flavour of TensorRT is installed."""
    for device in DEVICE_TABLE.values():
        if device.is_gpu and device.capability == cuda.capability:
            try:
                load_flavor(device.backend)
            except DFlashError as error:
                return _absent(error.message)
            return device
    return _absent(f"no engine can be built for {cuda.name}")


@pytest.fixture(scope="session", params=PRECISIONS)
def gpu_engine(
    request: pytest.FixtureRequest, device: Device, trained_pair: TinyPair,
    tmp_path_factory: pytest.TempPathFactory,
) -> EngineDir:  # fmt: skip
    """The engine of `trained_pair` for this GPU: block 6, 3 slots, logits."""
    folder: Path = tmp_path_factory.mktemp("gpu") / request.param
    if os.environ.get(STAND_IN):
        return _stand_in(request, folder)
    built = build_engine(
        trained_pair, folder, device=device.name, precision=request.param, logits=True
    )
    return built.directory


def _stand_in(request: pytest.FixtureRequest, folder: Path) -> EngineDir:
    onnx: TinyEngine = request.getfixturevalue("trained_engine")
    choices = {"block": onnx.pair.block, "precision": request.param, "logits": True}
    directory = hollow_directory(onnx.facts, folder, **choices)
    cuda: Any = request.getfixturevalue("cuda")
    limits = limits_of(directory.config)
    tensors = engine_tensors(onnx.facts, limits, most_adjusted=160)
    trt = FakeTrt(FakeEngine(cuda, tensors, OnnxStep(onnx.directory.model, limits.block)))
    patch = pytest.MonkeyPatch()
    request.addfinalizer(patch.undo)
    patch.setattr(dflash_trt.runtime.open, "load_flavor", lambda backend: trt.module)
    patch.setattr(dflash_trt.runtime.cuda, "CudaDevice", lambda: cuda)
    return directory


def _absent(reason: str) -> Any:
    if os.environ.get(NEEDED):
        pytest.fail(reason)
    pytest.skip(reason)
