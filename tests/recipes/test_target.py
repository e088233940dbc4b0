"""The target in PyTorch from any checkpoint that an engine is built from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import target as targets
import tokenizers
import torch
from origin import choose_layers
from safetensors.torch import load_file, save_file
from target import ChatFormat, find_mask_token

from dflash_trt.errors import BadTensor, ConfigError, UnsupportedArchitecture
from dflash_trt.text import Tokenizer
from tiny import save_target

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1000.0, "factor": 4.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3", {}),
        ("qwen3", {"rope_parameters": YARN, "tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"rope_parameters": LLAMA3}),
    ],
)
def test_a_folder_is_what_transformers_reads(
    family: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "DTYPE", torch.float32)
    wanted = save_target(tmp_path, family, **options)
    found = targets.load_target(tmp_path)
    ids = torch.randint(160, (2, 200), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        torch.testing.assert_close(found(ids).logits, wanted(ids).logits)


@pytest.mark.parametrize(
    ("able", "wanted"),
    [
        ({"avx2": True, "avx512_f": True, "avx512_bf16": False}, torch.float32),
        ({"avx512_bf16": True}, torch.bfloat16),
        ({"architecture": "aarch64", "bf16": True}, torch.bfloat16),
    ],
)
def test_a_cpu_computes_in_bf16_only_if_it_can(
    able: dict[str, Any], wanted: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: able)
    assert targets.best_dtype() is wanted


def test_windows_are_refused(tmp_path: Path) -> None:
    save_target(tmp_path, use_sliding_window=True, sliding_window=8, max_window_layers=2)
    with pytest.raises(UnsupportedArchitecture, match="sliding windows"):
        targets.read_facts(tmp_path)


def test_a_tied_target_whose_stored_head_differs_is_refused_before_any_work(
    tmp_path: Path,
) -> None:
    """An engine would be refused after the training, which had taken the embedding."""
    save_target(tmp_path, tie_word_embeddings=True)
    weights = load_file(tmp_path / "model.safetensors")
    head = weights["model.embed_tokens.weight"].clone()
    for changed in (head, head * 2):
        stored = weights | {"lm_head.weight": changed}
        save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
        if changed is head:
            targets.read_facts(tmp_path)
    with pytest.raises(BadTensor, match="although tie_word_embeddings is true"):
        targets.read_facts(tmp_path)
    with pytest.raises(BadTensor, match="although tie_word_embeddings is true"):
        targets.load_target(tmp_path)


def test_layers_by_number_or_by_name() -> None:
    assert choose_layers(5, 30) == (1, 8, 14, 20, 27)
    assert choose_layers(5, 36) == (1, 9, 17, 25, 33)
    assert choose_layers(1, 30) == (15,)
    assert choose_layers((1, 28), 30) == (1, 28)


@pytest.mark.parametrize("features", [29, (1, 29), (3, 3), (8, 1)])
def test_layers_that_cannot_be(features: Any) -> None:
    with pytest.raises(SystemExit):
        choose_layers(features, 30)


def a_tokenizer(folder: Path, special: str, stop: str) -> Tokenizer:
    """With these characters as special tokens, one of them the end of a text."""
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_tokens([tokenizers.AddedToken(token, special=True) for token in special])
    return Tokenizer(
        backend,
        special_tokens={"eos_token": stop},
        templates={"default": "U:{{ messages[0].content }};A:"},
        source="here",
    )


def test_the_mask_token_is_the_last_that_chats_do_not_have(target_folder: Path) -> None:
    tokenizer = a_tokenizer(target_folder, special="#$;", stop="$")
    chat = ChatFormat.of(tokenizer)
    wanted = tokenizer.token_to_id("#")
    assert find_mask_token(None, tokenizer, chat, 256) == wanted
    assert find_mask_token("#", tokenizer, chat, 256) == wanted
    assert find_mask_token("200", tokenizer, chat, 256) == 200
    for asked, size in ((None, 3), ("256", 256), ("##", 256)):
        with pytest.raises(ConfigError):
            find_mask_token(asked, tokenizer, chat, size)


def test_a_message_ends_at_its_end_or_at_the_models(target_folder: Path) -> None:
    tokenizer = a_tokenizer(target_folder, special="#$;", stop="$")
    chat = ChatFormat.of(tokenizer)
    assert [tokenizer.decode(ids, False) for ids in (chat.before, chat.after)] == ["U:", ";A:"]
    assert chat.ends == {tokenizer.token_to_id(";"), tokenizer.token_to_id("$")}


def test_ordinary_tokens_end_no_message(target_folder: Path) -> None:
    """A newline behind a message may be in one too."""
    tokenizer = a_tokenizer(target_folder, special="#$", stop="$")
    chat = ChatFormat.of(tokenizer)
    assert tokenizer.decode(chat.after, False) == ";A:"
    assert chat.ends == {tokenizer.token_to_id("$")}
