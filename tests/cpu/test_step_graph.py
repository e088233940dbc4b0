"""The lowered step graph as a whole: contract, in-place caches, types, and onnx's own reading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator

from dflash_trt import contract as c
from dflash_trt.checkpoint.pair import read_pair
from dflash_trt.graph.compounds import DECOMPOSITIONS
from dflash_trt.nets.step import trace_step
from dflash_trt.runtime.ort import OrtSession
from tiny import PairMaker, ProbeMaker, TinyEngine, TinyPair, close
from tiny.ops import REFERENCE_OPS
from tiny.probe import special_lines

TEXT = [5, 80, 31, 7, 99, 140, 2]
SLIDING = {
    "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip


@pytest.fixture(scope="module")
def model(engine: TinyEngine) -> onnx.ModelProto:
    return onnx.load(str(engine.directory.model), load_external_data=False)


def test_inputs_and_outputs_are_those_of_the_contract(
    model: onnx.ModelProto, engine: TinyEngine
) -> None:
    specs = c.all_caches(engine.facts)
    assert {i.name for i in model.graph.input} == {*c.INPUTS, *(s.name for s in specs)}
    assert {o.name for o in model.graph.output} == {
        c.COMMITTED, c.NEXT, c.LOGITS, *(s.output for s in specs)
    }  # fmt: skip
    shapes = {i.name: [d.dim_param or d.dim_value for d in i.type.tensor_type.shape.dim]
              for i in model.graph.input}  # fmt: skip
    for spec in specs:
        assert shapes[spec.name] == [c.SLOTS, spec.num_heads, c.CAPACITY, spec.head_dim]


def test_every_cache_is_updated_once_from_input_straight_to_output(
    model: onnx.ModelProto, engine: TinyEngine
) -> None:
    """Anything between would make ONNX Runtime copy the whole cache in every step."""
    updates = {n.input[0]: n.output[0] for n in model.graph.node if n.op_type == "TensorScatter"}
    assert updates == {s.name: s.output for s in c.all_caches(engine.facts)}
    readers = [n.op_type for n in model.graph.node if set(n.input) & set(updates)]
    assert readers == ["TensorScatter"] * len(updates)


def test_no_half_precision_anywhere_and_weights_outside_of_the_model_file(
    model: onnx.ModelProto, engine: TinyEngine
) -> None:
    types = {tensor.data_type for tensor in model.graph.initializer}
    assert types <= {TensorProto.FLOAT, TensorProto.INT32, TensorProto.INT64, TensorProto.BOOL}
    half = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
    casts = [a.i for n in model.graph.node if n.op_type == "Cast" for a in n.attribute]
    assert not set(casts) & set(half)
    large = [t for t in model.graph.initializer if np.prod(t.dims) > 1000]
    assert large
    for tensor in large:
        place = {entry.key: entry.value for entry in tensor.external_data}
        assert place["location"] == "weights.bin"
        assert int(place["offset"]) % 4096 == 0


def test_node_names_tell_where_a_node_belongs(model: onnx.ModelProto) -> None:
    names = [node.name for node in model.graph.node if node.op_type == "Attention"]
    assert any(name.startswith("/target.layers.3/self_attn/attention") for name in names)
    every = [node.name for node in model.graph.node if node.name]
    assert len(set(every)) == len(every)


def test_tracing_touches_no_weights_and_refers_to_all_of_them(pair: TinyPair) -> None:
    read = read_pair(pair.target_dir, pair.drafter_dir)
    graph = trace_step(read.config, 4, 64)
    used: set[str] = set()
    for node in graph.walk():
        used |= {node.attrs["name"]} if node.op in ("param", "embedding") else set()
        for weight in node.attrs.get("weights", ()):
            used |= {weight.name} | ({weight.bias} if weight.bias else set())
    weights = read.weights()
    assert {weights.canonical(name) for name in used} == set(weights.names())


def feeds(
    probe: Any, tokens: list[int], length: int, known: int, drafts: int, temperature: float
) -> dict[str, Any]:
    offsets = np.arange(probe.block, dtype=np.int32)
    return {
        c.TOKENS: np.array([tokens], np.int32),
        c.LENGTH: np.array([length], np.int32),
        c.COUNT: np.array([len(tokens)], np.int32),
        c.KNOWN: np.array([known], np.int32),
        c.BLOCK_OFFSETS: offsets if drafts else offsets[:0],
        c.DRAFT_OFFSETS: offsets[1 : 1 + drafts],
        **special_lines(1, min(len(tokens), probe.block), temperature=[temperature], seed=[3]),
        **{name: cache.copy() for name, cache in probe.caches.items()},
    }


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_whole_graph_means_the_same_to_onnx_itself(
    temperature: float, make_pair: PairMaker, make_probe: ProbeMaker, tmp_path: Path
) -> None:
    """ONNX's reference evaluator is slow and plain: it fuses nothing and shares no kernel."""
    probe = make_probe(make_pair(**SLIDING), capacity=24)
    path = next(tmp_path.glob("*/probe.onnx"))
    evaluator = ReferenceEvaluator(str(path), new_ops=REFERENCE_OPS)
    names = [output.name for output in onnx.load(str(path)).graph.output]
    for tokens, length, known, drafts in ((TEXT, 0, 7, 3), ([9, 8, 7, 6], 7, 1, 2)):
        given = feeds(probe, tokens, length, known, drafts, temperature)
        read = dict(zip(names, evaluator.run(None, given), strict=True))
        made = probe.step([tokens], [length], known=[known], drafts=drafts,
                          temperature=[temperature], seed=[3])  # fmt: skip
        for name in (c.COMMITTED, c.NEXT):
            np.testing.assert_array_equal(made[name], read[name])
        for name in ("target_logits", "features", "draft_logits"):
            close(made[name], read[name])
        for name, cache in probe.caches.items():
            close(cache, read[c.UPDATED + name])


def test_a_graph_of_primitives_alone_computes_the_same(
    make_pair: PairMaker, make_probe: ProbeMaker
) -> None:
    pair = make_pair("llama", target={"rms_norm_eps": 1e-3}, **SLIDING)
    whole, plain = make_probe(pair), make_probe(pair, decompose=DECOMPOSITIONS)
    for tokens, length, known in ((TEXT, 0, 7), ([9, 8, 7, 6], 7, 1)):
        made, wanted = (p.step([tokens], [length], known=[known]) for p in (plain, whole))
        np.testing.assert_array_equal(made[c.NEXT], wanted[c.NEXT])
        close(made["target_logits"], wanted["target_logits"])
        close(made["draft_logits"], wanted["draft_logits"])


def test_a_session_updates_its_caches_in_the_memory_it_was_given(
    engine: TinyEngine, prompts: list[list[int]]
) -> None:
    class Kept(OrtSession):
        def release(self, slot: int) -> None:
            """Keep what a released slot would forget."""

    session = engine.session(Kept)
    addresses = {name: cache.ctypes.data for name, cache in session.caches.items()}
    engine.generate(prompts[0], 5, session=session)
    for name, cache in session.caches.items():
        assert cache.ctypes.data == addresses[name]
        written = np.abs(cache[0]).sum(axis=(0, 2)) > 0
        assert written[: len(prompts[0]) + 4].all()
        assert not written[len(prompts[0]) + 5 + 2 * 4 :].any()
        assert not cache[1:].any()
