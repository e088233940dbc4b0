"""The step graph of a tiny pair with inner tensors as further outputs.

It is the graph that engines are built from; only outputs are added, found by the weights beside
them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from dflash_trt import contract as c
from dflash_trt.checkpoint.pair import read_pair
from dflash_trt.graph import Graph, Node, Tensor
from dflash_trt.lower.onnx import lower_to_onnx
from dflash_trt.lower.onnx_weights import OnnxWeights
from dflash_trt.nets.step import trace_step
from dflash_trt.quantize.policy import bits_of
from tiny.models import TinyPair

F32 = npt.NDArray[np.float32]
SAMPLING = {
    c.TEMPERATURE: (0, np.float32), c.TOP_K: (0, np.int32), c.TOP_P: (1, np.float32),
    c.MIN_P: (0, np.float32), c.SEED: (0, np.int64),
}  # fmt: skip


class Probe:
    """Runs steps without the runtime: caches go in and come out as plain arrays."""

    def __init__(
        self, pair: TinyPair, folder: Path, *, block: int | None = None, capacity: int = 128,
        slots: int = 1, precision: str = "fp32", decompose: Collection[str] = (),
    ) -> None:  # fmt: skip
        read = read_pair(pair.target_dir, pair.drafter_dir)
        self.pair = read.config
        self.block = block or pair.block
        graph = trace_step(read.config, self.block, capacity, read.draft_ids)
        for name, tensor in taps(graph, len(read.config.drafter.target_layer_ids)).items():
            graph.add_output(name, tensor)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "weights.bin").open("wb") as data:
            weights = OnnxWeights(read.weights(), data, "weights.bin", bits_of(precision))
            model = lower_to_onnx(graph, weights, decompose)
        (folder / "probe.onnx").write_bytes(model.SerializeToString())
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = ort.InferenceSession(str(folder / "probe.onnx"), options)
        self._outputs = [output.name for output in self._session.get_outputs()]
        self.caches = {
            spec.name: np.zeros((slots, spec.num_heads, capacity, spec.head_dim), np.float32)
            for spec in c.all_caches(read.config)
        }

    def step(
        self, tokens: Sequence[Sequence[int]], length: Sequence[int], known: Sequence[int],
        count: Sequence[int] | None = None, drafts: int | None = None, **sampling: Any,
    ) -> dict[str, Any]:  # fmt: skip
        """One step of all slots; every output by name. Rows are padded to the longest."""
        feeds = self.feeds(tokens, length, known, count, drafts, **sampling) | self.caches
        made = dict(zip(self._outputs, self._session.run(None, feeds), strict=True))
        self.caches = {name: made.pop(c.UPDATED + name) for name in self.caches}
        return made

    def feeds(
        self, tokens: Sequence[Sequence[int]], length: Sequence[int], known: Sequence[int],
        count: Sequence[int] | None = None, drafts: int | None = None, **sampling: Any,
    ) -> dict[str, Any]:  # fmt: skip
        """The inputs of a step but for the caches."""
        width = max(len(row) for row in tokens)
        padded = np.zeros((len(tokens), width), np.int32)
        for index, row in enumerate(tokens):
            padded[index, : len(row)] = row
        counts = [len(row) for row in tokens] if count is None else count
        num_drafts = self.block - 1 if drafts is None else drafts
        offsets = np.arange(self.block, dtype=np.int32)
        return {
            c.TOKENS: padded,
            c.LENGTH: np.array(length, np.int32),
            c.COUNT: np.array(counts, np.int32),
            c.KNOWN: np.array(known, np.int32),
            c.BLOCK_OFFSETS: offsets if num_drafts else offsets[:0],
            c.DRAFT_OFFSETS: offsets[1 : 1 + num_drafts],
            **special_lines(len(tokens), min(width, self.block), **sampling),
        }

    def read_text(self, tokens: Sequence[int], chunks: Sequence[int]) -> list[dict[str, Any]]:
        """Read one text in pieces of these sizes; the outputs of every step."""
        made, start = [], 0
        for size in chunks:
            piece = list(tokens[start : start + size])
            made.append(self.step([piece], [start], known=[1]))
            start += size
        return made


def special_lines(slots: int, rows: int, **sampling: Any) -> dict[str, Any]:
    """The inputs of the slots that sample: settings per slot, by name. None of them is adjusted."""
    heat = sampling.get(c.TEMPERATURE, [0.0] * slots)
    listed = [slot for slot in range(slots) if heat[slot] > 0]
    source = [slots + listed.index(slot) if slot in listed else slot for slot in range(slots)]
    off, empty = np.zeros(len(listed), np.float32), np.zeros((len(listed), rows, 0), np.float32)
    return {
        c.SPECIAL_SLOTS: np.array(listed, np.int32),
        c.CHOICE_SOURCE: np.array(source, np.int32),
        **{
            name: np.array([sampling.get(name, [default] * slots)[i] for i in listed], dtype)
            for name, (default, dtype) in SAMPLING.items()
        },
        c.REPETITION: off + 1,
        c.PRESENCE: off,
        c.FREQUENCY: off,
        c.ADJUST_IDS: empty.astype(np.int32),
        c.ADJUST_SEEN: empty,
        c.ADJUST_COUNT: empty,
        c.ADJUST_BIAS: empty,
    }


def taps(graph: Graph, num_features: int) -> dict[str, Tensor]:
    """Inner tensors of a step graph by what they are."""
    head = _product(graph, "target.lm_head.weight")
    fuse = _product(graph, "drafter.fc.weight")
    final = _normed(graph, "drafter.norm.weight")
    choices = [node for node in graph.nodes if node.op == "argmax"]
    selectors = [node for node in graph.nodes if node.op == "topk"]
    wanted = 2 + len(selectors)
    assert len(choices) == wanted, "one greedy choice each of target, drafter, and its selector"
    joined = next(node for node in graph.nodes if fuse.inputs[0] in node.outputs)
    assert len(joined.inputs) == num_features
    return {
        "target_logits": head.outputs[0],
        "features": fuse.inputs[0],
        "context": _normed(graph, "drafter.hidden_norm.weight").outputs[0],
        "draft_hidden": final.outputs[0],
        "draft_logits": (selectors or choices[1:])[0].inputs[0],
    }


def _product(graph: Graph, weight: str) -> Node:
    products = (node for node in graph.nodes if node.op == "linear")
    return next(n for n in products if n.attrs["weights"][0].name == weight)


def _normed(graph: Graph, weight: str) -> Node:
    named = {n.outputs[0]: n.attrs["name"] for n in graph.nodes if n.op == "param"}
    norms = (node for node in graph.nodes if node.op == "rms_norm")
    return next(node for node in norms if named[node.inputs[1]] == weight)
