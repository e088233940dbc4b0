"""Runs a TensorRT network definition in NumPy, layer by layer, from TensorRT's documentation.

The TensorRT lowering is proved with it where there is no GPU. It reads what the network holds and
knows nothing of how it was made. It refuses what TensorRT leaves undefined (indices out of range,
rows past a cache's end, a query without keys, integer overflow) and every layer that it does not
know. Tensors may be empty where an input is along a dim that may be. In-place cache updates
write to the arrays that were fed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tiny import trt_layers, trt_shapes, trt_transformer
from tiny.trt_layers import Inputs
from tiny.trt_types import Array, EvaluationError, constant, narrow, numpy_type, require

Evaluate = Callable[[Any, Inputs], list[Array]]

LAYERS: dict[str, tuple[str, Evaluate]] = {
    "ACTIVATION": ("IActivationLayer", trt_layers.activation),
    "ASSERTION": ("IAssertionLayer", trt_layers.assertion),
    "ATTENTION_INPUT": ("IAttentionInputLayer", trt_transformer.attention),
    "ATTENTION_OUTPUT": ("IAttentionOutputLayer", trt_transformer.attention_output),
    "CAST": ("ICastLayer", trt_layers.cast),
    "CONCATENATION": ("IConcatenationLayer", trt_shapes.concatenation),
    "CONSTANT": ("IConstantLayer", lambda layer, inputs: [constant(layer)]),
    "CUMULATIVE": ("ICumulativeLayer", trt_layers.cumulative),
    "DEQUANTIZE": ("IDequantizeLayer", trt_transformer.dequantize),
    "DYNAMIC_QUANTIZE": ("IDynamicQuantizeLayer", trt_transformer.dynamic_quantize),
    "ELEMENTWISE": ("IElementWiseLayer", trt_layers.elementwise),
    "FILL": ("IFillLayer", trt_shapes.fill),
    "GATHER": ("IGatherLayer", trt_shapes.gather),
    "IDENTITY": ("IIdentityLayer", trt_layers.identity),
    "KV_CACHE_UPDATE": ("IKVCacheUpdateLayer", trt_transformer.kv_cache_update),
    "MATRIX_MULTIPLY": ("IMatrixMultiplyLayer", trt_layers.matrix_multiply),
    "QUANTIZE": ("IQuantizeLayer", trt_transformer.quantize),
    "REDUCE": ("IReduceLayer", trt_layers.reduce),
    "ROTARY_EMBEDDING": ("IRotaryEmbeddingLayer", trt_transformer.rotary_embedding),
    "SCATTER": ("IScatterLayer", trt_shapes.scatter),
    "SELECT": ("ISelectLayer", trt_layers.select),
    "SHAPE": ("IShapeLayer", trt_shapes.shape),
    "SHUFFLE": ("IShuffleLayer", trt_shapes.shuffle),
    "SLICE": ("ISliceLayer", trt_shapes.slice_),
    "SOFTMAX": ("ISoftMaxLayer", trt_layers.softmax),
    "SQUEEZE": ("ISqueezeLayer", trt_shapes.squeeze),
    "TOPK": ("ITopKLayer", partial(trt_layers.topk, ties="higher")),
    "UNARY": ("IUnaryLayer", trt_layers.unary),
    "UNSQUEEZE": ("IUnsqueezeLayer", trt_shapes.unsqueeze),
}


class _Once:
    """A layer whose attributes are asked for once: every question to the binding is slow."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._layer, name)
        if type(value).__module__ != "builtins" and hasattr(value, "name"):
            value = _Once(value)
        self.__dict__[name] = value
        return value


@dataclass(frozen=True, eq=False)
class _Step:
    """One layer, with its inputs and outputs, and what TensorRT says of the outputs."""

    kind: str
    name: str
    layer: Any
    evaluate: Evaluate
    inputs: list[Any]
    outputs: list[Any]
    types: list[np.dtype[Any]]
    shapes: list[tuple[int, ...]]


def kind_of(layer: Any, trt: Any) -> str:
    """A layer's type by name. Some classes have a `type` of their own, which hides the layer's."""
    return str(trt.ILayer.type.__get__(layer).name)


def layers_of(network: Any, trt: Any) -> list[Any]:
    """The layers of a network, each of its own class if it is one that can be evaluated."""
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    for layer in layers:
        if (kind := kind_of(layer, trt)) in LAYERS:
            layer.__class__ = getattr(trt, LAYERS[kind][0])
    return layers


