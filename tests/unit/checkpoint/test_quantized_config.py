"""What a checkpoint says of its quantization: read, or refused by name before weights come."""

from __future__ import annotations

import json
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
from tiny.quantized import FINEGRAINED, IN_BLOCKS, compressed, group, modelopt

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
MIXED = {"a": modelopt("FP8"), "b": modelopt("NVFP4", group_size=16), "c": modelopt("FP8")}


@pytest.mark.parametrize(
    ("config", "schemes", "block"),
    [
        (modelopt("FP8", quant_method="modelopt"), {FP8}, None),
        (modelopt("NVFP4", quant_method="modelopt", kv_cache_scheme=EIGHT), {NVFP4}, None),
        (modelopt("MIXED_PRECISION", quant_method="modelopt", quantized_layers=MIXED),
         {FP8, NVFP4}, None),
        (compressed("float-quantized", group(8, "tensor")), {FP8}, None),
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
    wanted = Quantization(str(tmp_path / "hf_quant_config.json"), frozenset({NVFP4}))
    assert said(tmp_path, None, file) == wanted
    assert said(tmp_path, modelopt("NVFP4", quant_method="modelopt"), file) is not None
    with pytest.raises(CheckpointError, match=r"says FP8 with one scale, but hf_.* says NVFP4$"):
        said(tmp_path, modelopt("FP8", quant_method="modelopt"), file)


def test_nothing_said(tmp_path: Path) -> None:
    assert said(tmp_path) is None


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
        (FINEGRAINED | {"scale_fmt": "ue8m0"}, "quantization_config.scale_fmt 'ue8m0'"),
        (FINEGRAINED | {"fmt": "e5m2"}, "quantization_config.fmt 'e5m2'"),
        *(({"quant_method": name}, rf"quantization_config \('{name}'\) is not supported")
          for name in ("gptq", "awq", "mxfp4", "bitsandbytes", "fbgemm_fp8", "torchao")),
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
        ({}, "quantization_config.quant_method is missing"),
        (modelopt(None, quant_method="modelopt"), "quantization_config.quant_algo is missing"),
        (modelopt("MIXED_PRECISION", quant_method="modelopt"), "quantized_layers names no layer"),
        (modelopt("MIXED_PRECISION", quant_method="modelopt", quantized_layers={"a": 1}),
         "quantized_layers.a is 1, expected an object"),
        (compressed("float-quantized"), "quantization_config.config_groups is missing or empty"),
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
