"""Engines of FP8 and NVFP4 checkpoints: text, what TensorRT's network holds of them, and plans."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorrt_rtx as trt
import torch

from dflash_trt import graph as g
from dflash_trt.build.pipeline import Plan, plan
from dflash_trt.checkpoint.safetensors import SafetensorsSource
from dflash_trt.errors import BadTensor
from dflash_trt.graph import DType, Graph, LinearWeight, tracing
from dflash_trt.lower.trt_weights import TrtWeights, stacked
from dflash_trt.quantize.floats import FloatCodes, Fp8Weight, Nvfp4Weight
from dflash_trt.runtime.session import Session, StepRows
from tiny import EngineMaker, PairMaker, TinyEngine, TinyPair, greedy
from tiny import quantized as made
from tiny.trt_evaluator import kind_of, layers_of
from tiny.trt_ops import StoredArrays, evaluator_of
from tiny.trt_sessions import EvaluatedSession, step_network
from tiny.trt_types import Array, constant

FORMS = ("modelopt-fp8", "modelopt-nvfp4", "compressed-fp8-channel", "compressed-nvfp4",
         "transformers-fp8-block")  # fmt: skip
WIDE = {"target": {"hidden_size": 64, "vocab_size": 192}, "intermediate_size": 96}


class Quantizing:
    """A pair, copies of it whose target is quantized, and the same in plain float32."""

    def __init__(self, pair: TinyPair, folder: Path) -> None:
        self._pair, self._folder = pair, folder
        self._made: dict[str, tuple[TinyPair, TinyPair]] = {}

    def __call__(self, form: Any, name: str = "") -> tuple[TinyPair, TinyPair]:
        name = name or form
        if name not in self._made:
            coded, plain = self._folder / name, self._folder / f"{name}-plain"
            source = self._pair.target_dir
            floats = made.save_quantized(source, coded, form)
            made.save_dequantized(source, plain, floats)
            pairs = (dataclasses.replace(self._pair, target_dir=f) for f in (coded, plain))
            self._made[name] = (next(pairs), next(pairs))
        return self._made[name]


@pytest.fixture(scope="module")
def quantizing(make_pair: PairMaker, tmp_path_factory: pytest.TempPathFactory) -> Quantizing:
    return Quantizing(make_pair(seed=70, **WIDE), tmp_path_factory.mktemp("quantized"))


@pytest.mark.parametrize("precision", ["fp32", "int4"])
@pytest.mark.parametrize("form", FORMS)
def test_an_engine_is_that_of_the_dequantized_weights(
    form: str, precision: str, quantizing: Quantizing, make_engine: EngineMaker
) -> None:
    coded, plain = (make_engine(pair, precision=precision) for pair in quantizing(form))
    files = [engine.directory.manifest["files"] for engine in (coded, plain)]
    for name in ("weights.bin", "step.onnx"):
        assert files[0][name] == files[1][name]


@pytest.mark.parametrize("form", FORMS)
def test_text_is_that_of_transformers_with_the_dequantized_weights(
    form: str, quantizing: Quantizing, make_engine: EngineMaker, prompts: list[list[int]]
) -> None:
    coded, plain = quantizing(form)
    engine = make_engine(coded, precision="fp32")
    model = type(coded.target).from_pretrained(plain.target_dir).eval()
    model.generation_config.eos_token_id = None
    for prompt in prompts[24:27]:
        assert engine.generate(prompt, 24).token_ids == greedy(model, prompt, 24)


def test_a_quantized_drafter_drafts_as_its_dequantized_copy(
    trained_pair: TinyPair, tmp_path: Path, make_engine: EngineMaker, prompts: list[list[int]]
) -> None:
    folders = tmp_path / "coded", tmp_path / "plain"
    floats = made.save_quantized(trained_pair.drafter_dir, folders[0], "modelopt-fp8")
    made.save_dequantized(trained_pair.drafter_dir, folders[1], floats)
    runs = []
    for folder in folders:
        engine = make_engine(dataclasses.replace(trained_pair, drafter_dir=folder))
        runs.append([engine.generate(prompt, 40) for prompt in prompts[:3]])
    assert [run.token_ids for run in runs[0]] == [run.token_ids for run in runs[1]]
    accepted = [[run.stats.accepted for run in each] for each in runs]
    assert accepted[0] == accepted[1]
    assert sum(map(sum, accepted[0])) > 20


def constants(engine: TinyEngine, precision: str) -> dict[str, Array]:
    """Values by parameter, of the constants that a network has for one."""
    found = {}

    def look(network: Any) -> None:  # as long as the weights are there
        for layer in layers_of(network, trt):
            if kind_of(layer, trt) == "CONSTANT" and ".weight" in layer.name:
                found[layer.name.rsplit("/constant", 1)[0].removeprefix("/")] = constant(layer)

    step_network(engine, precision, change=look)
    return found


AT = "target.layers.0."
QKV = "+".join(f"{AT}self_attn.{name}_proj.weight" for name in "qkv")


@pytest.mark.parametrize("form", ["modelopt-fp8", "transformers-fp8"])
def test_an_fp8_network_holds_the_stored_codes(
    form: str, quantizing: Quantizing, make_engine: EngineMaker
) -> None:
    coded, _ = quantizing(form)
    held = constants(make_engine(coded), "fp8")
    stored = SafetensorsSource(coded.target_dir)
    codes = [stored.raw(f"model.layers.0.self_attn.{x}_proj.weight") for x in "qkv"]
    np.testing.assert_array_equal(
        held[f"{QKV}/codes"][0].view(np.uint8), np.concatenate(codes).view(np.uint8)
    )
    down = stored.raw("model.layers.2.mlp.down_proj.weight")
    found = held["target.layers.2.mlp.down_proj.weight/codes"][0]
    np.testing.assert_array_equal(found.view(np.uint8), down.view(np.uint8))
    # The head is none of what the checkpoint quantizes; the drafter's checkpoint is not quantized.
    assert held["target.lm_head.weight"].dtype == ml_dtypes.bfloat16
    assert "drafter.layers.0.mlp.down_proj.weight/codes" in held


@pytest.mark.parametrize("form", ["modelopt-nvfp4", "compressed-nvfp4"])
def test_an_nvfp4_network_holds_the_stored_codes_and_block_scales(
    form: str, quantizing: Quantizing, make_engine: EngineMaker
) -> None:
    coded, _ = quantizing(form)
    held = constants(make_engine(coded), "nvfp4")
    stored = SafetensorsSource(coded.target_dir)
    leaf = "weight_packed" if form == "compressed-nvfp4" else "weight"
    for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"):
        bits = held[f"{AT}{name}.weight/codes"][0].view(np.uint8)
        packed = bits[:, ::2] | bits[:, 1::2] << 4
        np.testing.assert_array_equal(packed, stored.raw(f"model.layers.0.{name}.{leaf}"))
        scales = held[f"{AT}{name}.weight/scales"][0].view(np.uint8)
        wanted = stored.raw(f"model.layers.0.{name}.weight_scale")
        np.testing.assert_array_equal(scales, wanted.view(np.uint8))
    assert held["target.lm_head.weight"].dtype == ml_dtypes.bfloat16
    assert held["drafter.layers.0.mlp.down_proj.weight/codes"].dtype == ml_dtypes.float4_e2m1fn


@pytest.mark.parametrize(
    ("form", "precision"), [("modelopt-fp8", "fp8"), ("compressed-nvfp4", "nvfp4")]
)
def test_stored_codes_are_nearer_to_the_checkpoint_than_new_ones(
    form: str, precision: str, quantizing: Quantizing, make_engine: EngineMaker
) -> None:
    """Activations are rounded in both; new codes round the weights a second time, and the head."""
    coded, plain = (make_engine(pair) for pair in quantizing(form))
    wanted = logits_of(coded.session())
    errors = [
        (logits_of(EvaluatedSession(engine, precision)) - wanted).std() for engine in (coded, plain)
    ]
    assert 0.001 * wanted.std() < errors[0] < errors[1]


def logits_of(session: Session) -> Array:
    """The target's logits of a text that is read in four steps."""
    text = np.random.default_rng(3).integers(0, 150, 16).astype(np.int32)
    one, found = np.ones(1, np.int32), []
    for start in range(0, len(text), 4):
        row = StepRows.greedy(text[None, start : start + 4], one * start, one * 4, one)
        result = session.step(0, row, 3, want_logits=True)
        assert result.logits is not None
        found.append(result.logits[0])
    return np.concatenate(found)


