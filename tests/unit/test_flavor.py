"""Devices, what each can do, and what a user without TensorRT is told."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from dflash_trt.config import BuildChoices
from dflash_trt.errors import ConfigError, MissingPackage
from dflash_trt.flavor import DEVICE_TABLE, load_flavor

# From NVIDIA's table of compute capabilities: FP8 units since Ada and Hopper, FP4 since Blackwell.
CAN = {
    "cpu": ("fp32", "int4"),
    "sm86": ("bf16", "fp16"),
    "sm89": ("bf16", "fp16", "fp8"),
    "sm90": ("bf16", "fp16", "fp8"),
    "sm100": ("bf16", "fp16", "fp8", "nvfp4"),
    "sm103": ("bf16", "fp16", "fp8", "nvfp4"),
    "sm120": ("bf16", "fp16", "fp8", "nvfp4"),
    "sm121": ("bf16", "fp16", "fp8", "nvfp4"),
}


def test_what_each_device_can_do() -> None:
    assert {name: device.precisions for name, device in DEVICE_TABLE.items()} == CAN


@pytest.mark.parametrize(
    ("device", "precision", "words"),
    [
        ("sm86", "fp8", r"needs compute capability 8\.9, sm86 has 8\.6"),
        ("sm89", "nvfp4", r"needs compute capability 10\.0, sm89 has 8\.9"),
        ("sm90", "nvfp4", r"needs compute capability 10\.0, sm90 has 9\.0"),
        ("sm120", "fp32", "fp32 is not for device sm120"),
        ("sm120", "int4", "int4 is not for device sm120"),
        ("cpu", "nvfp4", "nvfp4 is not for device cpu"),
        ("cpu", "fp5", "'fp5' is not one of fp32"),
        ("sm12", "bf16", "'sm12' is not one of cpu"),
        (["sm120"], "bf16", "is not one of cpu"),
    ],
)
def test_what_it_cannot_do_is_refused(device: str, precision: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        BuildChoices(block=4, max_seq_len=32, device=device, precision=precision)


def test_every_other_combination_is_allowed() -> None:
    for device, precisions in CAN.items():
        for precision in precisions:
            BuildChoices(block=4, max_seq_len=32, device=device, precision=precision)


def test_an_engine_for_the_cpu_has_logits() -> None:
    with pytest.raises(ConfigError, match="logits"):
        BuildChoices(block=4, max_seq_len=32, logits=False)


@pytest.mark.parametrize(
    ("flavor", "extra"), [("tensorrt", "tensorrt"), ("tensorrt_rtx", "tensorrt-rtx")]
)
def test_a_flavour_that_is_not_installed(
    flavor: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, flavor, None)
    with pytest.raises(MissingPackage, match=flavor) as caught:
        load_flavor(flavor)
    assert caught.value.hint == f"pip install 'dflash-trt[{extra}]'"
    assert "\n" not in caught.value.message


def test_a_package_of_that_name_that_is_not_tensorrt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", ModuleType("tensorrt"))
    with pytest.raises(MissingPackage, match="is not TensorRT"):
        load_flavor("tensorrt")
