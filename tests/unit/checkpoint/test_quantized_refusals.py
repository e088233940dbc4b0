"""FP8 and NVFP4 checkpoints whose tensors are wrong, incomplete, or not what the config says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from checkpoint_files import fp8_x, nvfp4_x, problem_of, read_stated, save_hf

from dflash_trt.checkpoint import open_target
from dflash_trt.checkpoint.quantized_config import FP8, FP8_BLOCK, FP8_CHANNEL, NVFP4
from dflash_trt.checkpoint.safetensors import SafetensorsSource
from dflash_trt.errors import BadTensor, CheckpointError, MissingTensor
from tiny import quantized as made

Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    save_hf(folder, "qwen3")
    return folder


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
@pytest.mark.parametrize("leaf", ["weight_scale", "weight_scale_2"])
def test_a_scale_that_is_none_is_named(leaf: str, value: float, tmp_path: Path) -> None:
    tensors = fp8_x() if leaf == "weight_scale" else nvfp4_x()
    tensors[f"x.{leaf}"] = np.float32([value])
    source = read_stated(tmp_path, tensors, FP8 if leaf == "weight_scale" else NVFP4)
    for call in (source.read, source.float_codes, lambda name: source.read_rows(name, 1, 2)):
        with pytest.raises(BadTensor, match=rf"tensor x.{leaf} holds a scale of {value:g}"):
            call("x.weight")


@pytest.mark.parametrize(("value", "shown"), [(-2.0, "-2"), (float("nan"), "nan"), (-0.0, "-0")])
def test_a_scale_of_a_block_that_is_none_is_named(value: float, shown: str, tmp_path: Path) -> None:
    tensors = nvfp4_x()
    tensors["x.weight_scale"][1, 1] = value
    source = read_stated(tmp_path, tensors, NVFP4)
    for call in (source.read, source.float_codes):
        with pytest.raises(BadTensor, match=rf"x.weight_scale holds a scale of {shown}$"):
            call("x.weight")


E4M3_TYPE = ml_dtypes.float8_e4m3fn
REFUSED: list[tuple[dict[str, Any], tuple[str, ...], type[Exception], str]] = [
    ({"x.weight": fp8_x()["x.weight"]}, (FP8,), MissingTensor, r"x\.weight_scale is missing"),
    ({"x.weight": fp8_x()["x.weight"]}, (FP8_BLOCK,), MissingTensor,
     r"tensor x\.weight_scale_inv is missing"),
    (fp8_x(scale=[1, 2]), (FP8,), BadTensor,
     r"x\.weight_scale has shape \[2\], .* weight of shape \[4, 6\] is not FP8 with one scale, "),
    (fp8_x(scale=[1, 2, 3, 4]), (FP8,), BadTensor, r"weight_scale has shape \[4\]"),
    (fp8_x(scale=[[1, 2, 3, 4]]), (FP8_CHANNEL,), BadTensor, r"weight_scale has shape \[1, 4\]"),
    (fp8_x(scale=[[1, 2, 3]]), (FP8_BLOCK,), BadTensor, r"weight_scale has shape \[1, 3\]"),
    (fp8_x(scale=[[[1]]]), (FP8,), BadTensor, r"weight_scale has shape \[1, 1, 1\]"),
    (fp8_x() | {"x.weight_scale": np.array([1], np.uint8)}, (FP8,), BadTensor,
     r"weight_scale has type U8, expected F32, F16, BF16"),
    (fp8_x() | {"x.weight_scale_inv": np.float32([1])}, (FP8,), BadTensor, "has both"),
    ({"x.weight": np.ones(4, E4M3_TYPE), "x.weight_scale": np.float32([1])}, (FP8,), BadTensor,
     r"x\.weight is quantized and has shape \[4\], expected two axes"),
    (fp8_x(), (NVFP4,), BadTensor, r"x\.weight is FP8, but config.json: stated says NVFP4"),
    (nvfp4_x(), (FP8, FP8_BLOCK), BadTensor,
     r"x\.weight is packed in bytes, but .* FP8 with one scale and FP8 with a scale per block"),
    (fp8_x(), (), BadTensor, r"x\.weight is quantized, but no JSON file beside it says how"),
    (nvfp4_x(), (), BadTensor, r"x\.weight is quantized, but no JSON"),
    ({k: v for k, v in nvfp4_x().items() if k != "x.weight_scale"}, (NVFP4,), MissingTensor,
     r"tensor x\.weight_scale is missing"),
    ({k: v for k, v in nvfp4_x().items() if k != "x.weight_scale_2"}, (NVFP4,), MissingTensor,
     r"tensor x\.weight_scale_2 is missing"),
    (nvfp4_x(width=24) | {"x.weight_scale": np.ones((3, 1), E4M3_TYPE)}, (NVFP4,), BadTensor,
     r"x\.weight has shape \[3, 12\], which is not NVFP4's for \[3, 24\] weights"),
    (nvfp4_x() | {"x.weight_scale": np.ones((3, 1), E4M3_TYPE)}, (NVFP4,), BadTensor,
     r"x\.weight_scale has shape \[3, 1\]"),
    (nvfp4_x() | {"x.weight_scale": np.ones((3, 2), np.float32)}, (NVFP4,), BadTensor,
     r"x\.weight_scale has type F32, expected F8_E4M3"),
    (nvfp4_x(scale=[1, 2, 3]), (NVFP4,), BadTensor, r"x\.weight_scale_2 has shape \[3\]"),
    (nvfp4_x() | {"x.weight_packed": np.ones((3, 16), np.uint8)}, (NVFP4,), BadTensor,
     r"has both x\.weight and x\.weight_packed"),
    ({"x.weight": np.float32([[1]])}, (NVFP4,), CheckpointError,
     r"config.json: stated says NVFP4, but no weight is stored so"),
    (fp8_x() | {"y.weight": np.float32([[1]]), "y.weight_scale": np.float32([1])},
     (FP8,), BadTensor,
     r"y\.weight has type F32, although y\.weight_scale is there"),
    (fp8_x() | {"y.weight": np.float32([[1]]), "y.input_scale": np.float32([1])}, (FP8,), BadTensor,
     r"y\.weight has type F32, although y\.input_scale is there"),
    (fp8_x() | {"y.weight_scale": np.float32([1])}, (FP8,), MissingTensor,
     r"tensor y\.weight is missing"),
]  # fmt: skip


@pytest.mark.parametrize(("tensors", "schemes", "error", "message"), REFUSED)
def test_what_does_not_fit_is_refused_before_a_weight_is_read(
    tensors: Any, schemes: Any, error: Any, message: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def fail(*_: Any) -> None:
        raise AssertionError("a weight was read")

    for name in ("read", "read_rows", "raw"):
        monkeypatch.setattr(SafetensorsSource, name, fail)
    with pytest.raises(error, match=message) as caught:
        read_stated(tmp_path, tensors, *schemes, block=(2, 3) if FP8_BLOCK in schemes else None)
    assert "\n" not in caught.value.message


def test_calls_that_make_no_sense(tmp_path: Path) -> None:
    source = read_stated(tmp_path, fp8_x() | {"norm.weight": np.float32([1, 2])}, FP8)
    assert source.names() == ["norm.weight", "x.weight"]
    assert "FP8 with one scale" in problem_of(lambda: source.raw("x.weight"))
    np.testing.assert_array_equal(source.raw("norm.weight"), [1, 2])
    assert "has 4 rows" in problem_of(lambda: source.read_rows("x.weight", 2, 5))
    for call in (source.info, source.read, source.raw, source.q4_blocks, source.float_codes):
        for name in ("x.weight_scale", "no.weight"):
            with pytest.raises(MissingTensor, match=f"tensor {name} is missing"):
                call(name)


def test_a_truncated_file(plain: Path, tmp_path: Path) -> None:
    made.save_quantized(plain, tmp_path / "q", "modelopt-nvfp4")
    file = tmp_path / "q" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .*(truncated|bytes)"):
        open_target(tmp_path / "q")


def test_a_weight_of_another_size_than_the_config_makes_it(plain: Path, tmp_path: Path) -> None:
    def edit(tensors: dict[str, Any]) -> None:
        tensors[f"{Q_PROJ}.weight"] = tensors[f"{Q_PROJ}.weight"][:, :24].contiguous()
        tensors[f"{Q_PROJ}.weight_scale"] = tensors[f"{Q_PROJ}.weight_scale"][:, :3].contiguous()

    made.save_quantized(plain, tmp_path / "q", "modelopt-nvfp4", edit=edit)
    with pytest.raises(
        BadTensor, match=r"q_proj.weight has shape \[64, 48\], .* makes it \[64, 64"
    ):
        open_target(tmp_path / "q")


def test_other_tensors_of_a_quantizer_are_not_dropped(plain: Path, tmp_path: Path) -> None:
    """AWQ's are scales of the inputs: a weight that is read without them is another one."""
    for leaf in ("pre_quant_scale", "weight_zero_point"):
        made.save_quantized(
            plain, tmp_path / leaf, "modelopt-nvfp4",
            edit=lambda tensors, leaf=leaf: tensors.update({f"{Q_PROJ}.{leaf}": torch.ones(64)}),
        )  # fmt: skip
        with pytest.raises(BadTensor, match=rf"q_proj\.{leaf} is there: .* not supported"):
            open_target(tmp_path / leaf)
