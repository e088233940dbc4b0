"""Every op of the surface: its TensorRT lowering, by the evaluator, against numpy."""

from __future__ import annotations

from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from dflash_trt import graph as g
from dflash_trt.errors import NoLowering
from dflash_trt.graph import DType, LinearWeight, Tensor, compounds
from dflash_trt.graph.compounds import DECOMPOSITIONS
from tiny.op_cases import CASES, Case, check
from tiny.trt_ops import run_ops_trt

COMPUTED_K = "topk-computed"
# Which of equal values TopK takes first is not documented: `topk` here means "some order of ties".
TIES = {"topk": "lower"}
LOWERED = sorted(set(CASES) - {COMPUTED_K})


def dynamic(case: Case) -> dict[str, tuple[int | str, ...]]:
    """The case's dims; where it names none, every axis but the last, by its length."""
    return {
        name: case.dims.get(
            name, (*(f"n{n}" if n > 1 else n for n in array.shape[:-1]), *array.shape[-1:])
        )
        for name, array in case.inputs.items()
    }


def run(case: Case, dims: dict[str, Any], **options: Any) -> None:
    found = run_ops_trt(case.body, case.inputs, dims, case.weights, **options)
    check(found, case.wanted)


@pytest.mark.parametrize("name", LOWERED)
def test_op_equals_numpy(name: str) -> None:
    run(CASES[name], CASES[name].dims, ties=TIES.get(name, "higher"))


@pytest.mark.parametrize("name", LOWERED)
def test_op_equals_numpy_where_sizes_are_not_known(name: str) -> None:
    run(CASES[name], dynamic(CASES[name]), ties=TIES.get(name, "higher"))


@pytest.mark.parametrize("op", sorted(DECOMPOSITIONS))
def test_decomposition_equals_the_claimed_op(op: str) -> None:
    for name in (n for n in CASES if n.split("-")[0] == op):
        run(CASES[name], dynamic(CASES[name]), decompose={op})


def test_a_k_that_is_computed_is_refused() -> None:
    with pytest.raises(NoLowering, match="known when the engine is built"):
        run(CASES[COMPUTED_K], {})


TYPES = {"bf16": np.dtype(ml_dtypes.bfloat16), "fp16": np.dtype(np.float16)}
# How many inputs of an op are activations; the others, tables and norms, are FP32 everywhere.
ACTIVE = {"attention": 3, "rope": 1, "swiglu": 2, "rms_norm": 1}
ACTIVATIONS = [name for name in LOWERED if name.split("-")[0] in ACTIVE]


def on_activations(name: str) -> Any:
    """The body of a case with its activations cast to the engine's type, and its result back."""

    def body(**tensors: Tensor) -> Any:
        active = list(tensors)[: ACTIVE[name.split("-")[0]]]
        cast = {n: g.cast(tensors[n], DType.ACT) for n in active}
        return g.cast(CASES[name].body(**tensors | cast), DType.F32)

    return body


@pytest.mark.parametrize("compute", TYPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_op_on_activations_rounds_its_result_and_little_else(name: str, compute: str) -> None:
    """Inputs that the type holds exactly; then what is left is a rounding or two."""
    case, dtype = CASES[name], TYPES[compute]
    exact = {
        key: a.astype(dtype).astype(np.float32) if a.dtype == np.float32 else a
        for key, a in case.inputs.items()
    }
    wanted = run_ops_trt(case.body, exact, case.dims)
    found = run_ops_trt(on_activations(name), exact, case.dims, compute=compute)
    check(found, wanted, tolerance=2.0 ** (-7 if compute == "bf16" else -10))


@pytest.mark.parametrize("compute", TYPES)
def test_a_norm_of_large_activations_does_not_overflow(compute: str) -> None:
    """Their squares are beyond FP16, and the sum of them needs more digits than BF16 has."""
    x = np.linspace(-6e4, 6e4, 512, dtype=np.float32).reshape(1, 512)
    weight = np.full(512, 0.5, np.float32)

    def body(x: Tensor, w: Tensor) -> Tensor:
        return g.cast(compounds.rms_norm(g.cast(x, DType.ACT), w, 1e-6), DType.F32)

    (found,) = run_ops_trt(body, {"x": x, "w": weight}, compute=compute)
    wanted = 0.5 * x / np.sqrt((x.astype(np.float64) ** 2).mean())
    np.testing.assert_allclose(found, wanted, rtol=2.0**-7)


# Root mean square of the error of a product over its own: of independent roundings of weights and
# activations to 4 significant bits (FP8) or to 1.5 with a scale per 16 (NVFP4).
@pytest.mark.parametrize(("form", "least", "most"), [("fp8", 0.01, 0.06), ("nvfp4", 0.06, 0.22)])
@pytest.mark.parametrize("compute", TYPES)
def test_quantized_products(form: str, least: float, most: float, compute: str) -> None:
    """Rows of very unlike size, a row of zeros, and an outlier that a common scale would drown."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=(2, 6, 128)).astype(np.float32)
    x *= np.float32([1e-3, 1, 30, 200, 1, 0])[:, None]
    x[0, 4, 7] = 40
    w1, w2 = (rng.normal(0, scale, (96, 128)).astype(np.float32) for scale in (0.02, 3))
    held = {"w1": w1, "w2": w2, "bias": rng.normal(size=96).astype(np.float32)}

    def body(x: Tensor) -> list[Tensor]:
        weights = [LinearWeight("w1", 96), LinearWeight("w2", 96), LinearWeight("w1", 96, "bias")]
        return [g.cast(y, DType.F32) for y in g.linear(g.cast(x, DType.ACT), weights)]

    dims = {"x": ("b", "s", 128)}
    *products, biased = run_ops_trt(body, {"x": x}, dims, held, quantized=form, compute=compute)
    for found, weight in zip(products, (w1, w2), strict=True):
        wanted = x @ weight.T
        assert (found[:, 5] == 0).all()
        squares = ((found - wanted)[:, :5] ** 2).mean(-1) / (wanted[:, :5] ** 2).mean(-1)
        assert np.sqrt(squares.max()) < most
        assert np.sqrt(squares.min()) > least
    np.testing.assert_array_equal(biased[0, 5], held["bias"].astype(TYPES[compute]))


@pytest.mark.parametrize("compute", TYPES)
def test_fp8_weights_of_one_input_give_the_bits_that_each_gives_alone(compute: str) -> None:
    """Their scales are unlike; a weight that another product reads too stands alone."""
    rng = np.random.default_rng(6)
    x = rng.normal(size=(2, 3, 64)).astype(np.float32)
    held = {
        name: rng.normal(0, scale, (size, 64)).astype(np.float32)
        for name, scale, size in (("p.a.w", 0.02, 32), ("p.b.w", 1.5, 16), ("p.c.w", 0.3, 48))
    }
    weights = [LinearWeight(name, len(weight)) for name, weight in held.items()]

    def body(x: Tensor, *groups: list[LinearWeight]) -> list[Tensor]:
        act = g.cast(x, DType.ACT)
        return [g.cast(y, DType.F32) for group in groups for y in g.linear(act, group)]

    run = partial(run_ops_trt, inputs={"x": x}, dims={"x": ("b", "s", 64)}, weights=held,
                  quantized="fp8", compute=compute)  # fmt: skip
    together = run(lambda x: body(x, weights))
    alone = run(lambda x: body(x, *([weight] for weight in weights)))
    twice = run(lambda x: body(x, weights, weights[:1]))
    for found, again, wanted in zip(together, twice, alone, strict=False):
        np.testing.assert_array_equal(found, wanted)
        np.testing.assert_array_equal(again, wanted)
