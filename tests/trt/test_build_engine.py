"""TensorRT builds: what is written, what is said of it, and how a build fails or is stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from dflash_trt import contract as c
from dflash_trt.build import tensorrt
from dflash_trt.build.tensorrt import BuiltEngine, build_engine, check_buildable
from dflash_trt.errors import BuildError, ConfigError, GpuError
from dflash_trt.flavor import DEVICE_TABLE, TENSORRT, TENSORRT_RTX, load_flavor
from dflash_trt.gpu import first_gpu, load_runtime
from tiny.gpu_builds import pretend_gpu

trt = load_flavor(TENSORRT_RTX)
PROFILES = [
    c.Profile(c.DECODE, {c.SLOTS: (1, 4, 4), c.STEP_TOKENS: (1, 16, 16)}),
    c.Profile(c.PREFILL, {c.SLOTS: (1, 1, 1), c.STEP_TOKENS: (1, 64, 64)}),
]
Define = Callable[[Any], Sequence[npt.NDArray[Any]]]


def products(count: int, width: int, seed: int = 0) -> Define:
    """A network of `count` matrix products with distinct weights."""

    def define(network: Any) -> list[npt.NDArray[Any]]:
        generator = np.random.default_rng(seed)
        value = network.add_input("x", trt.bfloat16, (-1, -1, width))
        value.set_dimension_name(0, c.SLOTS)
        value.set_dimension_name(1, c.STEP_TOKENS)
        kept = []
        for index in range(count):
            weight = generator.standard_normal((1, width, width)).astype(ml_dtypes.bfloat16)
            kept.append(weight)
            pointer = trt.Weights(trt.bfloat16, weight.ctypes.data, weight.size)
            constant = network.add_constant(weight.shape, pointer).get_output(0)
            none = trt.MatrixOperation.NONE
            product = network.add_matrix_multiply(value, none, constant, none)
            product.name = f"product {index}"
            value = network.add_activation(product.get_output(0), trt.ActivationType.TANH)
            value = value.get_output(0)
        value.name = "y"
        network.mark_output(value)
        return kept

    return define


def built(define: Define, file: Path, device: str = "sm120", **changes: Any) -> BuiltEngine:
    options: dict[str, Any] = {"profiles": PROFILES, "report": lambda phase, part: None, **changes}
    return build_engine(
        trt, DEVICE_TABLE[device], define, options["profiles"], file, options["report"]
    )


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[BuiltEngine, Path]:
    file = tmp_path_factory.mktemp("engine") / "rank0.engine"
    return built(products(2, 64), file), file


def test_a_second_build_is_the_same_network_and_the_same_file(
    small: tuple[BuiltEngine, Path], tmp_path: Path
) -> None:
    again = built(products(2, 64), tmp_path / "again")
    assert again.network_sha256 == small[0].network_sha256
    assert (tmp_path / "again").read_bytes() == small[1].read_bytes()


@pytest.mark.parametrize(
    "changed",
    [
        {"define": products(3, 64)},
        {"define": products(2, 32)},
        {"define": products(2, 64, seed=1)},
        {"profiles": PROFILES[1:]},
    ],
)
def test_another_network_has_another_hash(
    changed: dict[str, Any], small: tuple[BuiltEngine, Path], tmp_path: Path
) -> None:
    define = changed.pop("define", products(2, 64))
    assert built(define, tmp_path / "e", **changed).network_sha256 != small[0].network_sha256


def test_what_the_engine_holds_is_told_by_tensorrt(small: tuple[BuiltEngine, Path]) -> None:
    layers = small[0].layers
    assert layers["engines"] == 1
    assert [(t["name"], t["mode"], t["dtype"], t["dims"]) for t in layers["tensors"]] == [
        ("x", "input", "BFloat16", [-1, -1, 64]),
        ("y", "output", "BFloat16", [-1, -1, 64]),
    ]
    assert {(t["location"], t["is_shape"]) for t in layers["tensors"]} == {("device", False)}
    products_of = [layer for layer in layers["layers"] if layer["constants"]]
    assert len(products_of) >= 2 * len(PROFILES)
    for layer in products_of:
        assert [layer[part][0] for part in ("inputs", "constants", "outputs")] == ["BFloat16"] * 3


def test_progress_only_grows(tmp_path: Path) -> None:
    seen: list[float] = []
    built(products(1, 32), tmp_path / "e", report=lambda phase, part: seen.append(part))
    assert len(seen) > 20
    assert seen == sorted(seen)
    assert seen[0] == 0
    assert 0.5 < seen[-1] <= 1


def test_a_network_that_tensorrt_refuses_is_one_clear_line(tmp_path: Path) -> None:
    def packed_attention(network: Any) -> list[npt.NDArray[Any]]:
        shape = (1, 2, 8, 64)
        q, k = (network.add_input(name, trt.bfloat16, shape) for name in "qk")
        lengths = network.add_input("lengths", trt.int32, (1,))
        attention = network.add_attention_v2(
            q, k, k, trt.AttentionNormalizationOp.SOFTMAX, trt.CausalMaskKind.NONE
        )
        attention.query_form = trt.AttentionIOForm.PACKED_NHD
        attention.query_lengths = lengths
        network.mark_output(attention.get_output(0))
        return []

    with pytest.raises(BuildError) as caught:
        built(packed_attention, tmp_path / "e")
    message = caught.value.message
    assert "\n" not in message
    assert "TensorRT" in message
    assert "CUDA driver" not in message  # that there is none here is no reason
    assert "/_src/" not in message
    assert len(message) < 400


def test_what_the_lowering_refuses_is_told_with_tensorrts_reason(tmp_path: Path) -> None:
    def define(network: Any) -> list[npt.NDArray[Any]]:
        x = network.add_input("x", trt.bfloat16, (4, 8))
        if (
            network.add_shuffle(x) is not None
            and network.add_topk(x, trt.TopKOperation.MAX, -1, 1) is None
        ):
            raise BuildError("layer topk was refused")
        raise AssertionError("TensorRT took a negative k")

    with pytest.raises(BuildError, match=r"^layer topk was refused: .+"):
        built(define, tmp_path / "e")


COLLECTED = """
import gc
from dflash_trt.flavor import TENSORRT_RTX, create, load_flavor, make_logger
trt = load_flavor(TENSORRT_RTX)
def log(severity, text):
    if gc.isenabled():
        gc.collect()  # as Python may do anywhere
