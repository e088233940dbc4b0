"""GGUF tokenizers: ids pinned from llama.cpp, families from transformers, bad files refused."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, normalizers, pre_tokenizers

from dflash_trt.checkpoint.gguf_tokenizer import load_gguf_tokenizer, tokenizer_metadata
from dflash_trt.errors import CheckpointError, DFlashError, TokenizerError
from dflash_trt.text import Tokenizer

# Made once with llama.cpp, an implementation that shares no code with ours: its "source" says how.
GOLDEN = json.loads((Path(__file__).parent / "llama_cpp_ids.json").read_text(encoding="utf-8"))
PRE = "tokenizer.ggml.pre"
WriteGguf = Callable[..., Path]


def test_real_file_loads_fast_and_whole(smollm2_path: Path) -> None:
    started = time.process_time()
    tokenizer = load_gguf_tokenizer(smollm2_path)
    assert time.process_time() - started < 3
    assert tokenizer.vocab_size == 49152
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert set(tokenizer.stop_ids) == {0, 2}
    assert tokenizer.encode("<|im_start|>") == [1]
    assert tokenizer.decode([1, 2]) == ""


def test_real_file_chat(smollm2: Tokenizer) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = smollm2.apply_chat_template(chat)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    ids = smollm2.encode_chat(chat)
    assert ids.count(1) == 3
    assert ids.count(2) == 2
    assert smollm2.decode(ids, skip_special_tokens=False) == text


def test_real_file_equals_llama_cpp(smollm2: Tokenizer) -> None:
    for prompt, ids in zip(GOLDEN["prompts"], GOLDEN["ids"]["smollm"], strict=True):
        assert smollm2.encode(prompt) == ids
        assert smollm2.decode(ids, skip_special_tokens=False) == prompt


@pytest.mark.parametrize("pre", sorted(GOLDEN["ids"]))
def test_split_rules_equal_llama_cpp(
    pre: str, smollm2_metadata: dict[str, Any], write_gguf: WriteGguf
) -> None:
    tokenizer = load_gguf_tokenizer(
        write_gguf({**smollm2_metadata, PRE: pre, "tokenizer.ggml.add_bos_token": False})
    )
    for prompt, ids in zip(GOLDEN["prompts"], GOLDEN["ids"][pre], strict=True):
        assert tokenizer.encode(prompt) == ids


def test_export_needs_no_gguf(smollm2: Tokenizer, tmp_path: Path) -> None:
    smollm2.export(tmp_path)
    again = Tokenizer.load(tmp_path)
    assert again.stop_ids == smollm2.stop_ids
    chat = [{"role": "user", "content": "It's 42 😀"}]
    assert again.encode_chat(chat) == smollm2.encode_chat(chat)


# Tiny files, against the Hugging Face tokenizers that they are made from.


def byte_level_metadata(backend: Any, pre: str, **extra: Any) -> dict[str, Any]:
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(backend.get_vocab(), key=backend.get_vocab().__getitem__)
    added = {token.content: token.special for token in backend.get_added_tokens_decoder().values()}
    kinds = [{None: 1, True: 3, False: 4}[added.get(token)] for token in tokens]
    return {
        "tokenizer.ggml.model": "gpt2",
        PRE: pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **{f"tokenizer.ggml.{key}": value for key, value in extra.items()},
    }


def family_backend(make_backend: Any, pre: str) -> Any:
    """The family's tokenizer as transformers or its published tokenizer.json build it."""
    backend = make_backend["byte_level"]()
    if pre == "qwen2":
        qwen2 = pytest.importorskip("transformers.models.qwen2.tokenization_qwen2")
        backend.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(Regex(qwen2.PRETOKENIZE_REGEX), behavior="isolated")
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, plain])
    elif pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, gpt2])
    return backend


