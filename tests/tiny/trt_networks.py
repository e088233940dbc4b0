"""Small TensorRT networks made by hand, for tests of the evaluator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorrt_rtx as trt

from tiny.trt_evaluator import NetworkEvaluator
from tiny.trt_types import TYPES, Array

BY_NUMPY = {np.dtype(TYPES[name]): getattr(trt, name.lower(), None) for name in TYPES}
BY_NUMPY |= {
    np.dtype(TYPES["FLOAT"]): trt.float32,
    np.dtype(TYPES["HALF"]): trt.float16,
    np.dtype(TYPES["BF16"]): trt.bfloat16,
}


class HandMade:
    """A strongly typed network; tensors are added one by one, outputs are named out0, out1, .."""

    def __init__(self) -> None:
        self.builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
        flags = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
        self.network = self.builder.create_network(flags)
        self._kept: list[Array] = []

    def input(self, name: str, array: Array, shape: Sequence[int] | None = None) -> Any:
        """A network input of an array's type; its shape too, if `shape` is not given."""
        dims = tuple(array.shape if shape is None else shape)
        return self.network.add_input(name, BY_NUMPY[array.dtype], dims)

    def constant(self, array: Array) -> Any:
        """A constant; FP4 is packed two to a byte."""
        data = np.ascontiguousarray(array)
        if array.dtype == TYPES["FP4"]:
            codes = data.view(np.uint8).reshape(-1, 2)
            data = codes[:, 0] | codes[:, 1] << 4
        self._kept.append(data)
        weights = trt.Weights(BY_NUMPY[array.dtype], data.ctypes.data, array.size)
        return self.network.add_constant(array.shape, weights).get_output(0)

    def output(self, *tensors: Any) -> None:
        """Mark the network's outputs."""
        for tensor in tensors:
            tensor.name = f"out{self.network.num_outputs}"
            self.network.mark_output(tensor)

    def run(self, feeds: Mapping[str, Array], **options: Any) -> list[Array]:
        """The outputs, in order."""
        made = NetworkEvaluator(self.network, trt, **options).run(feeds)
        return [made[f"out{index}"] for index in range(self.network.num_outputs)]
