"""Quantized checkpoints: refused as that, by a key, a file, a type or a tensor's name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import drafter_tensors, save_drafter, save_hf
from safetensors.torch import load_file, save_file

from dflash_trt.checkpoint import open_drafter, open_target
from dflash_trt.errors import BadTensor, UnsupportedArchitecture

Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    save_hf(folder, "qwen3")
    return folder


@pytest.mark.parametrize(
    ("add", "remove", "message"),
    [
        ({f"{Q_PROJ}.weight": torch.ones(64, 64).to(torch.float8_e4m3fn)}, None,
         "q_proj.weight has type F8_E4M3"),
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
def test_quantized_weights_are_called_that_before_any_is_read(
    tmp_path: Path, qwen3: Path, add: Any, remove: str | None, message: str
) -> None:
    tensors = load_file(qwen3 / "model.safetensors") | add
    tensors.pop(remove, None)
    (tmp_path / "config.json").write_text((qwen3 / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(BadTensor, match=message) as caught:
        open_target(tmp_path)
    assert "use the unquantized checkpoint" in caught.value.hint


@pytest.mark.parametrize("name", ["hf_quant_config.json", "quantize_config.json"])
def test_a_file_that_says_quantized(tmp_path: Path, qwen3: Path, name: str) -> None:
    (tmp_path / "config.json").write_text((qwen3 / "config.json").read_text())
    (tmp_path / name).write_text("{}")
    with pytest.raises(UnsupportedArchitecture, match=name):
        open_target(tmp_path)


def test_a_quantized_drafter(tmp_path: Path) -> None:
    tensors = drafter_tensors()
    eight = {"fc.weight": tensors["fc.weight"].to(torch.float8_e4m3fn)}
    with pytest.raises(BadTensor, match=r"fc\.weight has type F8_E4M3"):
        open_drafter(save_drafter(tmp_path / "a", tensors | eight))
    scale = {"layers.0.self_attn.q_proj.weight_scale": torch.ones(1)}
    with pytest.raises(BadTensor, match=r"weight_scale is there: the checkpoint is quantized"):
        open_drafter(save_drafter(tmp_path / "b", tensors | scale))