@pytest.mark.parametrize("pre", ["gpt-2", "qwen2", "smollm"])
def test_equals_the_family_tokenizer(pre: str, make_backend: Any, write_gguf: WriteGguf) -> None:
    backend = family_backend(make_backend, pre)
    ours = load_gguf_tokenizer(write_gguf(byte_level_metadata(backend, pre)))

    @settings(max_examples=200, deadline=None)
    @given(
        text=st.text(st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("a '0\n")))
    )
    def check(text: str) -> None:
        assert ours.encode(text) == backend.encode(text).ids
        ids = ours.encode(text)
        assert ours.decode(ids) == backend.decode(ids)

    check()
    assert ours.encode("e\u0301") == backend.encode("e\u0301").ids
    assert ours.decode(ours.encode("<tool><s>x")) == "<tool>x"


def test_bos_and_eos_are_added_as_the_file_says(make_backend: Any, write_gguf: WriteGguf) -> None:
    backend = make_backend["byte_level"]()
    plain = backend.encode("hi").ids
    for flags, pre, expected in (
        ({}, "gpt-2", plain),
        ({}, "llama-bpe", [1, *plain]),
        ({"add_bos_token": False}, "llama-bpe", plain),
        ({"add_bos_token": True}, "qwen2", [1, *plain]),
        ({"add_bos_token": True, "add_eos_token": True}, "gpt-2", [1, *plain, 2]),
    ):
        tokenizer = load_gguf_tokenizer(write_gguf(byte_level_metadata(backend, pre, **flags)))
        assert tokenizer.encode("hi") == expected
        assert tokenizer.encode("hi", add_special_tokens=False) == plain
        if expected[0] == 1:
            assert tokenizer.encode("<s>hi") == expected


def sentencepiece_metadata(backend: Any, **extra: Any) -> dict[str, Any]:
    vocab = backend.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    merges = json.loads(backend.to_str())["model"]["merges"]
    scores = dict.fromkeys(tokens, -1e6)
    for rank, (left, right) in enumerate(merges):
        scores[left + right] = max(scores[left + right], -float(rank))
    kinds = [2, 3, 3, 3, 3] + [6] * 256 + [1] * (len(tokens) - 261)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": [scores[token] for token in tokens],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **{f"tokenizer.ggml.{key}": value for key, value in extra.items()},
    }


def test_sentencepiece_with_byte_fallback(make_backend: Any, write_gguf: WriteGguf) -> None:
    backend = make_backend["sentencepiece"]()
    ours = load_gguf_tokenizer(write_gguf(sentencepiece_metadata(backend)))
    for text in ("The quick fox", "  two spaces ", "你好 😀", "a<|user|>b", "", "\n\n", "It's"):
        assert ours.encode(text) == backend.encode(text).ids
        assert ours.decode(ours.encode(text)) == text.replace("<|user|>", " " * 1)
    path = write_gguf(sentencepiece_metadata(backend, add_space_prefix=False))
    no_prefix = load_gguf_tokenizer(path)
    assert no_prefix.decode(no_prefix.encode(" x")) == " x"
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Fuse()
    assert no_prefix.encode("x quick") == backend.encode("x quick").ids


def test_templates_and_end_tokens(make_backend: Any, write_gguf: WriteGguf) -> None:
    found = byte_level_metadata(make_backend["byte_level"](), "gpt-2", eot_token_id=4)
    found["tokenizer.chat_template"] = "plain"
    found["tokenizer.chat_template.tool_use"] = "tools"
    found["tokenizer.chat_templates"] = ["tool_use"]
    tokenizer = load_gguf_tokenizer(write_gguf(found))
    assert tokenizer.stop_ids == (2, 4)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}]) == "plain"
    tools: list[Any] = [{"type": "function"}]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tools=tools) == "tools"


