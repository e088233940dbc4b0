"""The GGUF reader against the gguf package: every supported type, row order, damage, refusals."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from checkpoint_files import GGUF_TOKENIZER, llama_weights, permute, problem_of, save_gguf
from gguf.quants import dequantize, quantize
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_trt.checkpoint import open_target
from dflash_trt.checkpoint.gguf_header import TENSOR_TYPES, GgufArray, read_header
from dflash_trt.checkpoint.target import load_tokenizer
from dflash_trt.checkpoint.tensors import Q4Blocks
from dflash_trt.config import RopeConfig
from dflash_trt.errors import (
    BadTensor,
    CheckpointError,
    MissingTensor,
    UnsupportedArchitecture,
)

Q = "model.layers.1.self_attn.q_proj.weight"
K = "model.layers.1.self_attn.k_proj.weight"


def test_f32_file_gives_back_the_model(tmp_path: Path) -> None:
    weights = llama_weights()
    source = open_target(save_gguf(tmp_path / "m.gguf", weights)).source
    assert set(source.names()) == set(weights)
    for name, weight in weights.items():
        read = source.read(name)
        np.testing.assert_array_equal(read, weight, err_msg=name)
        assert read.flags.c_contiguous
        assert source.info(name).shape == weight.shape
        np.testing.assert_array_equal(source.read_rows(name, 3, 40), weight[3:40])
        np.testing.assert_array_equal(source.raw(name), weight)
    # Only the permuted rows cost a copy.
    assert not source.read("model.embed_tokens.weight").flags.owndata


def k_quant_blocks(shape: tuple[int, int], kind: str) -> np.ndarray:
    """Random valid bytes of a type that the package can only read."""
    _, block, num_bytes = next(row for row in TENSOR_TYPES.values() if row[0] == kind)
    rng = np.random.default_rng(11)
    rows = rng.integers(0, 256, (shape[0], shape[1] // block, num_bytes), dtype=np.uint8)
    scales = {"Q4_K": (0, 2), "Q6_K": (208,)}[kind]
    for at in scales:  # f16 scales must be finite
        scale = rng.uniform(0.001, 0.1, rows.shape[:2]).astype(np.float16)
        rows[:, :, at : at + 2] = scale[..., None].view(np.uint8)
    return rows.reshape(shape[0], -1)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_types_equal_the_package(tmp_path: Path, kind: str) -> None:
    weights = llama_weights()
    source = open_target(save_gguf(tmp_path / "m.gguf", weights, kind)).source
    quant = gguf.GGMLQuantizationType[kind]
    for name, weight in weights.items():
        if weight.ndim == 1:
            continue
        # A block lies inside a row, so quantizing commutes with the permutation of rows.
        expected = dequantize(quantize(weight, quant), quant)
        np.testing.assert_array_equal(source.read(name), expected, err_msg=name)
        np.testing.assert_array_equal(source.read_rows(name, 1, 34), expected[1:34])
        assert source.info(name).dtype == kind


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_k_quants_equal_the_package(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "m.gguf"
    quant = gguf.GGMLQuantizationType[kind]
    stored = k_quant_blocks((256, 256), kind)
    save_gguf_with_raw(path, Q, stored, quant)
    source = open_target(path).source
    expected = dequantize(stored, quant)
    np.testing.assert_array_equal(permute(source.read(Q), 8), expected)
    with pytest.raises(BadTensor, match=f"{Q} is stored as {kind} blocks"):
        source.raw(Q)
    assert source.q4_blocks(Q) is None


def save_gguf_with_raw(
    path: Path, hf: str, stored: np.ndarray, quant: gguf.GGMLQuantizationType
) -> None:
    """The usual file, with one tensor's bytes replaced."""
    original = gguf.GGUFWriter.add_tensor

    def add(self: Any, name: str, tensor: np.ndarray, raw_dtype: Any = None) -> None:
        if name == "blk.1.attn_q.weight":
            tensor, raw_dtype = stored, quant
        original(self, name, tensor, raw_dtype=raw_dtype)

    assert hf == Q
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_tensor", add)
        save_gguf(path)


