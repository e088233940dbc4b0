"""The recipe's modules by name, and a small random target that speaks a chat format."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tiny import save_target

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes/train-drafter"))


@pytest.fixture(scope="session")
def target() -> Any:
    """Six layers, FP32, with weights far from uniform so that choices are clear."""
    torch.manual_seed(1)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=48, intermediate_size=96, num_hidden_layers=6,
            num_attention_heads=6, num_key_value_heads=2, head_dim=8, max_position_embeddings=256,
            bos_token_id=1, eos_token_id=2, tie_word_embeddings=True,
            rope_parameters={"rope_theta": 1000.0, "rope_type": "default"},
        )
    )  # fmt: skip
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.3)
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="session")
def target_folder(target: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same target as a checkpoint, with a tokenizer of one character a token."""
    folder = tmp_path_factory.mktemp("target")
    save_target(folder, "llama", vocab_size=target.config.vocab_size)
    target.save_pretrained(folder)
    template = "{% for m in messages %}U:{{ m.content }};A:{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture
def options() -> Namespace:
    """What responses.py gets from its command line."""
    return Namespace(slots=3, max_tokens=60, user=12, answer=20, seed=0)
