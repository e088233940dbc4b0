"""Weights in 4- and 8-bit blocks: the quantizer, the products, and a whole int4 engine."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
import torch

from dflash_trt import graph as g
from dflash_trt.checkpoint.pair import read_pair
from dflash_trt.config import PairConfig
from dflash_trt.errors import ConfigError
from dflash_trt.graph import DType, LinearWeight
from dflash_trt.quantize.blocks import BLOCK_SIZE, Blocks, quantize, stack
from dflash_trt.quantize.policy import bits_of, format_of, stored_bytes
from tiny import EngineMaker, PairMaker, TinyPair, greedy, target_states
from tiny.ops import Arrays, run_ops

F32 = npt.NDArray[np.float32]
RNG = np.random.default_rng(4)


def weight(rows: int, columns: int, scale: float = 1.0) -> F32:
    return RNG.normal(0, scale, (rows, columns)).astype(np.float32)


def stored(rows: int, columns: int, with_offsets: bool = True) -> Blocks:
    """Random blocks as a Q4_1 (or, without offsets, Q4_0) file holds them."""
    blocks = columns // BLOCK_SIZE
    codes = RNG.integers(0, 256, (rows, blocks, BLOCK_SIZE // 2)).astype(np.uint8)
    scales = RNG.uniform(0.01, 0.1, (rows, blocks)).astype(np.float32)
    offsets = RNG.normal(0, 0.3, (rows, blocks)).astype(np.float32) if with_offsets else None
    return Blocks(4, codes, scales, offsets)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 3e4])
def test_no_weight_moves_further_than_its_blocks_step_allows(bits: int, scale: float) -> None:
    original = weight(24, 96, scale)
    peak = np.abs(original.reshape(24, 3, 32)).max(-1, keepdims=True)
    error = np.abs(quantize(original, bits).dequantize() - original).reshape(24, 3, 32)
    # 8 bits: half of a step. 4 bits: half of a step, or what clipping at 0.88 * 7/8 leaves over.
    bound = peak / 127 / 2 if bits == 8 else peak * (1 - 0.88 * 7 / 8)
    assert (error <= bound * 1.001).all()


def test_quantizing_is_no_worse_than_plain_rounding_and_keeps_what_is_exact() -> None:
    original = weight(50, 64)
    blocks = original.reshape(50, 2, 32)
    at = np.abs(blocks).argmax(-1)[..., None]
    step = np.take_along_axis(blocks, at, -1) / -8
    plain = (np.clip(np.rint(blocks / step), -8, 7) * step).reshape(50, 64)
    found = quantize(original, 4).dequantize()
    assert np.square(found - original).sum() <= np.square(plain - original).sum() * 1.0001
    codes = RNG.integers(-8, 8, (6, 64)).astype(np.float32)
    codes[:, ::32] = -8
    np.testing.assert_allclose(quantize(codes * 0.25, 4).dequantize(), codes * 0.25, atol=1e-6)


@pytest.mark.parametrize("bits", [4, 8])
def test_zero_blocks_stay_zero(bits: int) -> None:
    original = weight(4, 64)
    original[1] = 0
    original[2, 32:] = 0
    found = quantize(original, bits).dequantize()
    assert np.isfinite(found).all()
    assert not found[1].any()
    assert not found[2, 32:].any()


def test_stacking_keeps_every_part_and_fills_missing_offsets_with_zero() -> None:
    parts = [stored(3, 64), stored(5, 64, with_offsets=False), quantize(weight(2, 64), 4)]
    joined = stack(parts)
    np.testing.assert_array_equal(
        joined.dequantize(), np.concatenate([part.dequantize() for part in parts])
    )
    assert stack(parts[1:]).offsets is None


def product(folder: Path, x: F32, weights: dict[str, F32], bits: int, **options: Any) -> list[F32]:
    """x @ w.T of every weight, as one linear op."""
    names = [LinearWeight(name, len(w)) for name, w in weights.items()]

    def body(x: Any) -> Any:
        return g.linear(x, names, DType.F32)

    return run_ops(folder, body, {"x": x}, {"x": ("b", "s", x.shape[2])},
                   weights=Arrays(weights, **options), bits=bits)  # fmt: skip


def near(found: F32, wanted: F32) -> None:
    """Within what 8-bit activations (one scale per block of 32) leave."""
    assert np.abs(found - wanted).max() < 0.02 * np.abs(wanted).max()


@pytest.mark.parametrize("with_offsets", [True, False])
def test_blocks_as_the_checkpoint_stores_them_multiply_as_their_dequantized_weight(
    with_offsets: bool, tmp_path: Path
) -> None:
    blocks = {name: stored(rows, 96, with_offsets) for name, rows in (("a", 7), ("b", 12))}
    x = RNG.normal(size=(2, 3, 96)).astype(np.float32)
    wrong = {name: np.zeros((len(b.codes), 96), np.float32) for name, b in blocks.items()}
    found = product(tmp_path, x, wrong, 4, stored=blocks)
    for result, name in zip(found, blocks, strict=True):
        near(result, x @ blocks[name].dequantize().T)


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_products_equal_those_of_the_dequantized_weight(
    bits: int, tmp_path: Path
) -> None:
    weights = {"a": weight(20, 64), "b": weight(9, 64)}
    x = RNG.normal(size=(1, 5, 64)).astype(np.float32)
    for result, name in zip(product(tmp_path, x, weights, bits), weights, strict=True):
        near(result, x @ quantize(weights[name], bits).dequantize().T)


def test_a_weight_that_does_not_fill_whole_blocks_stays_float32(tmp_path: Path) -> None:
    weights = {"a": weight(20, 48)}
    x = RNG.normal(size=(1, 5, 48)).astype(np.float32)
    np.testing.assert_allclose(
        product(tmp_path, x, weights, 4)[0], x @ weights["a"].T, rtol=1e-4, atol=1e-4
    )


def test_policy_names_bits_for_every_kind_of_weight() -> None:
    int4 = bits_of("int4")
    assert int4("target.layers.0.self_attn.q_proj.weight") == 4
    assert int4("drafter.layers.1.mlp.down_proj.weight") == 4
    assert int4("target.lm_head.weight") == int4("target.embed_tokens.weight") == 8
    assert int4("drafter.fc.weight") is None
    assert bits_of("fp32")("target.lm_head.weight") is None
    for name, shape in DFLASH2.items():
        assert int4(f"drafter.{name}") is None
        assert format_of("fp8")(f"drafter.{name}") is format_of("nvfp4")(f"drafter.{name}") is None
        size = 4 if name.endswith("base_kernel") else 2  # that one is float32 on every backend
        assert stored_bytes("int4", f"drafter.{name}", shape) == 4 * math.prod(shape)
        assert stored_bytes("nvfp4", f"drafter.{name}", shape) == size * math.prod(shape)
    with pytest.raises(ConfigError, match="fp8"):
        bits_of("fp8")


DFLASH2 = {
    "layers.0.attention_conv.kernel_projection.weight": (32, 64),
    "layers.1.mlp_conv.kernel_projection.weight": (32, 64),
    "layers.1.mlp_conv.base_kernel": (2, 2, 64),
    "candidate_selector.hidden_projection.weight": (64, 64),
    "candidate_selector.predecessor_codebook": (192, 64),
    "candidate_selector.successor_codebook": (192, 64),
}
QUANTIZABLE = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 192}


def dequantized(config: PairConfig, model: Any, side: str) -> dict[str, torch.Tensor]:
    """The state of `model` with every weight that int4 quantizes put through its blocks."""
    bits_for: Callable[[str], int | None] = bits_of("int4")
    state = {}
    for name, tensor in model.state_dict().items():
        bits = bits_for(f"{side}.{name.removeprefix('model.')}")
        is_product = name.endswith("proj.weight") or name == "lm_head.weight"
        if is_product and bits:
            tensor = torch.from_numpy(quantize(tensor.numpy(), bits).dequantize())
        state[name] = tensor
    return state


@pytest.fixture(scope="module")
def wide_pair(make_pair: PairMaker) -> TinyPair:
    """A pair whose inputs fill whole blocks."""
    return make_pair(target=QUANTIZABLE, intermediate_size=96)


def test_int4_logits_are_close_to_transformers_with_the_dequantized_weights(
    wide_pair: TinyPair, make_probe: Any
) -> None:
    text = list(range(3, 150, 7))
    probe = make_probe(wide_pair, precision="int4", block=4)
    before = {name: t.clone() for name, t in wide_pair.target.state_dict().items()}
    changed = dequantized(probe.pair, wide_pair.target, "target")
    assert sum(not torch.equal(before[name], changed[name]) for name in before) == 4 * 7 + 1
    try:
        wide_pair.target.load_state_dict(changed)
        wanted, _ = target_states(wide_pair.target, text)
    finally:
        wide_pair.target.load_state_dict(before)
    plain, _ = target_states(wide_pair.target, text)
    found = probe.step([text], [0], known=[len(text)])["target_logits"][0, 0]
    noise, moved = np.abs(found - wanted[-1]).max(), np.abs(plain[-1] - wanted[-1]).max()
    assert noise < 0.1 * np.abs(wanted[-1]).max()
    assert noise < moved, "the engine computes with the rounded weights, not the original ones"


def test_an_int4_engine_is_lossless_against_itself_and_holds_the_blocks(
    wide_pair: TinyPair, make_engine: EngineMaker, prompts: list[list[int]]
) -> None:
    engine = make_engine(wide_pair, precision="int4")
    plain = engine.generate(prompts[0], 30, width=1)
    assert engine.generate(prompts[0], 30).token_ids == plain.token_ids
    assert plain.token_ids != greedy(wide_pair.target, prompts[0], 30)
    model = onnx.load(str(engine.directory.model), load_external_data=False)
    kinds = [node.op_type for node in model.graph.node]
    layers = wide_pair.target.config.num_hidden_layers + 2
    # A product each of qkv, o, gate-up and down; the context's k and v; two heads.
    assert kinds.count("MatMulNBits") == layers * 4 + 1 + 2
    assert kinds.count("FusedMatMul") == 1  # fc


def test_an_int4_engine_quantizes_nothing_of_dflash2s_own(
    make_pair: PairMaker, make_engine: EngineMaker, prompts: list[list[int]]
) -> None:
    pair = make_pair(target=QUANTIZABLE, intermediate_size=96, dflash2={"selector_rank": 32})
    engine = make_engine(pair, precision="int4")
    plain = engine.generate(prompts[0], 20, width=1)
    assert engine.generate(prompts[0], 20).token_ids == plain.token_ids
    model = onnx.load(str(engine.directory.model), load_external_data=False)
    kinds = [node.op_type for node in model.graph.node]
    assert kinds.count("MatMulNBits") == (pair.target.config.num_hidden_layers + 2) * 4 + 1 + 2
    assert kinds.count("FusedMatMul") == 1 + 2 * 2 + 1  # fc, kernels of two layers, the selector


def test_a_head_that_is_shared_is_written_once(
    wide_pair: TinyPair, make_engine: EngineMaker
) -> None:
    engine = make_engine(wide_pair, precision="int4")
    model = onnx.load(str(engine.directory.model), load_external_data=False)
    heads = [t for t in model.graph.initializer if "lm_head" in t.name and "codes" in t.name]
    assert len(heads) == 1
    assert read_pair(wide_pair.target_dir, wide_pair.drafter_dir).config == engine.facts