def unpack(blocks: Q4Blocks) -> np.ndarray:
    """Q4Blocks as its docstring defines it."""
    codes = np.stack([blocks.codes & 15, blocks.codes >> 4], axis=-1)
    codes = codes.reshape(*blocks.codes.shape[:2], 32).astype(np.float32)
    values = blocks.scales[..., None] * (codes - 8)
    if blocks.offsets is not None:
        values = values + blocks.offsets[..., None]
    return values.reshape(blocks.codes.shape[0], -1)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_q4_blocks_hold_the_same_values(tmp_path: Path, kind: str) -> None:
    weights = llama_weights()
    source = open_target(save_gguf(tmp_path / "m.gguf", weights, kind)).source
    for name in (Q, K, "model.layers.0.mlp.down_proj.weight", "model.embed_tokens.weight"):
        blocks = source.q4_blocks(name)
        assert blocks is not None
        rows, width = weights[name].shape
        assert blocks.codes.shape == (rows, width // 32, 16)
        assert blocks.scales.shape == (rows, width // 32)
        assert (blocks.offsets is None) == (kind == "Q4_0")
        expected = source.read(name)
        if kind == "Q4_0":
            np.testing.assert_array_equal(unpack(blocks), expected)
        else:  # d*q + m rounds once, d*(q-8) + (m + 8d) at most twice
            np.testing.assert_allclose(unpack(blocks), expected, rtol=0, atol=2e-7)
    assert source.q4_blocks("model.norm.weight") is None


def test_facts(tmp_path: Path) -> None:
    keys = {
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 5,
        "tokenizer.ggml.eom_token_id": 2,
    }
    config = open_target(save_gguf(tmp_path / "m.gguf", keys=keys)).config
    assert config.family == "llama"
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (96, 256, 512)
    assert config.num_layers == len(config.masks) == 2
    assert config.rms_norm_eps == float(np.float32(1e-5))
    assert config.tie_word_embeddings
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2, 5))
    attention = config.attention
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (8, 4, 32)
    assert not attention.qk_norm
    assert attention.rope == RopeConfig(500000.0)