cycle = [trt.Builder(trt.Logger())]
cycle.append(cycle)
del cycle
create(trt.Builder, make_logger(trt, log))
print("made")
"""


def test_an_old_builder_that_is_garbage_stops_no_new_one() -> None:
    run = subprocess.run(
        [sys.executable, "-c", COLLECTED], capture_output=True, text=True, timeout=120
    )
    assert run.stdout == "made\n", run.stderr


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_a_build_at_once(tmp_path: Path) -> None:
    def report(phase: str, part: float) -> None:
        if phase.startswith("Timing graph nodes"):
            os.kill(os.getpid(), signal.SIGINT)

    before = threading.active_count()
    start = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        built(products(24, 512), tmp_path / "e", report=report)
    assert time.perf_counter() - start < 5
    assert threading.active_count() == before


def test_a_full_disk_is_an_os_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="No space left"):
        built(products(1, 32), Path("/dev/full"))


class Config:
    """What a data-center builder's config does with timing caches; it takes those of `ours`."""

    def __init__(self, ours: bytes = b"measured") -> None:
        self.ours = ours
        self.given: bytes | None = None

    def create_timing_cache(self, content: bytes) -> bytes | None:
        return None if content == b"damaged" else content

    def set_timing_cache(self, cache: bytes, ignore_mismatch: bool) -> bool:
        assert not ignore_mismatch
        if cache in (b"", self.ours):
            self.given = cache
        return cache in (b"", self.ours)


def test_timing_results_are_kept_by_network_gpu_and_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    pretend_gpu(monkeypatch, (10, 0))

    def set_in(config: Config, device: str = "sm100") -> Path | None:
        return tensorrt._timing_cache(trt, config, DEVICE_TABLE[device], "a" * 64)

    config = Config()
    path = set_in(config)
    assert path is not None
    assert config.given == b""
    path.parent.mkdir(parents=True)
    path.write_bytes(b"measured")
    assert set_in(config) == path
    assert config.given == b"measured"
    # Of another driver or clock, or half of a file: as if there were none.
    for content in (b"measured elsewhere", b"damaged"):
        path.write_bytes(content)
        config = Config()
        assert set_in(config) == path
        assert config.given == b""
    pretend_gpu(monkeypatch, (10, 0), "b2")
    assert set_in(Config()) != path
    assert set_in(Config(), "sm120") is None


@pytest.fixture
def data_center(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package of the data-center flavour, as far as a check before a build asks."""
    monkeypatch.setattr(tensorrt, "load_flavor", lambda _: types.SimpleNamespace(__version__="11"))


@pytest.mark.usefixtures("data_center")
def test_a_data_center_build_is_for_the_gpu_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, (9, 0))
    assert check_buildable(DEVICE_TABLE["sm90"]) == {TENSORRT: "11"}
    with pytest.raises(ConfigError, match=r"sm100 has .* 10\.0, the NVIDIA X here 9"):
        check_buildable(DEVICE_TABLE["sm100"])


@pytest.mark.usefixtures("data_center")
def test_a_data_center_build_without_a_gpu_says_so() -> None:
    if not isinstance(no_gpu(), GpuError):
        pytest.skip("there is a GPU")
    with pytest.raises(ConfigError, match="builds for sm90 on such a GPU only: no GPU can"):
        check_buildable(DEVICE_TABLE["sm90"])


def no_gpu() -> object:
    """The error of a machine without a GPU; else its GPU."""
    try:
        return first_gpu(load_runtime())
    except GpuError as error:
        return error


def test_a_builder_that_cuda_does_not_let_start_is_one_line(tmp_path: Path) -> None:
    def builder(logger: Any) -> None:
        """What TensorRT does where CUDA does not start."""
        said = "CUDA initialization failure with error: 35"
        logger.log(trt.ILogger.Severity.ERROR, said)
        raise TypeError("pybind11::init(): factory function returned nullptr")

    silent = types.SimpleNamespace(__version__="11", ILogger=trt.ILogger, Builder=builder)
    with pytest.raises(BuildError, match="does not start: CUDA initialization failure") as caught:
        build_engine(silent, DEVICE_TABLE["sm90"], products(1, 32), [], tmp_path / "e", print)
    assert "doctor" in caught.value.hint
