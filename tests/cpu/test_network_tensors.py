"""Tensors inside the TensorRT network, by the evaluator: against ONNX Runtime, and by precision."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dflash_trt import contract as c
from dflash_trt.nets.step import trace_step
from dflash_trt.runtime.session import Session, StepRows
from tiny import EngineMaker, PairMaker, Probe, ProbeMaker, TinyEngine
from tiny.probe import taps
from tiny.trt_evaluator import NetworkEvaluator
from tiny.trt_sessions import EvaluatedSession, step_network
from tiny.trt_types import Array, numpy_type

SUMS = 3e-5  # of a few hundred float32 products, added in another order
TEXT = np.random.default_rng(3).integers(0, 150, 24).astype(np.int32)


def feeds_of(network: NetworkEvaluator, probe: Probe, rows: dict[str, Any]) -> dict[str, Array]:
    """A step's inputs as the GPU session gives them: one id per line to adjust, no offsets."""
    feeds = {k: v for k, v in probe.feeds(**rows).items() if k in network.inputs}
    for name in (c.ADJUST_IDS, c.ADJUST_SEEN, c.ADJUST_COUNT, c.ADJUST_BIAS):
        feeds[name] = np.zeros((*feeds[name].shape[:2], 1), feeds[name].dtype)
    return feeds


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_inner_tensors_and_caches_equal_those_of_onnx_runtime(
    family: str, make_pair: PairMaker, make_engine: EngineMaker, make_probe: ProbeMaker
) -> None:
    """Two slots that are in different places: a chunk beside a decode step, then both decode."""
    pair = make_pair(family)
    tiny = make_engine(pair)
    choices = tiny.directory.config.choices
    capacity = c.cache_rows(choices.max_seq_len, choices.block)
    probe = make_probe(pair, slots=2, capacity=capacity)
    graph = trace_step(tiny.facts, choices.block, capacity)
    for name, tensor in taps(graph, len(tiny.facts.drafter.target_layer_ids)).items():
        graph.add_output(name, tensor)
    network = step_network(tiny, graph=graph)
    caches = {
        name: np.full((2, *tensor.shape[1:]), 1e30, numpy_type(tensor.dtype))
        for name, tensor in network.inputs.items()
        if c.UPDATED + name in network.outputs
    }
    length = np.zeros(2, np.int32)
    steps: list[dict[str, Any]] = [
        {"tokens": [[5, 6, 7, 8, 9, 10], [1, 2, 3]], "known": [6, 3]},
        {"tokens": [[11, 12, 13], [4, 5, 6]], "known": [3, 1]},
        {"tokens": [[14, 15, 16, 17], [7, 8]], "known": [1, 1]},
    ]
    for step in steps:
        rows = {**step, "length": length.tolist()}
        mine = network.run(feeds_of(network, probe, rows) | caches)
        theirs = probe.step(**rows)
        valid = np.array([len(row) for row in step["tokens"]])
        seen = np.arange(max(valid)) < valid[:, None]
        for name, wanted in theirs.items():
            found = mine[name]
            assert found.shape == wanted.shape
            if name in ("features", "context"):  # of columns that hold a token
                found, wanted = found[seen], wanted[seen]
            np.testing.assert_allclose(found, wanted, rtol=SUMS, atol=SUMS, err_msg=name)
        length += theirs[c.COMMITTED]
        for name, cache in caches.items():
            for slot, live in enumerate(length):
                np.testing.assert_allclose(
                    cache[slot, :, :live], probe.caches[name][slot, :, :live], rtol=SUMS, atol=SUMS
                )


def logits_of(session: Session) -> Array:
    """The target's logits of a text that is read in four steps."""
    one = np.ones(1, np.int32)
    made = []
    for start in range(0, 24, 4):
        row = StepRows.greedy(TEXT[None, start : start + 4], one * start, one * 4, one)
        result = session.step(0, row, 3, want_logits=True)
        assert result.logits is not None
        made.append(result.logits[0])
    return np.concatenate(made)


# Of the logits' own spread, root mean square over 24 positions of a random four-layer target:
# BF16 keeps 8 bits and FP16 11; FP8 keeps 4 bits of weights and activations, NVFP4 2.
ERRORS = {"bf16": (0.003, 0.03), "fp16": (0.0003, 0.004), "fp8": (0.03, 0.25), "nvfp4": (0.1, 0.6)}


@pytest.mark.parametrize("precision", ERRORS)
def test_logits_of_low_precisions_are_near_those_of_fp32(
    precision: str, engine: TinyEngine
) -> None:
    wanted = logits_of(engine.session())
    error = logits_of(EvaluatedSession(engine, precision)) - wanted
    least, most = ERRORS[precision]
    assert least < error.std() / wanted.std() < most


def test_logits_of_the_proof_are_those_of_the_cpu(engine: TinyEngine) -> None:
    found, wanted = logits_of(EvaluatedSession(engine)), logits_of(engine.session())
    np.testing.assert_allclose(found, wanted, rtol=SUMS, atol=SUMS)