def product(
    x: Array, held: dict[str, FloatCodes], compute: str = "bf16", bias: Array | None = None
) -> list[Array]:
    """x times each of some stored weights, in one lowering."""
    kinds = {"fp8" if isinstance(codes, Fp8Weight) else "nvfp4" for codes in held.values()}
    graph = Graph("ops")
    with tracing(graph):
        act = g.cast(graph.add_input("x", x.shape, DType.F32), DType.ACT)
        added = None if bias is None else "bias"
        weights = [LinearWeight(name, len(codes.codes), added) for name, codes in held.items()]
        for index, tensor in enumerate(g.linear(act, weights)):
            graph.add_output(f"out{index}", g.cast(tensor, DType.F32))
    # `read` would fail for the weights: none is quantized anew.
    reader = StoredArrays({} if bias is None else {"bias": bias}, held)
    network = evaluator_of(graph, TrtWeights(reader, lambda name: next(iter(kinds))), compute)
    made = network.run({"x": x})
    return [made[f"out{index}"] for index in range(len(held))]


SCALES = (0.0123, 3.7e-5, 0.9, 1.1e-7)  # the last is below what FP16 holds exactly


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_scales_of_any_size_are_applied_with_one_rounding(compute: str) -> None:
    """Inputs with one number each: a product is a code times a scale, rounded once to the type."""
    rng = np.random.default_rng(4)
    dtype = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16}[compute]
    x = np.eye(16, dtype=np.float32)[None] * np.float32(8)
    eight = {
        f"p.{i}.w": Fp8Weight(rng.integers(0, 127, (32, 16), np.uint8)
                              .view(ml_dtypes.float8_e4m3fn), scale)
        for i, scale in enumerate(SCALES)
    }  # fmt: skip
    scales = rng.uniform(0.5, 448, (32, 1)).astype(ml_dtypes.float8_e4m3fn)
    four = {
        f"p.{i}.w": Nvfp4Weight(rng.integers(0, 255, (32, 8), np.uint8), scales, scale)
        for i, scale in enumerate(SCALES)
    }
    for found, codes in zip(product(x, eight, compute), eight.values(), strict=True):
        exact = codes.dequantize().astype(np.float64).T * 8
        wanted = exact.astype(np.float32).astype(dtype).astype(np.float32)
        np.testing.assert_array_equal(found[0], wanted)
    # A block of inputs whose largest is 1 has the nearest scale to 1/6, and so holds 33/32.
    for found, blocks in zip(product(x, four, compute), four.values(), strict=True):
        wanted = blocks.dequantize().T * np.float32(8 * 33 / 32)
        np.testing.assert_allclose(found[0], wanted, rtol=2.0**-7, atol=2.0**-25)