def test_output_biases_and_rope_table(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    weights = llama_weights() | {"lm_head.weight": rng.random((96, 256), np.float32)}
    for layer in range(2):
        for name, size in (("q", 256), ("k", 128), ("v", 128)):
            weights[f"model.layers.{layer}.self_attn.{name}_proj.bias"] = rng.random(
                size, np.float32
            )
    divisors = np.linspace(1, 8, 16, dtype=np.float32)
    path = save_gguf(tmp_path / "m.gguf", weights, extra={"rope_freqs.weight": divisors})
    target = open_target(path)
    assert not target.config.tie_word_embeddings
    assert target.config.attention.qkv_bias
    assert not target.config.attention.o_bias
    assert target.config.attention.rope.kind == "table"
    assert target.config.attention.rope.params["divisors"] == tuple(divisors.tolist())
    assert "rope_freqs.weight" not in target.source.names()
    for name in ("q", "k", "v"):
        bias = f"model.layers.0.self_attn.{name}_proj.bias"
        np.testing.assert_array_equal(target.source.read(bias), weights[bias])


def test_qwen3_is_not_permuted(tmp_path: Path) -> None:
    weights = llama_weights()
    for layer in range(2):
        for name in ("q_norm", "k_norm"):
            weights[f"model.layers.{layer}.self_attn.{name}.weight"] = np.ones(32, np.float32)
    target = open_target(
        save_gguf(tmp_path / "m.gguf", weights, arch="qwen3", keys={"attention.key_length": 32})
    )
    assert target.config.family == "qwen3"
    assert target.config.attention.qk_norm
    np.testing.assert_array_equal(target.source.read(Q), weights[Q])


@pytest.mark.parametrize(
    ("keys", "kind", "params"),
    [
        ({"rope.scaling.type": "none"}, "default", {}),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}, "linear", {"factor": 2.0}),
        ({"rope.scaling.factor": 4.0}, "linear", {"factor": 4.0}),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
             "rope.scaling.original_context_length": 128, "rope.scaling.yarn_beta_fast": 16.0},
            "yarn",
            {"factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 16.0},
        ),
    ],
)  # fmt: skip
def test_rope_scaling(tmp_path: Path, keys: Any, kind: str, params: dict[str, Any]) -> None:
    rope = open_target(save_gguf(tmp_path / "m.gguf", keys=keys)).config.attention.rope
    assert (rope.kind, rope.params) == (kind, params)


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        *(
            ({key: ...}, CheckpointError, f"llama.{key} is missing")
            for key in ("context_length", "embedding_length", "feed_forward_length", "block_count",
                        "attention.head_count", "attention.head_count_kv", "rope.freq_base",
                        "attention.layer_norm_rms_epsilon")
        ),
        ({"rope.dimension_count": 16, "attention.key_length": 32}, UnsupportedArchitecture,
         "rope.dimension_count 16 differs from head_dim 32"),
        ({"attention.value_length": 64}, UnsupportedArchitecture, "attention.value_length 64"),
        ({"expert_count": 8}, UnsupportedArchitecture, "llama.expert_count 8"),
        ({"rope.scaling.yarn_ext_factor": 0.0}, UnsupportedArchitecture, "yarn_ext_factor 0.0"),
        ({"attention.causal": 0}, UnsupportedArchitecture, "attention.causal 0"),
        ({"attention.sliding_window": 64}, UnsupportedArchitecture, "attention.sliding_window 64"),
        ({"rope.scaling.type": "longrope"}, UnsupportedArchitecture, "longrope"),
        ({"rope.scaling.type": "linear"}, CheckpointError, "rope.scaling.factor is missing"),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0}, CheckpointError,
         "rope.scaling.original_context_length is missing"),
        ({"rope.scaling.attn_factor": 1.5}, UnsupportedArchitecture, "rope.scaling.attn_factor"),
        ({"rope.scaling.alpha": 1000.0}, UnsupportedArchitecture, "rope.scaling.alpha .* unknown"),
        ({"attention.temperature_scale": 0.1}, UnsupportedArchitecture, "temperature_scale 0.1"),
        ({"attention.of_the_future": 3}, UnsupportedArchitecture, "of_the_future 3: what it does"),
        ({"nope_layer_interval": 4}, UnsupportedArchitecture, "nope_layer_interval 4: what it"),
        ({"swiglu_clamp": 7.0}, UnsupportedArchitecture, "swiglu_clamp 7.0"),
        ({"hidden_activation": "gelu"}, UnsupportedArchitecture, "hidden_activation 'gelu'"),
        ({"split.count": 3}, UnsupportedArchitecture, "one of 3 parts"),
        ({"vocab_size": 97}, BadTensor,
         "token_embd.weight has 96 rows, but llama.vocab_size is 97"),
        ({"block_count": 3}, MissingTensor, "model.layers.2.input_layernorm.weight is missing"),
        ({"block_count": 1}, BadTensor, "model.layers.1"),
        ({"block_count": 4000}, MissingTensor, "4000 layers"),
        ({"block_count": 4_000_000_000}, CheckpointError, "block_count is 4000000000"),
        ({"feed_forward_length": 500}, BadTensor, r"\[512, 256\], but the config makes it \[500"),
        ({"attention.head_count": 16, "rope.dimension_count": ...}, BadTensor, "q_proj|k_proj"),
        ({"attention.head_count_kv": 3}, CheckpointError, "not a multiple"),
        ({"attention.head_count_kv": [4, 4]}, CheckpointError, "head_count_kv is"),
        ({"tokenizer.ggml.eos_token_id": 96}, CheckpointError, "eos_token_id is 96"),
        ({"embedding_length": "big"}, CheckpointError, "embedding_length is 'big'"),
        ({"rope.freq_base": float("nan")}, CheckpointError, "rope.freq_base is nan"),
    ],
)  # fmt: skip
def test_refusals(tmp_path: Path, keys: Any, error: type[Exception], message: str) -> None:
    path = save_gguf(tmp_path / "m.gguf", keys=keys)
    with pytest.raises(error, match=message) as caught:
        open_target(path)
    assert str(path) in str(caught.value)


def test_unused_metadata_is_noted(tmp_path: Path) -> None:
    keys = {"some_label": 7.0, "nope_layer_interval": 0, "attention.temperature_scale": 0.0}
    notes = open_target(save_gguf(tmp_path / "m.gguf", keys=keys)).notes
    assert [note.partition("llama.")[2] for note in notes if "llama." in note] == [
        "some_label is not used", "nope_layer_interval is not used",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["model", "model.GGUF", "sha256-0123abcd", "model.bin"])
def test_what_is_a_gguf_file_does_not_depend_on_its_name(tmp_path: Path, name: str) -> None:
    path = save_gguf(tmp_path / name, keys=GGUF_TOKENIZER | {"tokenizer.ggml.bos_token_id": 1})
    assert open_target(path).config.bos_token_id == 1
    tokenizer = load_tokenizer(path)
    assert tokenizer.encode("tuu") == [2, 1]