@pytest.mark.parametrize(
    ("change", "culprit"),
    [
        ({PRE: "chatglm-bpe"}, "pre-tokenizer 'chatglm-bpe'"),
        ({PRE: None}, "tokenizer.ggml.pre is missing"),
        ({PRE: 3}, "tokenizer.ggml.pre is a int"),
        ({"tokenizer.ggml.model": "bert"}, "model 'bert'"),
        ({"tokenizer.ggml.model": None}, "tokenizer.ggml.model is missing"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.scores is missing"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokenizer.ggml.tokens": ["a"]}, "entries for 1 tokens"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "holds no strings"),
        ({"tokenizer.ggml.merges": ["a"]}, "cannot be built"),
        ({"tokenizer.ggml.merges": ["zz qq"]}, "cannot be built"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, "eos_token_id 1000000"),
        ({"tokenizer.chat_template": 3}, "chat_template is not text"),
        ({"tokenizer.chat_template": "{% for %}"}, "not valid Jinja"),
        ({"tokenizer.chat_template.../x": "a"}, "'../x'"),
    ],
)
def test_bad_metadata(
    change: dict[str, Any], culprit: str, make_backend: Any, write_gguf: WriteGguf
) -> None:
    found = {**byte_level_metadata(make_backend["byte_level"](), "gpt-2"), **change}
    path = write_gguf({key: value for key, value in found.items() if value is not None})
    with pytest.raises(TokenizerError) as caught:
        load_gguf_tokenizer(path)
    assert culprit in caught.value.message
    assert str(path) in caught.value.message
    if PRE in change and isinstance(change[PRE], str):
        assert "smollm" in caught.value.hint


def test_repeated_token(make_backend: Any, write_gguf: WriteGguf) -> None:
    found = byte_level_metadata(make_backend["byte_level"](), "gpt-2")
    found["tokenizer.ggml.tokens"][-1] = found["tokenizer.ggml.tokens"][-2]
    with pytest.raises(TokenizerError, match="twice"):
        load_gguf_tokenizer(write_gguf(found))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GGML" + bytes(64),
        b"GGUF",
        b"GGUF" + struct.pack("<IQQ", 1, 0, 0),
        b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63),
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63),
        b"GGUF" + struct.pack("<IQQQ2sI", 3, 0, 1, 2, b"to", 99),
        b"GGUF" + struct.pack("<IQQQ2sIIQ", 3, 0, 1, 2, b"to", 9, 8, 2**60),
        b"GGUF" + struct.pack("<IQQQ2sIIQ", 3, 0, 1, 2, b"to", 9, 0, 2**60),
        b"GGUF" + struct.pack("<IQQQ2sIIQ", 3, 0, 1, 2, b"to", 9, 9, 1),
        b"GGUF" + struct.pack("<IQQQ2sI", 3, 0, 1, 2, b"\xff\xff", 0),
    ],
)
def test_files_that_are_not_gguf(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.gguf: ") as caught:
        load_gguf_tokenizer(path)
    assert "\n" not in caught.value.message


def test_missing_file_and_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.gguf", tmp_path):
        with pytest.raises(CheckpointError, match=path.name):
            load_gguf_tokenizer(path)


def test_cut_and_flipped_headers(make_backend: Any, write_gguf: WriteGguf, tmp_path: Path) -> None:
    path = write_gguf(byte_level_metadata(make_backend["byte_level"](), "gpt-2"))
    data = path.read_bytes()
    broken = tmp_path / "broken.gguf"

    @settings(max_examples=150, deadline=None)
    @given(at=st.integers(0, len(data) - 1), byte=st.integers(0, 255))
    def check(at: int, byte: int) -> None:
        broken.write_bytes(data[:at])
        with pytest.raises(DFlashError):
            load_gguf_tokenizer(broken)
        broken.write_bytes(data[:at] + bytes([byte]) + data[at + 1 :])
        try:
            load_gguf_tokenizer(broken)
        except DFlashError as error:
            assert "\n" not in error.message  # noqa: PT017

    check()


def test_metadata_equals_the_gguf_package(make_backend: Any, write_gguf: WriteGguf) -> None:
    gguf = pytest.importorskip("gguf")
    found = byte_level_metadata(make_backend["byte_level"](), "gpt-2", add_bos_token=True)
    path = write_gguf({**found, "tokenizer.x": [1.5, -2.0], "general.name": "skipped"})
    fields = gguf.GGUFReader(path).fields
    ours = tokenizer_metadata(path)
    assert set(ours) == {key for key in fields if key.startswith("tokenizer.")}
    for key, value in ours.items():
        assert value == fields[key].contents()
