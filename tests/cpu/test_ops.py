"""Every op of the surface: its ONNX lowering on ONNX Runtime against numpy, and by onnx itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from dflash_trt import graph as g
from dflash_trt.errors import GraphError, NoLowering
from dflash_trt.graph import DType, Graph, primitives, tracing
from dflash_trt.graph.compounds import DECOMPOSITIONS
from dflash_trt.lower.onnx_ops import EMITTERS
from tiny.op_cases import CASES, Case, check
from tiny.ops import REFERENCE_OPS, TYPES, Arrays, lower, run_ops


@pytest.mark.parametrize("name", CASES)
def test_op_equals_numpy_on_onnx_runtime(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    found = run_ops(tmp_path, case.body, case.inputs, case.dims, weights=Arrays(case.weights))
    check(found, case.wanted)


@pytest.mark.parametrize("name", CASES)
def test_lowered_graph_is_valid_and_means_the_same_to_onnx_itself(
    name: str, tmp_path: Path
) -> None:
    case = CASES[name]
    shapes = {
        key: (TYPES[str(array.dtype)], case.dims.get(key, array.shape))
        for key, array in case.inputs.items()
    }
    path = lower(tmp_path, case.body, shapes, weights=Arrays(case.weights))
    onnx.checker.check_model(str(path))
    evaluator = ReferenceEvaluator(str(path), new_ops=REFERENCE_OPS)
    check(evaluator.run(None, case.inputs), case.wanted)


@pytest.mark.parametrize("op", sorted(set(DECOMPOSITIONS) & set(EMITTERS)))
def test_decomposition_equals_the_claimed_operator(op: str, tmp_path: Path) -> None:
    for index, name in enumerate(n for n in CASES if n.split("-")[0] == op):
        case, folder = CASES[name], tmp_path / str(index)
        path = lower_inputs(folder, case, decompose={op})
        assert op_types(path).isdisjoint({"RMSNormalization", "RotaryEmbedding"})
        check(run_ops(folder, case.body, case.inputs, decompose={op}), case.wanted)


def lower_inputs(folder: Path, case: Case, **options: Any) -> Path:
    shapes = {k: (TYPES[str(a.dtype)], a.shape) for k, a in case.inputs.items()}
    return lower(folder, case.body, shapes, **options)


def op_types(path: Path) -> set[str]:
    return {node.op_type for node in onnx.load(str(path), load_external_data=False).graph.node}


def traced_ops(case: Case) -> set[str]:
    graph = Graph("probe")
    with tracing(graph):
        case.body(**{
            name: graph.add_input(name, case.dims.get(name, a.shape), TYPES[str(a.dtype)])
            for name, a in case.inputs.items()
        })  # fmt: skip
    return {node.op for node in graph.walk()}


def test_every_op_of_the_surface_can_be_lowered_and_is_tested() -> None:
    surface = primitives.UNARY | set(DECOMPOSITIONS)
    surface |= {name for name in g.__all__ if name.islower()}
    surface -= {"tracing", "scope", "unary", "reduce", "reduce_all"}
    surface |= {"reduce_sum", "reduce_max", "reduce_all_max"}
    assert surface == set(EMITTERS) | set(DECOMPOSITIONS)
    assert surface == {op for case in CASES.values() for op in traced_ops(case)}


def test_an_op_without_lowering_is_refused_by_name(tmp_path: Path) -> None:
    def body(x: Any) -> Any:
        return primitives._one("sorcery", [x], x.shape, x.dtype)

    with pytest.raises(NoLowering, match="sorcery"):
        lower(tmp_path, body, {"x": (DType.F32, (2,))})


def test_rules_of_the_surface_are_checked_while_tracing() -> None:
    graph = Graph("rules")
    x = graph.add_input("x", ("b", 3), DType.F32)
    with pytest.raises(GraphError, match="outside"):
        g.add(x, 1.0)
    with tracing(graph):
        with pytest.raises(GraphError, match="mix"):
            g.add(x, g.constant([1, 2, 3], DType.I32))
        with pytest.raises(GraphError, match="broadcast"):
            g.add(x, g.constant([1.0, 2.0], DType.F32))
    graph.add_output("y", x)
    with pytest.raises(GraphError, match="twice"):
        graph.add_output("y", x)