def test_a_number_that_stands_for_no_token(tmp_path: Path) -> None:
    value = 2**32 - 1
    names = [f"tokenizer.ggml.{kind}_token_id" for kind in ("bos", "eos", "eot", "padding")]
    path = save_gguf(tmp_path / "m.gguf", keys=GGUF_TOKENIZER | dict.fromkeys(names, value))
    target = open_target(path)
    assert (target.config.bos_token_id, target.config.eos_token_ids) == (None, ())
    assert sum(f"is {value}, which is read as none" in note for note in target.notes) == 3
    assert load_tokenizer(path).bos_token_id is None


def test_unsupported_architecture_type_and_tensor(tmp_path: Path) -> None:
    path = save_gguf(tmp_path / "a.gguf", arch="gemma3")
    with pytest.raises(UnsupportedArchitecture, match=r"general\.architecture is 'gemma3'"):
        open_target(path)
    path = save_gguf(tmp_path / "b.gguf", kind="Q5_0")
    with pytest.raises(BadTensor, match=r"token_embd\.weight has type Q5_0") as caught:
        open_target(path)
    assert "Q4_K" in caught.value.hint
    path = save_gguf(tmp_path / "c.gguf", extra={"blk.0.attn_sinks.weight": np.ones(8, "f4")})
    with pytest.raises(BadTensor, match=r"blk\.0\.attn_sinks\.weight is not part"):
        open_target(path)
    path = save_gguf(tmp_path / "d.gguf", extra={"rope_freqs.weight": np.ones(8, "f4")})
    with pytest.raises(BadTensor, match=r"rope_freqs\.weight has shape \[8\], expected \[16\]"):
        open_target(path)
    path = save_gguf(tmp_path / "e.gguf", extra={"rope_freqs.weight": np.zeros(16, "f4")})
    with pytest.raises(BadTensor, match="divisor that is not positive"):
        open_target(path)


def test_package_is_an_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_gguf(tmp_path / "m.gguf")

    def fail(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(CheckpointError, match="needs the gguf package") as caught:
        open_target(path)
    assert caught.value.hint == "pip install 'dflash-trt[gguf]'"


def test_metadata_arrays_are_lazy(tmp_path: Path) -> None:
    header = read_header(save_gguf(tmp_path / "m.gguf", keys={"tokenizer.numbers": [1, 2, 3]}))
    tokens = header.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, GgufArray)
    assert tokens.length == 96
    assert tokens.values()[95] == "t95"
    assert header.metadata["tokenizer.numbers"].values() == [1, 2, 3]


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return save_gguf(tmp_path_factory.mktemp("g") / "m.gguf", kind="Q4_0").read_bytes()


def test_truncation_anywhere(tmp_path: Path, small_file: bytes) -> None:
    path = tmp_path / "cut.gguf"
    for length in [*range(0, 3000, 97), len(small_file) // 2, len(small_file) - 1]:
        path.write_bytes(small_file[:length])
        with pytest.raises(CheckpointError, match=r"truncated|empty") as caught:
            open_target(path)
        assert "cut.gguf" in caught.value.message


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(edits=st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), min_size=1,
                      max_size=4))  # fmt: skip
def test_mutated_header_never_raises_anything_else(
    tmp_path: Path, small_file: bytes, edits: list[tuple[int, int]]
) -> None:
    data = bytearray(small_file)
    for position, value in edits:
        data[position] = value
    path = tmp_path / "mutated.gguf"
    path.write_bytes(bytes(data))

    def read() -> None:
        target = open_target(path)
        target.source.read("model.norm.weight")
        target.source.read_rows(Q, 0, 2)

    assert "\n" not in problem_of(read)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ((0, b"GGML"), "is not a GGUF file"),
        ((4, (9).to_bytes(4, "little")), "GGUF version 9"),
        ((4, (3).to_bytes(4, "big")), "GGUF version"),
        ((8, b"\xff" * 8), "truncated|axes"),
        ((16, b"\xff" * 8), "truncated|unknown type|UTF-8|twice"),
    ],
)
def test_bad_start(tmp_path: Path, small_file: bytes, change: tuple[int, bytes], message: str
                   ) -> None:  # fmt: skip
    at, value = change
    path = tmp_path / "bad.gguf"
    path.write_bytes(small_file[:at] + value + small_file[at + len(value) :])
    with pytest.raises(CheckpointError, match=message):
        open_target(path)
