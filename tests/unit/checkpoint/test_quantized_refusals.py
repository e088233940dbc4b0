"""FP8 and NVFP4 checkpoints whose tensors are wrong, incomplete, or not what the config says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from checkpoint_files import (
    drafter_tensors,
    fp8_x,
    nvfp4_x,
    problem_of,
    read_stated,
    save_drafter,
    save_hf,
)
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dflash_trt.checkpoint import PairWeights, open_target, read_pair
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


def overflowing(leaf: str, value: float) -> tuple[dict[str, Any], str]:
    """Tensors whose scale `leaf` is too large or small for some weights, and their scheme."""
    if leaf == "weight_scale":
        return fp8_x(scale=[value]), FP8
    tensors = nvfp4_x(scale=[value])  # block scales of 2, codes up to 6
    if leaf == "weight_global_scale":
        tensors = {"x.weight_packed": tensors["x.weight"], f"x.{leaf}": tensors["x.weight_scale_2"],
                   "x.weight_scale": tensors["x.weight_scale"]}  # fmt: skip
    return tensors, NVFP4


@pytest.mark.parametrize(
    ("leaf", "good", "bad"),
    [
        ("weight_scale", 1.4e37, 1.5e37),  # the largest code of these is 24, not 448
        ("weight_scale_2", 2.8e37, 2.9e37),
        ("weight_global_scale", 3.6e-38, 3.5e-38),
        ("weight_global_scale", 1.0, 1e-44),  # whose inverse alone is infinite
    ],
)
def test_scales_that_make_weights_infinite_are_refused_however_they_are_read(
    leaf: str, good: float, bad: float, tmp_path: Path
) -> None:
    for folder in ("good", "bad"):
        (tmp_path / folder).mkdir()
    tensors, scheme = overflowing(leaf, good)
    source = read_stated(tmp_path / "good", tensors, scheme)
    assert np.isfinite(source.read("x.weight")).all()
    codes = source.float_codes("x.weight")
    assert codes is not None
    np.testing.assert_allclose(codes.dequantize(), source.read("x.weight"), rtol=3e-7)
    tensors, scheme = overflowing(leaf, bad)
    source = read_stated(tmp_path / "bad", tensors, scheme)
    message = rf"tensor x\.{leaf} holds a scale of {re.escape(f'{np.float32(bad):g}')}, which"
    last = source.info("x.weight").shape[0] - 1
    for call in (
        source.read, source.float_codes, lambda name: source.read_rows(name, last, last + 1)
    ):  # fmt: skip
        with pytest.raises(BadTensor, match=message):
            call("x.weight")


SIZES = st.one_of(
    st.floats(2.0**-149, 2.0**-116, width=32), st.floats(2.0**119, 2.0**127, width=32)
)


@given(st.data())
def test_codes_are_refused_exactly_where_their_floats_are(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    leaf = data.draw(st.sampled_from(["weight_scale", "weight_scale_2", "weight_global_scale"]))
    tensors, scheme = overflowing(leaf, data.draw(SIZES))
    if scheme == NVFP4:
        bits = data.draw(hnp.arrays(np.uint8, (3, 2), elements=st.integers(0, 126)))
        tensors["x.weight_scale"] = bits.view(E4M3_TYPE)
        largest = 126
    else:
        largest = data.draw(st.integers(0, 126))
    codes = tensors["x.weight_packed" if leaf == "weight_global_scale" else "x.weight"]
    codes.view(np.uint8)[:] = np.minimum(codes.view(np.uint8), largest)
    source = read_stated(tmp_path_factory.mktemp("sizes"), tensors, scheme)
    if problem_of(lambda: source.read("x.weight")):
        assert "which makes weights infinite" in problem_of(lambda: source.float_codes("x.weight"))
    elif problem_of(lambda: source.float_codes("x.weight")):
        assert leaf == "weight_global_scale"
        assert not bits.any()  # all weights are zero, but 1 / scale is infinite
    else:
        made = source.float_codes("x.weight")
        assert made is not None
        assert np.isfinite(made.dequantize()).all()


@pytest.mark.parametrize("form", ["modelopt-fp8", "compressed-fp8-channel"])
@pytest.mark.parametrize("name", [f"{Q_PROJ}.weight", "model.norm.weight", "lm_head.weight"])
def test_values_that_are_no_numbers_are_named_as_the_file_does(
    name: str, form: str, plain: Path, tmp_path: Path
) -> None:
    def edit(tensors: dict[str, Any]) -> None:
        is_coded = tensors[name].dtype == torch.float8_e4m3fn
        spoilt = tensors[name].view(torch.uint8) if is_coded else tensors[name]
        spoilt[4] = 0xFF if is_coded else float("nan")

    made.save_quantized(plain, tmp_path / "q", form, edit=edit)
    drafter = save_drafter(tmp_path / "drafter")
    pair, ids = read_pair(tmp_path / "q", drafter), np.array([1, 4], np.int32)
    weights = PairWeights(pair.config, pair.target_source, pair.drafter_source, ids)
    message = rf"q/model\.safetensors: tensor {re.escape(name)} holds NaN"
    asked = ["target." + name.removeprefix("model.")]
    asked += ["drafter.lm_head.weight"] if name == "lm_head.weight" else []
    for each in asked:
        with pytest.raises(BadTensor, match=message):
            weights.read(each)
    if form == "modelopt-fp8" and name.startswith(Q_PROJ):
        with pytest.raises(BadTensor, match=message):
            weights.float_codes(asked[0])


@pytest.mark.parametrize("tied", [False, True])
def test_rows_of_a_head_are_named_as_the_file_names_the_head(tied: bool, tmp_path: Path) -> None:
    name = "model.embed_tokens.weight" if tied else "lm_head.weight"
    save_hf(tmp_path / "plain", "qwen3", tie_word_embeddings=tied)

    def edit(tensors: dict[str, Any]) -> None:
        tensors[name][4, 2] = float("inf")

    made.save_quantized(tmp_path / "plain", tmp_path / "q", "modelopt-fp8", edit=edit)
    own = drafter_tensors() | {"lm_head.weight": torch.full((96, 64), float("nan"))}
    for folder, tensors, place in (
        ("shared", drafter_tensors(), f"q/model.safetensors: tensor {name} "),
        ("own", own, "own/model.safetensors: tensor lm_head.weight "),
    ):
        drafter = save_drafter(tmp_path / folder, tensors)
        pair = read_pair(tmp_path / "q", drafter)
        weights = PairWeights(
            pair.config, pair.target_source, pair.drafter_source, np.array([1, 4], np.int32)
        )
        assert place + "holds NaN" in problem_of(lambda w=weights: w.read("drafter.lm_head.weight"))


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
    (fp8_x() | {"x.weight_scale": np.ones((2, 2), ml_dtypes.float8_e8m0fnu)}, (FP8_BLOCK,),
     BadTensor, r"weight_scale has type F8_E8M0, expected F32, F16, BF16"),
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
    for leaf in ("pre_quant_scale", "weight_zero_point", "k_scale", "q_scale"):
        made.save_quantized(
            plain, tmp_path / leaf, "modelopt-nvfp4",
            edit=lambda tensors, leaf=leaf: tensors.update({f"{Q_PROJ}.{leaf}": torch.ones(64)}),
        )  # fmt: skip
        with pytest.raises(BadTensor, match=rf"q_proj\.{leaf} is there: .* not supported"):
            open_target(tmp_path / leaf)
