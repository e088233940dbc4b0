"""FP8 and NVFP4 checkpoints: what is read of them, against values made without the package."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from checkpoint_files import (
    drafter_tensors,
    fp8_x,
    nvfp4_x,
    read_stated,
    save_drafter,
    save_hf,
)
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.torch import load_file, save_file
from transformers import FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

from dflash_trt.checkpoint import open_drafter, open_target, quantized
from dflash_trt.checkpoint.draft_vocab import ChosenRows
from dflash_trt.checkpoint.facts import Facts
from dflash_trt.checkpoint.quantized import read_quantized
from dflash_trt.checkpoint.quantized_config import (
    FP8,
    FP8_BLOCK,
    FP8_CHANNEL,
    NVFP4,
    read_quantization,
)
from dflash_trt.checkpoint.safetensors import SafetensorsSource
from dflash_trt.errors import BadTensor
from dflash_trt.quantize.floats import Fp8Weight, Nvfp4Weight
from dflash_trt.quantize.pieces import PIECE_VALUES
from tiny import quantized as made

Q_PROJ = "model.layers.0.self_attn.q_proj"
SCHEMES = {
    "modelopt-fp8": FP8, "modelopt-fp8-both-files": FP8, "modelopt-fp8-channel": FP8_CHANNEL,
    "modelopt-nvfp4": NVFP4, "modelopt-w4a16-nvfp4": NVFP4, "compressed-fp8": FP8,
    "compressed-fp8-channel": FP8_CHANNEL, "compressed-fp8-block": FP8_BLOCK,
    "compressed-nvfp4": NVFP4, "transformers-fp8-block": FP8_BLOCK, "transformers-fp8": FP8,
    "autofp8": FP8, "modelopt-drafter-nvfp4": NVFP4,
    "compressed-nvfp4-weights-only": NVFP4, "transformers-fp8-powers": FP8_BLOCK,
}  # fmt: skip


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    save_hf(folder, "qwen3", attention_bias=True)
    return folder


@pytest.mark.parametrize("form", made.FORMS)
def test_every_form_reads_as_the_floats_that_it_stands_for(
    form: str, plain: Path, tmp_path: Path
) -> None:
    floats = made.save_quantized(plain, tmp_path / "q", form)
    target, stored = open_target(tmp_path / "q"), load_file(plain / "model.safetensors")
    assert not target.notes
    assert set(target.source.names()) == set(stored)
    assert len(floats) == 3 * 7
    for name, tensor in stored.items():
        info = target.source.info(name)
        assert info.shape == tuple(tensor.shape)
        wanted = floats.get(name, tensor.numpy())
        found = target.source.read(name)
        assert (found.dtype, found.flags.c_contiguous) == (np.float32, True)
        np.testing.assert_array_equal(found.view(np.uint32), wanted.view(np.uint32))
        for start, stop in ((0, 1), (3, 9), (len(wanted) - 5, len(wanted)), (7, 7)):
            part = target.source.read_rows(name, start, stop)
            np.testing.assert_array_equal(part.view(np.uint32), wanted[start:stop].view(np.uint32))
        is_quantized = name in floats
        assert (info.dtype, info.kept_as) == (
            (SCHEMES[form], None) if is_quantized else ("F32", "dense")
        )


@pytest.mark.parametrize("form", made.FORMS)
def test_codes_and_scales_are_handed_over_as_they_are_stored(
    form: str, plain: Path, tmp_path: Path
) -> None:
    floats = made.save_quantized(plain, tmp_path / "q", form)
    source, stored = open_target(tmp_path / "q").source, SafetensorsSource(tmp_path / "q")
    found = source.float_codes(f"{Q_PROJ}.weight")
    assert source.float_codes("model.embed_tokens.weight") is None
    assert source.q4_blocks(f"{Q_PROJ}.weight") is None
    if SCHEMES[form] not in (FP8, NVFP4):
        assert found is None
        return
    is_packed = form.startswith("compressed-nvfp4")
    codes = stored.raw(f"{Q_PROJ}.weight_packed" if is_packed else f"{Q_PROJ}.weight")
    assert found is not None
    again = source.float_codes(f"{Q_PROJ}.weight")
    assert again is not None
    assert found.codes.ctypes.data == again.codes.ctypes.data  # the mapped file itself
    np.testing.assert_array_equal(found.codes.view(np.uint8), codes.view(np.uint8))
    assert isinstance(found, Nvfp4Weight if SCHEMES[form] == NVFP4 else Fp8Weight)
    if isinstance(found, Nvfp4Weight):
        scales = stored.raw(f"{Q_PROJ}.weight_scale")
        np.testing.assert_array_equal(found.block_scales.view(np.uint8), scales.view(np.uint8))
    wanted = floats[f"{Q_PROJ}.weight"]
    np.testing.assert_allclose(found.dequantize(), wanted, rtol=3e-7 * is_packed, atol=0)


@pytest.mark.parametrize("name", ["compressed-nvfp4", "modelopt-nvfp4"])
def test_bytes_that_the_libraries_wrote(name: str, tmp_path: Path) -> None:
    written = json.loads((Path(__file__).parent / "nvfp4_written.json").read_text())[name]
    tensors: dict[str, Any] = {
        f"x.{leaf}": np.frombuffer(bytes.fromhex(data), dtype).reshape(shape)
        for leaf, (dtype, shape, data) in written["tensors"].items()
    }
    scales = tensors["x.weight_scale"]
    tensors["x.weight_scale"] = scales.view(ml_dtypes.float8_e4m3fn)
    source = read_stated(tmp_path, tensors, NVFP4)
    wanted = np.frombuffer(bytes.fromhex(written["floats"]), np.float32)
    np.testing.assert_array_equal(source.read("x.weight").reshape(-1), wanted)


def test_what_transformers_own_functions_make_of_a_weight(tmp_path: Path) -> None:
    config = FineGrainedFP8Config(weight_block_size=(32, 16))
    holder = SimpleNamespace(quantization_config=config)
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(96, 48, generator=generator)
    stored = Fp8Quantize(holder).convert({"x.weight": weight})
    assert set(stored) == {"x.weight", "x.weight_scale_inv"}
    wanted = Fp8Dequantize(holder)._dequantize_one(*stored.values(), torch.float32)
    save_file(stored, tmp_path / "model.safetensors")
    said = json.loads(config.to_json_string(use_diff=False))
    facts = Facts(tmp_path / "config.json", {"quantization_config": said})
    source = read_quantized(SafetensorsSource(tmp_path), read_quantization(facts), [])
    np.testing.assert_array_equal(source.read("x.weight"), wanted.numpy())


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_scale_of_the_whole_weight_may_have_axes(shape: tuple[int, ...], tmp_path: Path) -> None:
    source = read_stated(tmp_path, fp8_x(scale=np.full(shape, 0.5)), FP8)
    np.testing.assert_array_equal(source.read("x.weight"), 0.5 * np.arange(24).reshape(4, 6)
                                  .astype(ml_dtypes.float8_e4m3fn).astype(np.float32))  # fmt: skip
    packed = read_stated(tmp_path, nvfp4_x(scale=np.full(shape, 0.5)), NVFP4).float_codes(
        "x.weight"
    )
    assert packed is not None
    assert packed.scale == 0.5


@pytest.mark.parametrize("scheme", [FP8_CHANNEL, FP8_BLOCK])
def test_one_scale_is_what_a_weight_of_one_block_has(scheme: str, tmp_path: Path) -> None:
    source = read_stated(tmp_path, fp8_x(scale=[[0.5]]), scheme, block=(128, 128))
    assert source.info("x.weight").dtype == FP8


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_scales_may_have_16_bits(dtype: Any, tmp_path: Path) -> None:
    scales = np.array([[0.3], [0.7], [2.5], [1e-3]]).astype(dtype)
    source = read_stated(tmp_path, fp8_x() | {"x.weight_scale": scales}, FP8_CHANNEL)
    wanted = fp8_x()["x.weight"].astype(np.float32) * scales.astype(np.float32)
    np.testing.assert_array_equal(source.read("x.weight"), wanted)


def test_rows_are_dequantized_alone_and_a_whole_weight_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    width = 1024
    rows = 2 * PIECE_VALUES // width + 3
    codes = np.random.default_rng(0).integers(0, 127, (rows, width), np.uint8)
    tensors = {"x.weight": codes.view(ml_dtypes.float8_e4m3fn),
               "x.weight_scale": np.arange(1, rows + 1, dtype=np.float32)}  # fmt: skip
    source, sizes = read_stated(tmp_path, tensors, FP8_CHANNEL), []
    whole = quantized.fp8_values

    def seen(part: np.ndarray) -> np.ndarray:
        sizes.append(part.size)
        return whole(part)

    monkeypatch.setattr(quantized, "fp8_values", seen)
    row = source.read_rows("x.weight", rows - 2, rows - 1)
    assert sizes == [width]
    sizes.clear()
    found = source.read("x.weight")
    assert len(sizes) == 3
    assert max(sizes) <= PIECE_VALUES
    np.testing.assert_array_equal(found[rows - 2 : rows - 1], row)
    wanted = tensors["x.weight"].astype(np.float32) * tensors["x.weight_scale"][:, None]
    np.testing.assert_array_equal(found, wanted)


positive = st.floats(2.0**-20, 2.0**20, width=32)


@given(st.data())
def test_any_codes_and_scales_in_blocks(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    rows, width = data.draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    block = data.draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    bits = data.draw(hnp.arrays(np.uint8, (rows, width), elements=st.integers(0, 255)))
    bits[bits & 127 == 127] = 0  # NaN
    grid = -(-rows // block[0]), -(-width // block[1])
    scales = data.draw(hnp.arrays(np.float32, grid, elements=positive))
    codes = bits.view(ml_dtypes.float8_e4m3fn)
    folder = tmp_path_factory.mktemp("blocks")
    tensors = {"x.weight": codes, "x.weight_scale_inv": scales}
    source = read_stated(folder, tensors, FP8_BLOCK, block=block)
    steps = np.kron(scales, np.ones(block, np.float32))[:rows, :width]
    wanted = (codes.astype(np.float32) * steps).view(np.uint32)
    np.testing.assert_array_equal(source.read("x.weight").view(np.uint32), wanted)
    start = data.draw(st.integers(0, rows))
    part = source.read_rows("x.weight", start, rows)
    np.testing.assert_array_equal(part.view(np.uint32), wanted[start:])


@given(st.data())
def test_any_bytes_and_scales_of_nvfp4(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    rows, blocks = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 3)))
    packed = data.draw(hnp.arrays(np.uint8, (rows, blocks * 8), elements=st.integers(0, 255)))
    bits = data.draw(hnp.arrays(np.uint8, (rows, blocks), elements=st.integers(0, 126)))
    second = np.float32(data.draw(positive))
    divides = data.draw(st.booleans())
    scales = bits.view(ml_dtypes.float8_e4m3fn)
    leaves = ("weight_packed", "weight_global_scale") if divides else ("weight", "weight_scale_2")
    tensors = {"x.weight_scale": scales, f"x.{leaves[0]}": packed, f"x.{leaves[1]}": second}
    source = read_stated(tmp_path_factory.mktemp("nvfp4"),
                  {name: np.asarray(array) for name, array in tensors.items()}, NVFP4)  # fmt: skip
    nibbles = np.stack([packed & 15, packed >> 4], -1).reshape(rows, blocks, 16)
    values = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    wide = scales.astype(np.float32)
    steps = wide / second if divides else wide * second
    wanted = (values * steps[..., None]).reshape(rows, -1).view(np.uint32)
    np.testing.assert_array_equal(source.read("x.weight").view(np.uint32), wanted)


def test_a_block_may_be_zero(tmp_path: Path) -> None:
    tensors = nvfp4_x()
    tensors["x.weight_scale"][1, 1] = 0
    found = read_stated(tmp_path, tensors, NVFP4).read("x.weight").reshape(3, 2, 16)
    assert not found[1, 1].any()
    assert found[1, 0].any()


@pytest.mark.parametrize(
    "names",
    [("k_proj.k_scale", "v_proj.v_scale"), ("k_scale", "v_scale"), ("q_scale", "kv_scale"),
     ("k_proj.output_scale", "v_proj.output_scale"), ("q_proj.output_scale", "kv_scale")],
)  # fmt: skip
def test_scales_of_a_quantized_cache_are_left_out_with_a_note(
    names: tuple[str, str], plain: Path, tmp_path: Path
) -> None:
    at = "model.layers.0.self_attn."
    more = {at + name: torch.tensor(0.1) for name in names}
    made.save_quantized(plain, tmp_path / "q", "modelopt-fp8", edit=lambda held: held.update(more))
    target = open_target(tmp_path / "q")
    (note,) = target.notes
    assert "2 scales of a quantized KV cache are not used" in note
    assert set(target.source.names()) == set(load_file(plain / "model.safetensors"))


@pytest.mark.parametrize("config", [None, {}, made.modelopt(None, quant_method="modelopt")])
@pytest.mark.parametrize("file", [None, made.modelopt(None, kv_cache_quant_algo=None)])
def test_what_says_that_nothing_is_quantized(
    config: Any, file: Any, plain: Path, tmp_path: Path
) -> None:
    made.save_quantized(plain, tmp_path / "plain", {})
    made.say(tmp_path / "plain", config, file)
    target = open_target(tmp_path / "plain")
    assert not target.notes
    info = target.source.info(f"{Q_PROJ}.weight")
    assert (info.dtype, info.kept_as) == ("F32", None)
    made.save_quantized(plain, tmp_path / "q", "modelopt-nvfp4")
    (tmp_path / "q" / "hf_quant_config.json").unlink()
    made.say(tmp_path / "q", config, file)
    with pytest.raises(BadTensor, match=r"proj\.weight is quantized, but no JSON file"):
        open_target(tmp_path / "q")


def test_layers_that_a_mixed_checkpoint_names_and_leaves_plain(plain: Path, tmp_path: Path) -> None:
    floats = made.save_quantized(plain, tmp_path / "q", {"self_attn.q_proj": "modelopt-fp8"})
    says = {"self_attn.q_proj": "FP8", "self_attn.k_proj": None, "mlp.up_proj": "NONE"}
    layers = {f"model.layers.0.{name}": made.modelopt(each) for name, each in says.items()}
    made.say(tmp_path / "q", None, made.modelopt("MIXED_PRECISION", quantized_layers=layers))
    source = open_target(tmp_path / "q").source
    np.testing.assert_array_equal(source.read(f"{Q_PROJ}.weight"), floats[f"{Q_PROJ}.weight"])
    for name in ("self_attn.k_proj", "mlp.up_proj"):
        assert source.info(f"model.layers.0.{name}.weight").kept_as == "dense"


def test_layers_in_fp8_beside_others_in_nvfp4_say_so(plain: Path, tmp_path: Path) -> None:
    forms = {"self_attn": "modelopt-fp8", "mlp": "modelopt-nvfp4"}
    floats = made.save_quantized(plain, tmp_path / "q", forms)
    layers = {
        name.removesuffix(".weight"): made.modelopt("FP8" if "self_attn" in name else "NVFP4")
        for name in floats
    }
    made.say(tmp_path / "q", None, made.modelopt("MIXED_PRECISION", quantized_layers=layers))
    source = open_target(tmp_path / "q").source
    assert source.info(f"{Q_PROJ}.weight").kept_as == "fp8"
    assert source.info("model.layers.0.mlp.up_proj.weight").kept_as is None
    assert source.info("lm_head.weight").kept_as == "dense"
    for name, wanted in floats.items():
        np.testing.assert_array_equal(source.read(name), wanted)


@pytest.mark.parametrize("form", ["compressed-nvfp4", "modelopt-drafter-nvfp4"])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_quantized_drafter(prefix: str, form: str, tmp_path: Path) -> None:
    plain = save_drafter(
        tmp_path / "a", {prefix + name: tensor for name, tensor in drafter_tensors().items()}
    )
    floats = made.save_quantized(plain, tmp_path / "q", form)
    drafter = open_drafter(tmp_path / "q")
    assert len(floats) == 2 * 7
    for name, wanted in floats.items():
        np.testing.assert_array_equal(drafter.source.read(name.removeprefix("model.")), wanted)
    assert drafter.source.float_codes("layers.0.self_attn.q_proj.weight") is not None
    assert drafter.source.info("fc.weight").kept_as == "dense"


@pytest.mark.parametrize("form", ["modelopt-fp8", "modelopt-nvfp4", "compressed-fp8-channel"])
def test_a_draft_vocabulary_has_rows_of_a_quantized_head(
    form: str, plain: Path, tmp_path: Path
) -> None:
    made.save_quantized(plain, tmp_path / "q", {"lm_head": form, "_proj.": form})
    made.say(tmp_path / "q", made.FORMS[form].config, made.FORMS[form].modelopt)
    source, ids = open_target(tmp_path / "q").source, np.array([3, 4, 90], np.int32)
    rows = ChosenRows(source, "lm_head.weight", "head", ids)
    wanted = source.read("lm_head.weight")[ids]
    np.testing.assert_array_equal(rows.read("head"), wanted)
    codes = rows.float_codes("head")
    assert (codes is None) == (SCHEMES[form] == FP8_CHANNEL)
    if codes is not None:
        np.testing.assert_array_equal(codes.dequantize(), wanted)
    embedding = ChosenRows(source, "model.embed_tokens.weight", "head", ids)
    assert embedding.info("head").kept_as == "dense"
    assert embedding.float_codes("head") is None
