"""The sizes that `build` refuses for a GPU are those that TensorRT refuses, and no others."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_trt import contract as c
from dflash_trt import graph as g
from dflash_trt.build import pipeline
from dflash_trt.build.pipeline import build, plan
from dflash_trt.build.tensorrt import BuiltEngine, build_engine
from dflash_trt.config import LayerMask
from dflash_trt.errors import BuildError, UnsupportedArchitecture
from dflash_trt.flavor import DEVICE_TABLE, TENSORRT_RTX, load_flavor
from dflash_trt.graph import DType, Graph, Node, Shape, Tensor, tracing
from dflash_trt.inspection import describe
from dflash_trt.lower.trt import lower_to_trt
from dflash_trt.lower.trt_limits import check_sizes
from dflash_trt.lower.trt_weights import TrtWeights
from dflash_trt.nets.sampling import Sampling, Special, choose
from tiny import PairMaker
from tiny.gpu_builds import GEOMETRIES, GPU_CHOICES
from tiny.trt_ops import StoredArrays

trt = load_flavor(TENSORRT_RTX)
B, S, CAPACITY = "slots", "step_tokens", 64


def built(graph: Graph, compute: str, folder: Path) -> BuiltEngine:
    """A graph without weights, as TensorRT builds it."""
    held = TrtWeights(StoredArrays({}), lambda name: None)

    def define(network: Any) -> Any:
        lower_to_trt(graph, network, trt, held, compute)
        return held.kept

    profile = c.Profile(c.DECODE, {B: (1, 2, 4), S: (1, 4, 8)})
    file = folder / "part.engine"
    return build_engine(trt, DEVICE_TABLE["sm120"], define, [profile], file, lambda *_: None)


def attention(heads: tuple[int, int, int], mask: LayerMask) -> Graph:
    num_heads, kv_heads, width = heads
    act, cache = DType.ACT, (B, kv_heads, CAPACITY, width)
    shapes: dict[str, tuple[DType, Shape]] = {
        "q": (act, (B, num_heads, S, width)), "keys": (act, cache), "values": (act, cache),
        "start": (DType.I32, (B,)),
    }  # fmt: skip
    graph = Graph("attention")
    with tracing(graph):
        q, keys, values, start = (graph.add_input(n, s, t) for n, (t, s) in shapes.items())
        result = g.attention(q, keys, values, g.add(start, g.size(q, 2)), mask)
    graph.add_output("result", result)
    return graph


@pytest.mark.parametrize(
    ("heads", "kind"),
    [
        *(((4, 2, width), "fused") for width in (16, 24, 104, 256)),
        *(((*heads, 64), "fused") for heads in ((1, 1), (2, 1), (2, 2), (71, 1))),
        *(((4, 2, width), "products") for width in (6, 8, 258, 264, 512)),
        *(((4, 2, width), "refused") for width in (10, 12, 20, 100, 252)),
    ],
)
def test_the_rule_is_tensorrts(heads: tuple[int, int, int], kind: str, tmp_path: Path) -> None:
    assert is_allowed(heads) == (kind != "refused")
    for mask, compute in ((LayerMask(True), "bf16"), (LayerMask(False, 16), "fp16")):
        try:
            kernels = built(attention(heads, mask), compute, tmp_path).layers["layers"]
        except BuildError:
            assert kind == "refused"
            continue
        assert kind == ("fused" if any("_mha_" in k["name"] for k in kernels) else "products")
        # A cache that is copied once for each query head, as TensorRT would by itself.
        assert not any("ReshReplResh" in k["name"] for k in kernels)


def is_allowed(heads: tuple[int, int, int]) -> bool:
    pair = GEOMETRIES["smollm2-135m"]
    num_heads, kv_heads, width = heads
    changed = dataclasses.replace(
        pair.target.attention, num_heads=num_heads, num_kv_heads=kv_heads, head_dim=width
    )
    pair = dataclasses.replace(pair, target=dataclasses.replace(pair.target, attention=changed))
    check_sizes(pair, DEVICE_TABLE["sm90"])  # the data-center flavour has shown no such limit
    try:
        check_sizes(pair, DEVICE_TABLE["sm120"])
    except UnsupportedArchitecture:
        return False
    return True


@pytest.mark.parametrize("side", ["target", "drafter"])
@pytest.mark.parametrize("precision", ["bf16", "fp8", "nvfp4"])
def test_a_pair_is_refused_when_it_is_planned(
    side: str, precision: str, make_pair: PairMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: Any = {"head_dim": 10}
    pair = make_pair(target=options) if side == "target" else make_pair(**options)
    reference = (str(pair.target_dir), str(pair.drafter_dir))
    monkeypatch.setattr(pipeline, "_weight_bytes", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(UnsupportedArchitecture, match=f"the {side} has head_dim 10: ") as caught:
        plan(*reference, {**GPU_CHOICES, "precision": precision})
    assert "--device cpu" in caught.value.hint
    monkeypatch.undo()
    assert plan(*reference, {}).device.name == "cpu"


@pytest.mark.usefixtures("greedy_choice")
def test_a_pair_of_one_head_without_a_fused_kernel_builds(
    make_pair: PairMaker, tmp_path: Path
) -> None:
    heads: Any = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8}
    pair = make_pair(target=heads, **heads)
    planned = plan(str(pair.target_dir), str(pair.drafter_dir), GPU_CHOICES)
    engine = build(planned, tmp_path / "engine", force=False, progress=lambda *_: None)
    assert describe(engine)["tensorrt"]["step"]["engines"] == 1


@pytest.mark.parametrize(
    ("precision", "options"),
    [
        ("bf16", {"draft_ids": range(1, 160, 3), "dflash2": {"conv_kernel_size": 3}}),
        ("nvfp4", {"block": 8, "dflash2": {"selector_top_k": 16, "selector_rank": 32}}),
        # Sums and choices over one element, where there is nothing to choose.
        ("bf16", {"block": 2, "dflash2": {"selector_top_k": 1, "selector_rank": 1}}),
    ],
)
def test_a_pair_of_dflash2_builds_with_its_sampler(
    precision: str, options: dict[str, Any], make_pair: PairMaker, tmp_path: Path
) -> None:
    pair = make_pair(**options)
    choices = {**GPU_CHOICES, "precision": precision}
    planned = plan(str(pair.target_dir), str(pair.drafter_dir), choices)
    engine = build(planned, tmp_path / "engine", force=False, progress=lambda *_: None)
    assert describe(engine)["tensorrt"]["step"]["engines"] == 1
    assert engine.config.pair.drafter.dflash2 == planned.pair.config.drafter.dflash2


def test_a_pair_with_a_draft_vocabulary_builds_with_its_sampler(
    make_pair: PairMaker, tmp_path: Path
) -> None:
    pair = make_pair(draft_ids=range(1, 160, 3))
    planned = plan(str(pair.target_dir), str(pair.drafter_dir), GPU_CHOICES)
    engine = build(planned, tmp_path / "engine", force=False, progress=lambda *_: None)
    facts = describe(engine)
    assert facts["drafter"]["draft_vocab_size"] == 53
    assert facts["tensorrt"]["step"]["engines"] == 1


@pytest.mark.parametrize("vocab", [7, 157])
def test_no_sum_in_the_sampler_is_over_one_element(vocab: int) -> None:
    """TensorRT-RTX 1.7.1 cannot build that beside the noise, and a prime vocabulary had it."""
    graph = Graph("sampler")
    kinds = {"temperature": DType.F32, "top_k": DType.I32, "top_p": DType.F32, "min_p": DType.F32,
             "seed": DType.I64}  # fmt: skip
    with tracing(graph):
        logits: Tensor = graph.add_input("logits", (B, S, vocab), DType.F32)
        positions = graph.add_input("positions", (B, S), DType.I32)
        sampling = Sampling(**{n: graph.add_input(n, (c.SPECIAL,), t) for n, t in kinds.items()})
        slots, source = (
            graph.add_input(name, (dim,), DType.I32)
            for name, dim in ((c.SPECIAL_SLOTS, c.SPECIAL), (c.CHOICE_SOURCE, B))
        )
        graph.add_output("token", choose(logits, positions, Special(slots, source, sampling)))
    sums = [node for node in every_node(graph) if node.op == "reduce_sum"]
    assert sums
    assert all(node.inputs[0].shape[-1] != 1 for node in sums)


def every_node(graph: Graph) -> Iterator[Node]:
    """The nodes of a graph and of the branches inside it."""
    for node in graph.nodes:
        yield node
        for branch in node.attrs.values():
            if isinstance(branch, Graph):
                yield from every_node(branch)
