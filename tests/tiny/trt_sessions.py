"""The real GPU session over the network definition, which the evaluator runs in the engine's place.

CUDA is a stand-in too. Of the way from a request to its tokens, only TensorRT's compilation of the
network and the GPU itself are missing.
"""

from __future__ import annotations

from typing import Any

from dflash_trt import contract as c
from dflash_trt.build.tensorrt import profile_shapes
from dflash_trt.checkpoint.pair import read_pair
from dflash_trt.flavor import PRECISION_TABLE
from dflash_trt.graph import Graph
from dflash_trt.lower.trt import step_fixed
from dflash_trt.lower.trt_weights import TrtWeights
from dflash_trt.nets.step import trace_step
from dflash_trt.quantize.policy import format_of
from dflash_trt.runtime.cuda import host_view
from dflash_trt.runtime.trt import TrtSession
from dflash_trt.runtime.trt_engine import TensorInfo
from tiny.builds import TinyEngine
from tiny.fake_gpu import Arrays, FakeCuda, FakeEngine
from tiny.trt_evaluator import NetworkEvaluator
from tiny.trt_ops import evaluator_of
from tiny.trt_types import Array, numpy_type

LARGE = 0x7B  # bytes of about 1e36 in BF16 and FP32, of 6e4 in FP16


class DirtyCuda(FakeCuda):
    """What is cleared is full of large numbers: nothing may depend on what no step wrote.

    Not of NaN: a kernel may multiply what is masked with zero, which is why sessions clear.
    """

    def clear(self, address: int, num_bytes: int) -> None:
        self.check_range(address, num_bytes)
        self.put(lambda: host_view(address, num_bytes).fill(LARGE))


class EvaluatedSession(TrtSession):
    """A session on the network of a tiny pair, in any precision; fp32 is for the proof alone."""

    def __init__(self, tiny: TinyEngine, precision: str = "fp32", **options: Any) -> None:
        self.network = step_network(tiny, precision, **options)
        self.gpu = DirtyCuda()
        tensors = engine_tensors(tiny, self.network)
        engine = FakeEngine(self.gpu, tensors, self._run)
        super().__init__(engine, self.gpu, tiny.facts, tiny.limits())

    def slot_caches(self, slot: int) -> dict[str, Array]:
        """What the caches of a slot hold, [heads, rows, head_dim] each."""
        self.gpu.synchronize()
        held = {}
        for place, memory in zip(self._shapes.caches, self._caches, strict=True):
            whole = host_view(memory.address + place.offset(slot), place.slot_bytes)
            held[place.spec.name] = whole.view(place.dtype).reshape(place.slot_shape)
        return held

    def _run(self, feeds: Arrays) -> Arrays:
        return self.network.run(feeds)


_NETWORKS: dict[tuple[str, str], NetworkEvaluator] = {}


def step_network(
    tiny: TinyEngine, precision: str = "fp32", graph: Graph | None = None, **options: Any
) -> NetworkEvaluator:
    """The evaluator of the network that an engine of the pair is built from."""
    key = (str(tiny.directory.path), precision)
    if graph is not None or options:
        return _made(tiny, precision, graph, **options)
    if key not in _NETWORKS:  # it holds no state, so sessions may share it
        _NETWORKS[key] = _made(tiny, precision, None)
    return _NETWORKS[key]


def _made(
    tiny: TinyEngine, precision: str, graph: Graph | None, **options: Any
) -> NetworkEvaluator:
    choices = tiny.directory.config.choices
    read = read_pair(tiny.pair.target_dir, tiny.pair.drafter_dir)
    rows = c.cache_rows(choices.max_seq_len, choices.block)
    compute = PRECISION_TABLE[precision].compute
    formats = (lambda name: None) if compute == "fp32" else format_of(precision)
    return evaluator_of(
        graph or trace_step(read.config, choices.block, rows, read.draft_ids),
        TrtWeights(read.weights(), formats),
        compute,
        fixed=step_fixed(choices.block, rows),
        may_be_empty=c.SPECIAL,
        **options,
    )


def engine_tensors(tiny: TinyEngine, network: NetworkEvaluator) -> list[TensorInfo]:
    """What an engine would say of its inputs and outputs, with the profiles that are built."""
    choices = tiny.directory.config.choices
    profiles = c.profiles(choices, tiny.facts.target.vocab_size)
    shapes = [profile_shapes(network.definition, profile) for profile in profiles]

    def info(tensor: Any) -> TensorInfo:
        most = tuple(s[tensor.name][2] for s in shapes) if tensor.is_network_input else ()
        dtype = numpy_type(tensor.dtype)
        return TensorInfo(tensor.name, tensor.is_network_input, dtype, tuple(tensor.shape), most)

    return [info(tensor) for tensor in (*network.inputs.values(), *network.outputs.values())]