class NetworkEvaluator:
    """A network definition that can be run on arrays; constants are folded once."""

    def __init__(
        self, network: Any, trt: Any, *, ties: str = "higher", may_be_empty: str = ""
    ) -> None:
        """Take a network of `trt` (the flavour's module); `ties`: see `trt_layers.topk`.

        `may_be_empty` names the dim of inputs whose profiles begin at 0.
        """
        self.definition = network
        self._may_be_empty = may_be_empty
        self._trt = trt
        self._evaluators = {kind: evaluate for kind, (_, evaluate) in LAYERS.items()}
        self._evaluators["TOPK"] = partial(trt_layers.topk, ties=ties)
        self.inputs = {
            tensor.name: tensor
            for tensor in (network.get_input(i) for i in range(network.num_inputs))
        }
        self.outputs = {
            tensor.name: tensor
            for tensor in (network.get_output(i) for i in range(network.num_outputs))
        }
        layers = layers_of(network, trt)
        self._steps = _in_order([self._step(layer) for layer in layers], self.inputs.values())
        _check_caches(self._steps)
        self._constants: dict[Any, Array] = {}
        self._live = []
        with np.errstate(all="ignore"):
            for step in self._steps:
                if all(tensor is None or tensor in self._constants for tensor in step.inputs):
                    self._run(step, self._constants)
                else:
                    self._live.append(step)

    def run(self, feeds: Mapping[str, Array], taps: Collection[str] = ()) -> dict[str, Array]:
        """Every output by name, and the inner tensors named in `taps`."""
        require(set(feeds) == set(self.inputs), f"inputs {sorted(set(feeds) ^ set(self.inputs))}")
        values = dict(self._constants)
        dims: dict[str, int] = {}
        empty = any(
            not length and tensor.get_dimension_name(axis) == self._may_be_empty
            for name, tensor in self.inputs.items()
            for axis, length in enumerate(feeds[name].shape[: len(tensor.shape)])
        )
        for name, tensor in self.inputs.items():
            array = feeds[name]
            require(array.dtype == numpy_type(tensor.dtype), f"{name} is fed {array.dtype}")
            _check_shape(name, tuple(tensor.shape), array, empty)
            for axis, length in enumerate(array.shape):
                dim = tensor.get_dimension_name(axis)
                known = dims.setdefault(dim, length) if dim else length
                require(known == length, f"{name}: {dim} is {length}, elsewhere {known}")
            values[tensor] = array
        with np.errstate(all="ignore"):
            for step in self._live:
                self._run(step, values, empty)
        wanted = {name: values[tensor] for name, tensor in self.outputs.items()}
        named = {tensor.name: array for tensor, array in values.items()} if taps else {}
        return wanted | {name: named[name] for name in taps}

    def _step(self, layer: Any) -> _Step:
        kind = kind_of(layer, self._trt)
        require(kind in self._evaluators, f"layer {layer.name}: type {kind} is not evaluated")
        evaluate = self._evaluators[kind]
        outputs = [layer.get_output(i) for i in range(layer.num_outputs)]
        return _Step(
            kind=kind,
            name=layer.name,
            layer=_Once(layer),
            evaluate=evaluate,
            inputs=[layer.get_input(i) for i in range(layer.num_inputs)],
            outputs=outputs,
            types=[numpy_type(tensor.dtype) for tensor in outputs],
            shapes=[_shape(layer, tensor) for tensor in outputs],
        )

    def _run(self, step: _Step, values: dict[Any, Array], empty: bool = False) -> None:
        inputs = [None if tensor is None else values[tensor] for tensor in step.inputs]
        try:
            made = step.evaluate(step.layer, inputs)
            require(len(made) == len(step.outputs), f"{len(made)} results")
            for index, array in enumerate(made):
                values[step.outputs[index]] = narrow(array, step.types[index])
                _check_shape(step.name, step.shapes[index], array, empty)
        except Exception as error:
            error.add_note(f"in {step.kind} {step.name!r}, inputs {[_about(x) for x in inputs]}")
            raise


def _about(x: Array | None) -> str:
    return "none" if x is None else f"{x.dtype}{list(x.shape)}"


def _shape(layer: Any, tensor: Any) -> tuple[int, ...]:
    try:
        return tuple(tensor.shape)
    except RuntimeError as error:
        raise EvaluationError(f"layer {layer.name}: TensorRT refuses it") from error


def _check_shape(name: str, declared: tuple[int, ...], array: Array, empty: bool) -> None:
    fits = len(declared) == array.ndim and all(map(_is_of, array.shape, declared))
    if not fits:
        raise EvaluationError(f"{name} is {array.shape}, TensorRT says {declared}")
    if not (array.size or empty):
        raise EvaluationError(f"{name} is empty: {array.shape}")


def _is_of(length: int, declared: int) -> bool:
    return declared in (-1, length)


def _in_order(steps: list[_Step], inputs: Collection[Any]) -> list[_Step]:
    """The layers, each after those it reads; a network holds them in the order of their making."""
    done = set(inputs)
    order: list[_Step] = []
    waiting = steps
    while waiting:
        early: list[_Step] = []
        for step in waiting:
            if all(tensor is None or tensor in done for tensor in step.inputs):
                order.append(step)
                done.update(step.outputs)
            else:
                early.append(step)
        require(len(early) < len(waiting), f"layer {waiting[0].name} reads what no layer makes")
        waiting = early
    return order


def _check_caches(steps: list[_Step]) -> None:
    """A cache is a network input, updated once, its update an output; nothing else reads it."""
    updates = [step for step in steps if step.kind == "KV_CACHE_UPDATE"]
    caches = [step.inputs[0] for step in updates]
    require(len(set(caches)) == len(caches), "a cache is updated twice")
    for step in updates:
        is_bound = step.inputs[0].is_network_input and step.outputs[0].is_network_output
        require(is_bound, f"{step.name}: a cache and its update must be an input and an output")
        readers = [s.name for s in steps if step.inputs[0] in s.inputs and s is not step]
        require(not readers, f"{readers} read a cache that {step.name} updates in place")
