"""Walks a graph and adds TensorRT layers: names, types, ranks, constants, equal layers once.

TensorRT's two Python modules, `tensorrt` and `tensorrt_rtx`, have one network API; the module is a
parameter, so nothing here imports either.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_trt.errors import NoLowering
from dflash_trt.graph import Dim, DType, Node, Tensor
from dflash_trt.lower.trt_weights import COMPUTE_TYPES, TrtWeights
from dflash_trt.lower.walk import Walker

Array = npt.NDArray[Any]
TrtTensor = Any  # tensorrt.ITensor


@dataclass(frozen=True, eq=False)
class Literal:
    """A value known while lowering: it becomes a constant of the rank that its user needs."""

    array: Array
    name: str = ""


class TrtEmitter(Walker[Any]):
    """Adds layers to `network`; a value is a TensorRT tensor or a `Literal`.

    `sizes` are named dims that this engine fixes. Equal layers are added once.
    """

    backend = "TensorRT"

    def __init__(
        self, network: Any, trt: Any, weights: TrtWeights, compute: str,
        emitters: Mapping[str, Emitter], sizes: Mapping[str, int],
    ) -> None:  # fmt: skip
        super().__init__(emitters)
        self.network = network
        self.trt = trt
        self.weights = weights
        self.compute = compute
        types = trt.DataType
        floats = {"bf16": types.BF16, "fp16": types.HALF, "fp32": types.FLOAT}
        self.types = {
            DType.ACT: floats[compute], DType.F32: types.FLOAT, DType.I32: types.INT32,
            DType.I64: types.INT64, DType.BOOL: types.BOOL,
        }  # fmt: skip
        self.arrays = {
            self.types[DType.ACT]: COMPUTE_TYPES[compute], types.FLOAT: np.dtype(np.float32),
            types.INT32: np.dtype(np.int32), types.INT64: np.dtype(np.int64),
            types.BOOL: np.dtype(np.bool_),
        }  # fmt: skip
        self.unused: Collection[Node] = ()  # nodes to leave out
        self.halves: Mapping[Node, Node] = {}  # the first by the second of two that are one layer
        self.repeated: frozenset[str] = frozenset()  # weights of more than one product
        self.lengths: dict[str, TrtTensor] = {}  # of named dims, the first that is found
        self._sizes = sizes
        self._memo: dict[object, list[TrtTensor]] = {}

    def node(self, node: Node) -> None:
        """Emit one node, unless nothing needs it or another does it too."""
        if node not in self.unused and node not in self.halves.values():
            super().node(node)

    def dims(self, shape: Sequence[Dim]) -> tuple[Dim, ...]:
        """A shape with the dims that this engine fixes as numbers."""
        return tuple(self._sizes.get(d, d) if isinstance(d, str) else d for d in shape)

    def value(self, tensor: Tensor, node: Node, rank: int | None = None) -> TrtTensor:
        """A tensor's TensorRT tensor, with leading axes of 1 up to `rank`."""
        return self.placed(self.names[tensor], self.types[tensor.dtype], node, rank)

    def together(self, node: Node) -> list[TrtTensor]:
        """All inputs of an elementwise node at one rank: TensorRT broadcasts no other way."""
        rank = max(tensor.rank for tensor in node.inputs)
        return [self.value(tensor, node, rank) for tensor in node.inputs]

    def placed(
        self, value: TrtTensor | Literal, to: Any, node: Node, rank: int | None = None
    ) -> TrtTensor:
        """A value with leading axes of 1 up to `rank`; a literal as a constant of type `to`."""
        if isinstance(value, Literal):
            array = value.array
            if rank is not None and rank > array.ndim:
                array = array.reshape((1,) * (rank - array.ndim) + array.shape)
            return self.const(array, to, node, value.name)
        missing = 0 if rank is None else rank - len(value.shape)
        if missing <= 0:
            return value
        axes = self.const(np.arange(missing), self.trt.DataType.INT32, node)
        make = lambda: self.network.add_unsqueeze(value, axes)  # noqa: E731
        return self.layer(node, "unsqueeze", [value], make, missing)[0]

    def const(self, value: object, to: Any, node: Node, name: str = "") -> TrtTensor:
        """A constant in a TensorRT type; equal ones are added once."""
        array = np.asarray(value).astype(self.arrays[to], copy=False)
        digest = hashlib.blake2b(np.ascontiguousarray(array).tobytes()).digest()
        return self.stored(array, to, array.shape, name or f"{node.scope}/constant", digest)

    def stored(
        self, array: Array, to: Any, shape: Sequence[int], name: str, key: object = None
    ) -> TrtTensor:
        """The constant of a weight by address; `key` (default: its name) tells equal ones."""
        memo = ("constant", str(to), tuple(shape), name if key is None else key)
        if memo not in self._memo:
            kept = self.weights.keep(array)
            count = int(np.prod(shape, dtype=np.int64))
            held = self.trt.Weights(to, kept.ctypes.data, count)
            layer = self.network.add_constant(tuple(shape), held)
            self._memo[memo] = self._named(layer, name, "constant")
        return self._memo[memo][0]

    def layer(
        self, node: Node, kind: str, inputs: Sequence[TrtTensor], make: Callable[[], Any],
        *key: object, part: str = "",
    ) -> list[TrtTensor]:  # fmt: skip
        """The outputs of the layer that `make` adds, or of an equal one added before.

        Two layers are equal if kind, inputs and `key` (all else that `make` depends on) are.
        `part` names a piece of the node, such as one of its weights.
        """
        memo = (kind, tuple(tensor.name for tensor in inputs), key)
        if memo not in self._memo:
            scope = f"{node.scope}/{part}" if part else node.scope
            self._memo[memo] = self._named(make(), scope, kind)
        return self._memo[memo]

    def cast(self, value: TrtTensor, to: Any, node: Node) -> TrtTensor:
        """A value in another TensorRT type."""
        if value.dtype == to:
            return value
        make = lambda: self.network.add_cast(value, to)  # noqa: E731
        return self.layer(node, "cast", [value], make, str(to))[0]

    def _named(self, layer: Any, scope: str, kind: str) -> list[TrtTensor]:
        if layer is None:
            raise NoLowering(f"TensorRT refused a {kind} layer at {scope}")
        layer.name = self.fresh(f"{scope}/{kind}")
        outputs = [layer.get_output(index) for index in range(layer.num_outputs)]
        try:
            tuple(outputs[0].shape)  # TensorRT checks a layer when it is asked for its shape
        except (RuntimeError, ValueError) as error:
            raise NoLowering(f"TensorRT refused a {kind} layer at {scope}") from error
        for index, output in enumerate(outputs):
            output.name = f"{layer.name}:{index}" if index else layer.name
        return outputs


Emitter = Callable[[TrtEmitter, Node], list[Any]]
