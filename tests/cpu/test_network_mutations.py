"""What the proof catches: networks with one deliberate mistake, each of which must show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorrt_rtx as trt

from dflash_trt.decode.request import SamplingParams
from dflash_trt.errors import StepError
from tiny import Recording, TinyEngine
from tiny.trt_evaluator import layers_of
from tiny.trt_sessions import EvaluatedSession
from tiny.trt_types import EvaluationError

JOBS = [
    ([5, 6, 7, 8, 9, 10, 11, 12, 13], SamplingParams(max_tokens=6)),
    ([1, 2], SamplingParams(max_tokens=4, temperature=0.8, top_k=5, seed=3)),
    ([3, 4, 5], SamplingParams(max_tokens=4, repetition_penalty=1.5)),
]
KEPT: list[Any] = []  # networks point to their constants

Spoil = Callable[[Any], int]


def shifted(network: Any, tensor: Any, by: int) -> Any:
    """A tensor of integers plus a number."""
    dtype = {trt.int32: np.int32, trt.int64: np.int64}[tensor.dtype]
    KEPT.append(np.full((1,) * len(tensor.shape), by, dtype))
    number = network.add_constant(KEPT[-1].shape, trt.Weights(KEPT[-1])).get_output(0)
    return network.add_elementwise(tensor, number, trt.ElementWiseOperation.SUM).get_output(0)


def layers(network: Any, kind: str, scope: str = "") -> list[Any]:
    """The layers of a class under a scope."""
    found = [layer for layer in layers_of(network, trt) if type(layer).__name__ == kind]
    return [x for x in found if scope in (x.attention if "Attention" in kind else x).name]


def attentions(network: Any, scope: str) -> list[Any]:
    return [layer.attention for layer in layers(network, "IAttentionInputLayer", scope)]


def newest_keys(network: Any, scope: str) -> list[Any]:
    """The comparisons of masks under a scope: keys, and the newest one that a row may see."""
    made = {layer.get_output(0).name: layer for layer in layers_of(network, trt)}
    masks = {attention.mask.name for attention in attentions(network, scope)}
    return [made[made[mask].get_input(0).name] for mask in masks]


def last_key(scope: str, by: int) -> Spoil:
    """Attention over a key too few or too many."""

    def spoil(network: Any) -> int:
        found = newest_keys(network, scope)
        for comparison in found:
            comparison.set_input(1, shifted(network, comparison.get_input(1), by))
        return len(found)

    return spoil


def causal_drafter(network: Any) -> int:
    """Rows of a block that do not see those behind them."""
    made = {layer.get_output(0).name: layer for layer in layers_of(network, trt)}
    found = newest_keys(network, "drafter.layers")
    for comparison in found:
        comparison.set_input(1, made[comparison.get_input(1).name].get_input(0))
    return len(found)


def late_rows(network: Any) -> int:
    """Caches written a row too late."""
    found = layers(network, "IKVCacheUpdateLayer", "drafter.layers")
    for layer in found:
        layer.set_input(2, shifted(network, layer.get_input(2), 1))
    return len(found)


def turned(scope: str) -> Spoil:
    """Queries, which have the more heads, rotated a position too far; keys as they should be."""

    def spoil(network: Any) -> int:
        found = layers(network, "IRotaryEmbeddingLayer", scope)
        most = max(layer.get_input(0).shape[1] for layer in found)
        queries = [layer for layer in found if layer.get_input(0).shape[1] == most]
        for layer in queries:
            layer.set_input(3, shifted(network, layer.get_input(3), 1))
        return len(queries)

    return spoil


def interleaved(network: Any) -> int:
    found = layers(network, "IRotaryEmbeddingLayer")
    for layer in found:
        layer.interleaved = True
    return len(found)


def keys_for_values(network: Any) -> int:
    """The first target layer's values are its keys."""
    (keys, values) = (
        layers(network, "IMatrixMultiplyLayer", f"/target.layers.0/self_attn/linear/{name}")[0]
        for name in ("k_proj", "v_proj")
    )
    values.set_input(1, keys.get_input(1))
    return 1


def exclusive(network: Any) -> int:
    """Running sums that do not count the element itself: a draft too many is accepted."""
    found = [x for x in layers(network, "ICumulativeLayer") if "choose" not in x.name]
    for layer in found:
        layer.exclusive = True
    return len(found)


def swapped(scope: str) -> Spoil:
    """Selections the other way round."""

    def spoil(network: Any) -> int:
        found = layers(network, "ISelectLayer", scope)
        for layer in found:
            a, b = layer.get_input(1), layer.get_input(2)
            layer.set_input(1, b)
            layer.set_input(2, a)
        return len(found)

    return spoil


MISTAKES: dict[str, Spoil] = {
    "target: a key too few": last_key("target.layers", -1),
    "target: a key too many": last_key("target.layers", 1),
    "drafter: causal": causal_drafter,
    "drafter: a key too few": last_key("drafter.layers", -1),
    "drafter: a key too many": last_key("drafter.layers", 1),
    "rotary embedding: interleaved": interleaved,
    "target: queries a position too far": turned("target.layers"),
    "drafter: queries a position too far": turned("drafter.layers"),
    "caches: written a row too late": late_rows,
    "weights: keys for values": keys_for_values,
    "acceptance: a draft too many": exclusive,
    "choice: both sides exchanged": swapped("choose"),
}


def outcome(tiny: TinyEngine, session: Any) -> list[Any]:
    """Tokens, and what every step committed and drafted."""
    watched = Recording(session)
    made = [g.token_ids for g in tiny.engine(watched).generate_all(JOBS)]
    return [*made, *(
        part[step.rows.count > 0].tolist()
        for step in watched.steps for part in (step.result.committed, step.result.next_tokens)
    )]  # fmt: skip


@pytest.fixture(scope="module")
def wanted(trained_engine: TinyEngine) -> list[Any]:
    return outcome(trained_engine, trained_engine.session())


def test_the_same_jobs_without_a_mistake(trained_engine: TinyEngine, wanted: list[Any]) -> None:
    assert outcome(trained_engine, EvaluatedSession(trained_engine)) == wanted


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_shows(name: str, trained_engine: TinyEngine, wanted: list[Any]) -> None:
    num_changed = []
    spoil = MISTAKES[name]
    session = EvaluatedSession(trained_engine, change=lambda net: num_changed.append(spoil(net)))
    assert num_changed[0] > 0
    try:
        found = outcome(trained_engine, session)
    except StepError as error:
        is_impossible = "allowed are" in str(error)  # the scheduler looks at what it is given
        assert isinstance(error.__cause__, EvaluationError) or is_impossible  # noqa: PT017
        return
    assert found != wanted