def test_a_bias_is_added_to_a_scaled_product() -> None:
    codes = np.random.default_rng(5).integers(0, 127, (32, 16), np.uint8)
    weight = Fp8Weight(codes.view(ml_dtypes.float8_e4m3fn), 0.0123)
    bias = np.random.default_rng(6).normal(0, 30, 32).astype(np.float32)
    (found,) = product(np.eye(16, dtype=np.float32)[None] * np.float32(8), {"w": weight}, bias=bias)
    np.testing.assert_allclose(found[0], weight.dequantize().T * 8 + bias, rtol=2.0**-8, atol=2e-3)


def test_powers_of_two_stay_in_the_compute_type() -> None:
    codes = np.ones((2, 16), ml_dtypes.float8_e4m3fn)
    assert stacked([Fp8Weight(codes, 2.0**-9), Fp8Weight(codes, 0.5)]).is_exact
    made = stacked([Fp8Weight(codes, 0.3), Fp8Weight(codes, 0.7)])
    assert not made.is_exact
    assert made.packed.scale == 0.25
    assert made.factors == (0.3 / 0.25, 0.7 / 0.25)


def planned(pair: TinyPair, **choices: Any) -> Plan:
    return plan(str(pair.target_dir), str(pair.drafter_dir), choices)


def rounded_twice(made: Plan) -> list[str]:
    return [warning for warning in made.pair.warnings if "rounded a second time" in warning]


