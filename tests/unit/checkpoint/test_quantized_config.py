"""What a checkpoint says of its quantization: read, or refused by name before weights come."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import drafter_tensors, save_drafter, save_hf
from safetensors.torch import load_file, save_file

from dflash_trt.checkpoint import open_drafter, open_target
from dflash_trt.checkpoint.facts import Facts, read_json
from dflash_trt.checkpoint.quantized_config import (
    FP8,
    FP8_BLOCK,
    FP8_CHANNEL,
    NVFP4,
    Quantization,
    read_quantization,
)
from dflash_trt.checkpoint.target import folder_config
from dflash_trt.errors import BadTensor, CheckpointError, UnsupportedArchitecture
from tiny.quantized import FINEGRAINED, IN_BLOCKS, compressed, group, modelopt, whole_file

Q_PROJ = "model.layers.0.self_attn.q_proj"
U = UnsupportedArchitecture


def said(folder: Path, config: Any = None, modelopt_file: Any = None) -> Quantization | None:
    """What is read of a folder with these two."""
    data = {} if config is None else {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(data))
    if modelopt_file is not None:
        content = {"quantization": modelopt_file}
        (folder / "hf_quant_config.json").write_text(json.dumps(content))
    return read_quantization(Facts(folder / "config.json", read_json(folder / "config.json")))


EIGHT = {"num_bits": 8, "type": "float"}
KV_GROUP = {"targets": ["LlamaAttention"], "weights": None, "input_activations": EIGHT}
HALF = {"a": modelopt("FP8"), "b": modelopt(None), "c": modelopt("NONE")}
MIXED = {"a": modelopt("FP8"), "b": modelopt("NVFP4", group_size=16), "c": modelopt("FP8")}


@pytest.mark.parametrize(
    ("config", "schemes", "block"),
    [
        (modelopt("FP8", quant_method="modelopt"), {FP8}, None),
        (modelopt("NVFP4", quant_method="modelopt", kv_cache_scheme=EIGHT), {NVFP4}, None),
        (modelopt("MIXED_PRECISION", quant_method="modelopt", quantized_layers=MIXED),
         {FP8, NVFP4}, None),
        (modelopt("MIXED_PRECISION", quant_method="modelopt", quantized_layers=HALF), {FP8}, None),
        (whole_file(modelopt("W4A16_NVFP4", group_size=16)), {NVFP4}, None),
        (whole_file(modelopt("FP8")) | {"quant_method": "modelopt"}, {FP8}, None),
        (whole_file(modelopt("MIXED_PRECISION", quantized_layers=MIXED)), {FP8, NVFP4}, None),
        (compressed("float-quantized", group(8, "tensor")), {FP8}, None),
        (compressed("float-quantized", group(8, None)), {FP8}, None),
        (compressed("float-quantized", KV_GROUP, group(8, "channel"), {"targets": ["Linear"]},
                    kv_cache_scheme=EIGHT), {FP8_CHANNEL}, None),
        *((compressed("float-quantized", group(8, "tensor"), transform_config=empty), {FP8}, None)
          for empty in (None, {}, {"config_groups": {}}, {"config_groups": None})),
        (compressed("float-quantized", group(8, "block", block_structure="128x64")),
         {FP8_BLOCK}, (128, 64)),
        (IN_BLOCKS | {"scale_fmt": "ue8m0"}, {FP8_BLOCK}, (32, 20)),
        (IN_BLOCKS | {"scale_fmt": "float"}, {FP8_BLOCK}, (32, 20)),
        (compressed("float-quantized", group(8, "tensor"), group(8, "channel")),
         {FP8, FP8_CHANNEL}, None),
        (compressed("mixed-precision", group(8, "channel") | {"format": "float-quantized"},
                    group(4, "tensor_group") | {"format": "nvfp4-pack-quantized"}),
         {FP8_CHANNEL, NVFP4}, None),
        (compressed("float-quantized", group(8, "block", block_structure=[64, 32]),
                    sparsity_config={}, transform_config={}), {FP8_BLOCK}, (64, 32)),
        (compressed("float-quantized", group(8, "tensor"), sparsity_config={"format": "dense"}),
         {FP8}, None),
        (IN_BLOCKS, {FP8_BLOCK}, (32, 20)),
        (FINEGRAINED | {"weight_block_size": None}, {FP8}, None),
        # transformers' own default, and what AutoFP8's files leave out.
        (FINEGRAINED, {FP8, FP8_BLOCK}, (128, 128)),
    ],
)  # fmt: skip
def test_schemes_that_are_read(config: Any, schemes: set[str], block: Any, tmp_path: Path) -> None:
    found = said(tmp_path, config)
    assert found is not None
    assert (found.schemes, found.block) == (schemes, block)
    assert found.place == f"{tmp_path / 'config.json'}: quantization_config"


def test_modelopts_own_file(tmp_path: Path) -> None:
    file = modelopt("W4A16_NVFP4", kv_cache_quant_algo="FP8", group_size=16)
    place = str(tmp_path / "hf_quant_config.json")
    wanted = Quantization(place, frozenset({NVFP4}), weights_only=True)
    assert said(tmp_path, None, file) == wanted
    assert said(tmp_path, modelopt("NVFP4", quant_method="modelopt"), file) is not None
    with pytest.raises(CheckpointError, match=r"says FP8 with one scale, but hf_.* says NVFP4$"):
        said(tmp_path, modelopt("FP8", quant_method="modelopt"), file)


PLAIN_LAYERS = modelopt("MIXED_PRECISION", quantized_layers={"a": modelopt(None)})
NOTHING: list[Any] = [
    modelopt(None), modelopt(None, kv_cache_quant_algo=None), modelopt("NONE"), PLAIN_LAYERS,
]  # fmt: skip


@pytest.mark.parametrize("nothing", NOTHING)
def test_nothing_is_quantized(nothing: Any, tmp_path: Path) -> None:
    method = {"quant_method": "modelopt"}
    assert said(tmp_path, nothing | method) is None
    assert said(tmp_path, whole_file(nothing)) is None
    for config in (None, {}, whole_file(nothing)):
        assert said(tmp_path, config, nothing) is None
    with pytest.raises(CheckpointError, match=r"says NVFP4, but .* says that no weight is quant"):
        said(tmp_path, modelopt("NVFP4") | method, nothing)
    with pytest.raises(CheckpointError, match=r"says that no weight is quantized, but .* NVFP4$"):
        said(tmp_path, nothing | method, modelopt("NVFP4"))
    cached = nothing | {"kv_cache_quant_algo": "FP8"}
    with pytest.raises(U, match="a quantized KV cache, with weights that are not"):
        said(tmp_path, whole_file(cached))


def test_nothing_said(tmp_path: Path) -> None:
    assert said(tmp_path) is None
    assert said(tmp_path, {}) is None
    found = said(tmp_path, {}, modelopt("NVFP4"))
    assert found is not None
    assert found.place == str(tmp_path / "hf_quant_config.json")


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_modelopts_file_is_no_file(make: Any, tmp_path: Path) -> None:
    make(tmp_path / "hf_quant_config.json")
    with pytest.raises(CheckpointError, match=r"hf_quant_config\.json: is not a file$"):
        said(tmp_path)


INT4 = group(4, "group", group_size=128)
INT4["weights"]["type"] = "int"
ROTATED = {"config_groups": {"u": {"type": "hadamard"}}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        *(
            (modelopt(name, quant_method="modelopt"), f"quant_algo '{name}' is not supported")
            for name in ("NVFP4_AWQ", "NVFP4_SVD", "W4A16_AWQ", "W4A8_AWQ", "MXFP8", "W8A16",
                         "W8A8_SQ_PER_CHANNEL", "W4A8_MXFP4_FP8", "fp8_pb_wo")
        ),
        (modelopt("MIXED_PRECISION", quant_method="modelopt",
                  quantized_layers=MIXED | {"d": modelopt("W4A16_AWQ")}), "quant_algo 'W4A16_AWQ'"),
        (modelopt(None, quant_method="modelopt", kv_cache_scheme=EIGHT),
         "a quantized KV cache, with weights that are not, is not supported"),
        (modelopt(None, quant_method="modelopt", kv_cache_quant_algo="FP8"), "quantized KV cache"),
        (compressed("float-quantized") | {"kv_cache_scheme": EIGHT}, "quantized KV cache"),
        (compressed("float-quantized", KV_GROUP, kv_cache_scheme=EIGHT), "quantized KV cache"),
        (whole_file(modelopt("NVFP4_AWQ")), "quant_algo 'NVFP4_AWQ' is not supported"),
        (whole_file(modelopt("FP8")) | {"quant_method": "gptq"}, "'gptq'"),
        # compressed-tensors makes groups or rows of these.
        (compressed("float-quantized", group(8, None, group_size=128)), "8, 'float', None"),
        (compressed("float-quantized", group(8, None, group_size=-1)), "8, 'float', None"),
        (compressed("float-quantized", group(8, None, block_structure=[64, 32])), "None"),
        (compressed("float-quantized", group(4, None)), "4, 'float', None"),
        (compressed("nvfp4-pack-quantized", group(8, None)), "8, 'float', None"),
        (compressed("float-quantized", group(8, "tensor"),
                    transform_config=ROTATED | {"format": "dense"}), "transform_config"),
        (compressed("pack-quantized", INT4),
         r"format 'pack-quantized' \(weights 4, 'int', 'group'\) is not supported"),
        (compressed("int-quantized", INT4), "format 'int-quantized'"),
        (compressed("mxfp4-pack-quantized", group(4, "group")), "'mxfp4-pack-quantized'"),
        (compressed("mxfp8-quantized", group(8, "group")), "'mxfp8-quantized'"),
        (compressed("float-quantized", group(8, "tensor", symmetric=False)), "asymmetric"),
        (compressed("float-quantized", group(8, "token")), "'token'"),
        (compressed("float-quantized", group(8, ["tensor"])), "'tensor'"),
        (compressed("dense", group(8, "tensor")), "format 'dense' for FP8 with one scale"),
        (compressed("float-quantized", group(4, "tensor_group")), "'float-quantized' for NVFP4"),
        (compressed("float-quantized", group(8, "block", block_structure=[64, 32]),
                    group(8, "block", block_structure=[1, 128])),
         r"blocks of sizes \[\(1, 128\), \(64, 32\)\]"),
        (compressed("float-quantized", group(8, "tensor"), transform_config=ROTATED),
         "quantization_config.transform_config"),
        (compressed("float-quantized", group(8, "tensor"),
                    sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config"),
        (FINEGRAINED | {"scale_fmt": "e8m0"}, "quantization_config.scale_fmt 'e8m0'"),
        (FINEGRAINED | {"fmt": "e5m2"}, "quantization_config.fmt 'e5m2'"),
        *(({"quant_method": name}, rf"quantization_config \('{name}'\) is not supported")
          for name in ("gptq", "awq", "mxfp4", "bitsandbytes", "fbgemm_fp8", "torchao",
                       "modelopt_fp4")),
    ],
)  # fmt: skip
def test_what_is_not_read_is_refused_by_name(config: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(U, match=message) as caught:
        said(tmp_path, config)
    assert caught.value.message.startswith(f"{tmp_path / 'config.json'}: ")
    assert "\n" not in caught.value.message
    assert "use the unquantized checkpoint" in caught.value.hint


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (3, "quantization_config is 3, expected an object"),
        ({"ignore": []}, "quantization_config.quant_method is missing"),
        ({"quantization": None}, "quantization_config.quant_method is missing"),
        ({"quantization": []}, r"quantization_config.quantization is \[\], expected an object"),
        ({"quantization": {}}, "quantization_config.quantization.quant_algo is missing"),
        ({"quant_method": "modelopt"}, "quantization_config.quant_algo is missing"),
        (modelopt("MIXED_PRECISION", quant_method="modelopt", quantized_layers={"a": {}}),
         "quantized_layers.a.quant_algo is missing"),
        (modelopt("MIXED_PRECISION", quant_method="modelopt"), "quantized_layers names no layer"),
        (modelopt("MIXED_PRECISION", quant_method="modelopt", quantized_layers={"a": 1}),
         "quantized_layers.a is 1, expected an object"),
        (compressed("float-quantized"), "config_groups is missing, empty or without weights"),
        (compressed("float-quantized", KV_GROUP), "config_groups is missing, empty or without"),
        *((compressed("float-quantized", group(8, "block", block_structure=text)),
           f"weights.block_structure is '{text}', expected") for text in ("128", "0x128", "8x-8")),
        (compressed("float-quantized") | {"config_groups": {"FP8": ["Linear"]}},
         r"config_groups.FP8 is \['Linear'\], expected an object"),
        (compressed("float-quantized", group(8, "block")), "weights.block_structure is missing"),
        (compressed("float-quantized", group(8, "tensor", symmetric="yes")), "symmetric is 'yes'"),
        (FINEGRAINED | {"weight_block_size": [128]}, r"weight_block_size is \[128\], expected two"),
        (FINEGRAINED | {"weight_block_size": [128, 0]}, r"weight_block_size is \[128, 0\]"),
        (FINEGRAINED | {"weight_block_size": [128, -1]}, r"weight_block_size is \[128, -1\]"),
    ],
)  # fmt: skip
def test_values_that_are_none(config: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        said(tmp_path, config)
    assert str(tmp_path / "config.json") in caught.value.message


def test_many_sizes_of_blocks_are_not_all_printed(tmp_path: Path) -> None:
    groups = [group(8, "block", block_structure=[8, size]) for size in range(1, 2000)]
    with pytest.raises(U, match=r"blocks of sizes \[\(8, 1\), \(8, 2\), .*\.\.\.") as caught:
        said(tmp_path, compressed("float-quantized", *groups))
    assert len(caught.value.message) < len(str(tmp_path)) + 300


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    save_hf(folder, "qwen3")
    return folder


@pytest.mark.parametrize("name", ["quant_config.json", "quantize_config.json"])
def test_files_of_other_tools(tmp_path: Path, qwen3: Path, name: str) -> None:
    (tmp_path / "config.json").write_text((qwen3 / "config.json").read_text())
    (tmp_path / name).write_text("{}")
    for read in (open_target, lambda folder: folder_config(folder, [])):
        with pytest.raises(U, match=rf"{name}: a checkpoint of GPTQ or AWQ is not supported"):
            read(tmp_path)


def test_a_config_is_refused_before_its_weights_come(tmp_path: Path, qwen3: Path) -> None:
    data = json.loads((qwen3 / "config.json").read_text())
    data |= {"quantization_config": {"quant_method": "gptq"}}
    (tmp_path / "config.json").write_text(json.dumps(data))
    with pytest.raises(U, match="'gptq'"):
        folder_config(tmp_path, [])


@pytest.mark.parametrize(
    ("add", "remove", "message"),
    [
        ({f"{Q_PROJ}.weight": torch.ones(64, 64).to(torch.float8_e5m2)}, None, "type F8_E5M2"),
        ({f"{Q_PROJ}.weight": torch.ones(64, 8, dtype=torch.uint32)}, None, "has type U32"),
        ({f"{Q_PROJ}.weight": torch.ones(64, 64, dtype=torch.int8)}, None, "has type I8"),
        ({f"{Q_PROJ}.weight_scale": torch.ones(1)}, None, "weight_scale is there: .* quantized"),
        ({f"{Q_PROJ}.k_scale": torch.ones(1)}, None, "k_scale is there: .* quantized"),
        ({f"{Q_PROJ}.output_scale": torch.ones(1)}, None, "output_scale is there: .* quantized"),
        ({f"{Q_PROJ}.scales": torch.ones(64, 1)}, None, "scales is there: .* quantized"),
        ({f"{Q_PROJ}.weight_packed": torch.ones(64, 8, dtype=torch.int32)}, f"{Q_PROJ}.weight",
         "weight_packed is there: .* quantized"),
        ({f"{Q_PROJ}.qweight": torch.ones(8, 64, dtype=torch.int32)}, f"{Q_PROJ}.weight",
         "qweight is there: .* quantized"),
    ],
)  # fmt: skip
def test_other_quantized_weights_are_called_that_before_any_is_read(
    tmp_path: Path, qwen3: Path, add: Any, remove: str | None, message: str
) -> None:
    tensors = load_file(qwen3 / "model.safetensors") | add
    tensors.pop(remove, None)
    (tmp_path / "config.json").write_text((qwen3 / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(BadTensor, match=message) as caught:
        open_target(tmp_path)
    assert "use the unquantized checkpoint" in caught.value.hint


def test_a_drafter_that_is_quantized_in_another_way(tmp_path: Path) -> None:
    tensors = drafter_tensors()
    eight = {"fc.weight": tensors["fc.weight"].to(torch.float8_e4m3fn)}
    with pytest.raises(BadTensor, match=r"fc\.weight is quantized, but no JSON file"):
        open_drafter(save_drafter(tmp_path / "a", tensors | eight))
    scale = {"layers.0.self_attn.q_proj.weight_scale": torch.ones(1)}
    with pytest.raises(BadTensor, match=r"weight_scale is there: the checkpoint is quantized"):
        open_drafter(save_drafter(tmp_path / "b", tensors | scale))
