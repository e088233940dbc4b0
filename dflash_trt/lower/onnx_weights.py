"""External data of an ONNX model: tensors are streamed to one file, one at a time.

The model file itself stays small (no 2 GB protobuf limit), ONNX Runtime maps the data file, and a
weight that two nodes share (a tied head) is on disk once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

from dflash_trt.graph import Dim
from dflash_trt.quantize.blocks import BLOCK_SIZE, Blocks, quantize, stack

F32 = npt.NDArray[np.float32]

ALIGNMENT = 4096  # ONNX Runtime maps from page boundaries
INLINE_BYTES = 1024  # smaller constants live in the model file
CHUNK_BYTES = 16 << 20  # a float32 weight is converted and written in pieces of this size


class WeightReader(Protocol):
    """What the lowering needs of a pair's weights, by canonical name."""

    def canonical(self, name: str) -> str:
        """The name that holds the bytes: resolves tied and shared weights."""

    def read(self, name: str) -> F32:
        """The whole tensor as float32."""

    def read_rows(self, name: str, start: int, stop: int) -> F32:
        """Some rows of its first axis as float32."""

    def q4_blocks(self, name: str) -> StoredBlocks | None:
        """The 4-bit blocks that the checkpoint itself stores, if it does."""


class StoredBlocks(Protocol):
    """4-bit blocks as a checkpoint stores them, in the layout of `Blocks`."""

    @property
    def codes(self) -> npt.NDArray[np.uint8]:
        """[out, blocks, 16]."""

    @property
    def scales(self) -> F32:
        """[out, blocks]."""

    @property
    def offsets(self) -> F32 | None:
        """[out, blocks], None where zero everywhere."""


@dataclass(frozen=True)
class PackedWeight:
    """Initializer names of a block-quantized weight."""

    codes: str
    scales: str
    offsets: str | None
    bits: int
    block_size: int = BLOCK_SIZE


class OnnxWeights:
    """Streams weights into `data` and keeps the initializers that point into it.

    `bits_of(name)` gives 4 or 8 for a weight to store in blocks, None for float32.
    """

    def __init__(
        self,
        reader: WeightReader,
        data: BinaryIO,
        location: str,
        bits_of: Callable[[str], int | None],
    ) -> None:
        self.reader = reader
        self.location = location
        self.initializers: list[TensorProto] = []
        self._data = data
        self._bits_of = bits_of
        self._names: dict[object, str] = {}
        self._regions: dict[object, tuple[int, int]] = {}

    def constant(self, value: npt.NDArray[np.generic]) -> str:
        """The initializer of a literal; equal literals are stored once."""
        key = (value.dtype.str, value.shape, value.tobytes())
        if key not in self._names:
            name = f"constant.{len(self._names)}"
            if value.nbytes <= INLINE_BYTES:
                self.initializers.append(onnx.numpy_helper.from_array(value, name))
            else:
                self._point_at(name, value.dtype, value.shape, self._write([value]))
            self._names[key] = name
        return self._names[key]

    def dense(self, name: str, shape: Sequence[Dim]) -> str:
        """The initializer of a float32 parameter used as it is (a norm, a bias, an embedding)."""
        sizes = [int(dim) for dim in shape]
        return self._float32(self.reader.canonical(name), [name], [sizes[0]], sizes)

    def stacked(self, names: Sequence[str], sizes: Sequence[int], in_features: int) -> str:
        """The initializer of float32 weights [out, in], outputs stacked in order.

        Not the one of `dense`, even for the same bytes: ONNX Runtime packs a product's weight and
        then lets go of the mapped original, which it could not do if an embedding used it too.
        """
        label = "+".join(self.reader.canonical(name) for name in names)
        return self._float32(f"{label}/product", names, sizes, [sum(sizes), in_features])

    def packed(self, names: Sequence[str], shape: tuple[int, int]) -> PackedWeight | None:
        """The block-quantized form of stacked weights, or None where they stay float32."""
        bits = self._bits_of(names[0])
        if bits is None or shape[1] % BLOCK_SIZE:
            return None
        key = "+".join(self.reader.canonical(name) for name in names)
        stem = f"{key}/{bits}bit"
        if (stem, "has_offsets") not in self._names:
            blocks = stack([self._blocks(name, bits) for name in names])
            parts: list[tuple[str, npt.NDArray[Any] | None]] = [
                ("codes", blocks.codes), ("scales", blocks.scales), ("offsets", blocks.offsets)
            ]  # fmt: skip
            for part, array in parts:
                if array is not None:
                    region = self._write([array])
                    self._point_at(f"{stem}/{part}", array.dtype, array.shape, region)
            self._names[stem, "has_offsets"] = "" if blocks.offsets is None else f"{stem}/offsets"
        offsets = self._names[stem, "has_offsets"] or None
        return PackedWeight(f"{stem}/codes", f"{stem}/scales", offsets, bits)

    def _blocks(self, name: str, bits: int) -> Blocks:
        stored = self.reader.q4_blocks(name) if bits == 4 else None
        if stored is not None:
            return Blocks(4, stored.codes, stored.scales, stored.offsets)
        return quantize(self.reader.read(name), bits)

    def _float32(
        self, label: str, names: Sequence[str], sizes: Sequence[int], shape: Sequence[int]
    ) -> str:
        if label not in self._names:
            key = tuple(self.reader.canonical(name) for name in names)
            if key not in self._regions:
                self._regions[key] = self._write(self._pieces(names, sizes, shape))
            self._point_at(label, np.dtype(np.float32), shape, self._regions[key])
            self._names[label] = label
        return self._names[label]

    def _pieces(
        self, names: Sequence[str], sizes: Sequence[int], shape: Sequence[int]
    ) -> Iterator[F32]:
        rows = max(1, CHUNK_BYTES // (4 * int(np.prod(shape[1:], dtype=np.int64))))
        for name, size in zip(names, sizes, strict=True):
            for start in range(0, size, rows):
                yield self.reader.read_rows(name, start, min(start + rows, size))

    def _write(self, pieces: Iterable[npt.NDArray[np.generic]]) -> tuple[int, int]:
        start = -(-self._data.tell() // ALIGNMENT) * ALIGNMENT
        self._data.write(b"\0" * (start - self._data.tell()))
        length = 0
        for piece in pieces:
            length += self._data.write(np.ascontiguousarray(piece).data.cast("B"))
        return start, length

    def _point_at(
        self,
        name: str,
        dtype: np.dtype[Any],
        shape: Sequence[int],
        region: tuple[int, int],
    ) -> None:
        tensor = TensorProto(name=name, data_type=helper.np_dtype_to_tensor_dtype(dtype))
        tensor.dims.extend(shape)
        tensor.data_location = TensorProto.EXTERNAL
        entries = (("location", self.location), ("offset", region[0]), ("length", region[1]))
        for key, value in entries:
            tensor.external_data.add(key=key, value=str(value))
        self.initializers.append(tensor)