@pytest.mark.parametrize(
    ("form", "device", "precision"),
    [
        ("modelopt-fp8", "sm120", "fp8"), ("modelopt-fp8", "sm89", "fp8"),
        ("modelopt-fp8", "sm86", "bf16"), ("modelopt-fp8", "cpu", "fp32"),
        ("compressed-nvfp4", "sm120", "nvfp4"), ("compressed-nvfp4", "sm89", "bf16"),
        ("compressed-fp8-channel", "sm120", "bf16"), ("transformers-fp8-block", "sm120", "bf16"),
        ("modelopt-w4a16-nvfp4", "sm120", "bf16"),
        ("compressed-nvfp4-weights-only", "sm120", "bf16"),
    ],
)  # fmt: skip
def test_the_default_precision_is_the_targets_own_where_an_engine_has_it(
    form: str, device: str, precision: str, quantizing: Quantizing
) -> None:
    made = planned(quantizing(form)[0], device=device)
    assert made.choices.precision == precision
    assert not rounded_twice(made)
    assert (
        planned(quantizing(form)[0], device="sm120", precision="bf16").choices.precision == "bf16"
    )


@pytest.mark.parametrize(
    ("form", "told"),
    [("modelopt-w4a16-nvfp4", True), ("compressed-nvfp4-weights-only", True),
     ("compressed-nvfp4", False), ("modelopt-nvfp4", False)],
)  # fmt: skip
def test_inputs_that_a_checkpoint_left_alone_are_told_of(
    form: str, told: bool, quantizing: Quantizing
) -> None:
    pair = quantizing(form)[0]
    made = planned(pair, device="sm120", precision="nvfp4")
    words = "quantizes weights alone, and precision nvfp4 the inputs of products too"
    assert any(words in warning for warning in made.pair.warnings) == told
    made = planned(pair, device="sm120", precision="bf16")
    assert not any(words in warning for warning in made.pair.warnings)


def test_a_drafter_that_the_targets_precision_quantizes_is_told_of(
    quantizing: Quantizing,
) -> None:
    pair, words = quantizing("modelopt-nvfp4")[0], "drafter: it is quantized for precision nvfp4"

    def is_told(**choices: Any) -> bool:
        return any(words in w for w in planned(pair, device="sm120", **choices).pair.warnings)

    assert is_told()
    assert not is_told(precision="nvfp4")  # asked for
    assert not is_told(precision="bf16")


FOUR_LAYERS = 4 * 7


