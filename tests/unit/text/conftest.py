"""Tiny tokenizers of both kinds, and the real SmolLM2 file where it is installed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from demo_pair import find_demo_target
from dflash_trt.checkpoint.gguf_tokenizer import load_gguf_tokenizer, tokenizer_metadata
from dflash_trt.text import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 12345 o'clock, isn't it?",
    "def main(argv):\n    return sum(int(x) for x in argv)  # total\n",
    "Grüße aus Köln, où l'été est à la plage. 你好、世界。今日はいい天気ですね。",
    "emoji 😀😃 👩‍👩‍👧 flags 🇩🇪 and math ∑ ∞ ½",
] * 4
SPECIALS = ["<unk>", "<s>", "</s>", "<|user|>", "<|end|>"]


def byte_level_backend(regex: bool = True) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(["<tool>", "汉字"])
    return backend


def sentencepiece_backend() -> tokenizers.Tokenizer:
    """A Llama-2-like tokenizer: byte fallback, a leading space that decoding drops, BOS added."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    # Only English is learnt, so all else goes through bytes.
    trained.train_from_iterator(
        CORPUS[:2] * 4, trainers.BpeTrainer(vocab_size=200, show_progress=False)
    )
    model = json.loads(trained.to_str())["model"]
    learnt = sorted(model["vocab"], key=model["vocab"].__getitem__)
    names = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), *learnt]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={name: index for index, name in enumerate(names)},
            merges=[tuple(pair) for pair in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = trained.normalizer
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(SPECIALS)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B:1", special_tokens=[("<s>", 1)]
    )
    return backend


def wrap(backend: tokenizers.Tokenizer, **options: Any) -> Tokenizer:
    options.setdefault("special_tokens", {"bos_token": "<s>", "eos_token": "</s>"})
    return Tokenizer(backend, templates=options.pop("templates", {}), source="test", **options)


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    return wrap(byte_level_backend())


@pytest.fixture(scope="session")
def sentencepiece() -> Tokenizer:
    return wrap(sentencepiece_backend())


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Write a checkpoint's tokenizer files: keyword `name="text"` or JSON, `.` as `_dot_`."""

    def write(backend: tokenizers.Tokenizer | None = None, **files: Any) -> Path:
        (backend or byte_level_backend()).save(str(tmp_path / "tokenizer.json"))
        for key, content in files.items():
            path = tmp_path / key.replace("_dot_", ".").replace("_slash_", "/")
            path.parent.mkdir(exist_ok=True)
            text = content if isinstance(content, str) else json.dumps(content)
            path.write_text(text, encoding="utf-8")
        return tmp_path

    return write


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real model file."""
    return find_demo_target()


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return load_gguf_tokenizer(smollm2_path)


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    """Write a GGUF file that has a tokenizer and nothing else."""
    gguf = pytest.importorskip("gguf")

    def write(found: dict[str, Any]) -> Path:
        path = tmp_path / "model.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        for key, value in found.items():
            if isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
            elif isinstance(value, str):
                writer.add_string(key, value)
            else:
                writer.add_array(key, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return path

    return write


@pytest.fixture(scope="session")
def smollm2_metadata(smollm2_path: Path) -> dict[str, Any]:
    return tokenizer_metadata(smollm2_path)


@pytest.fixture(scope="session")
def make_backend() -> dict[str, Callable[..., tokenizers.Tokenizer]]:
    return {"byte_level": byte_level_backend, "sentencepiece": sentencepiece_backend}


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., Tokenizer]:
    return wrap