@pytest.mark.parametrize(
    ("form", "device", "precision", "told"),
    [
        ("modelopt-fp8", "sm120", "fp8", None),
        ("modelopt-nvfp4", "sm120", "nvfp4", None),
        ("modelopt-nvfp4", "sm120", "bf16", None),
        ("modelopt-nvfp4", "cpu", "fp32", None),
        ("modelopt-fp8", "sm120", "nvfp4", "FP8 with one scale"),
        ("modelopt-nvfp4", "sm120", "fp8", "NVFP4"),
        ("compressed-fp8-channel", "sm120", "fp8", "FP8 with a scale per output"),
        ("transformers-fp8-block", "sm120", "fp8", "FP8 with a scale per block"),
        ("modelopt-fp8", "cpu", "int4", "FP8 with one scale"),
    ],
)
def test_weights_that_are_rounded_twice_are_told_of(
    form: str, device: str, precision: str, told: str | None, quantizing: Quantizing
) -> None:
    warnings = rounded_twice(planned(quantizing(form)[0], device=device, precision=precision))
    if told is None:
        assert not warnings
    else:
        assert warnings == [
            f"target: {FOUR_LAYERS} of its weights are stored as {told}, and rounded a second time "
            f"for precision {precision}"
        ]


def test_layers_that_a_mixed_checkpoint_has_in_fp8_stay_so(
    quantizing: Quantizing, make_engine: EngineMaker
) -> None:
    coded, _ = quantizing({"self_attn": "modelopt-fp8", "mlp": "modelopt-nvfp4"}, "mixed")
    layers = {
        f"model.layers.{layer}.{part}": made.modelopt(algorithm)
        for layer in range(4)
        for part, algorithm in (("self_attn.q_proj", "FP8"), ("mlp.up_proj", "NVFP4"))
    }
    made.say(coded.target_dir, None, made.modelopt("MIXED_PRECISION", quantized_layers=layers))
    found = planned(coded, device="sm120")
    assert found.choices.precision == "nvfp4"
    assert not rounded_twice(found)
    held = constants(make_engine(coded), "nvfp4")
    assert held[f"{QKV}/codes"].dtype == ml_dtypes.float8_e4m3fn
    assert held[f"{AT}mlp.up_proj.weight/codes"].dtype == ml_dtypes.float4_e2m1fn


def test_the_head_of_a_tied_checkpoint_stays_in_the_compute_type(
    make_pair: PairMaker, make_engine: EngineMaker, tmp_path: Path
) -> None:
    pair = make_pair("llama", seed=71, target={**WIDE["target"], "tie_word_embeddings": True})
    made.save_quantized(pair.target_dir, tmp_path / "q", "modelopt-fp8")
    held = constants(make_engine(dataclasses.replace(pair, target_dir=tmp_path / "q")), "fp8")
    assert held["target.embed_tokens.weight"].dtype == ml_dtypes.bfloat16
    assert not [name for name in held if "embed_tokens" in name and "/codes" in name]
    assert "target.embed_tokens.weight/codes" in constants(make_engine(pair), "fp8")


def test_a_plan_counts_what_is_left_in_the_compute_type(quantizing: Quantizing) -> None:
    coded, _ = quantizing({"self_attn": "modelopt-fp8"}, "attention")
    made.say(coded.target_dir, None, made.modelopt("FP8", exclude_modules=["*mlp*", "lm_head"]))
    found = planned(coded, device="sm120", precision="fp8")
    weights, wanted = found.pair.weights(), 0
    for name in weights.names():
        is_small = "norm" in name or name == "drafter.fc.weight"
        is_left = name.startswith("target.") and "self_attn" not in name
        wanted += math.prod(weights.info(name).shape) * (4 if is_small else 2 if is_left else 1)
    assert found.weight_bytes == wanted


def test_codes_that_are_no_numbers_are_refused(
    quantizing: Quantizing, make_pair: PairMaker, tmp_path: Path
) -> None:
    pair = make_pair(seed=70, **WIDE)
    name = "model.layers.1.mlp.up_proj.weight"

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        codes = tensors[name].view(torch.uint8)
        codes[3, 5] = 0xFF

    made.save_quantized(pair.target_dir, tmp_path / "q", "modelopt-fp8", edit=edit)
    weights = planned(dataclasses.replace(pair, target_dir=tmp_path / "q")).pair.weights()
    for call in (weights.read, weights.float_codes):
        with pytest.raises(BadTensor, match=rf"tensor {name} holds NaN or infinite values"):
            call("target.layers.1.mlp.up_proj.weight")
