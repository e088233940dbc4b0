"""Builds TensorRT engines of real geometries with random weights: time, memory, size.

The weights are written to a file and mapped, as a checkpoint's are, each at a place of its own:
equal constants would be stored once. NVFP4 and FP8 codes are random bytes; nothing is quantized.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import script
from machine import machine

from dflash_trt import contract
from dflash_trt.build.tensorrt import build_engine
from dflash_trt.checkpoint import TensorInfo
from dflash_trt.config import (
    AttentionConfig,
    BuildChoices,
    DrafterConfig,
    LayerMask,
    PairConfig,
    RopeConfig,
    TargetConfig,
)
from dflash_trt.flavor import PRECISION_TABLE, device_of, load_flavor
from dflash_trt.lower.trt import lower_to_trt, step_fixed
from dflash_trt.lower.trt_weights import Stack, TrtWeights
from dflash_trt.nets.step import trace_step
from dflash_trt.quantize.floats import FP4_BLOCK, Fp8Weight, Nvfp4Weight
from dflash_trt.quantize.policy import format_of

Array = npt.NDArray[Any]
GB = 1e9
PIECE = 64 << 20
# What is kept of a random byte: no value is infinite or NaN, and all have a modest exponent.
FLOAT_MASKS = {"bfloat16": (0xBFFF, np.uint16), "float16": (0xBBFF, np.uint16),
               "float32": (0xBFFFFFFF, np.uint32)}  # fmt: skip
BYTE_MASK = 0xB7  # E4M3


def qwen3_8b(layers: int, draft_layers: int) -> PairConfig:
    """Qwen3-8B and its public DFlash drafter, as their configs say, with so many layers."""
    attention = AttentionConfig(
        num_heads=32, num_kv_heads=8, head_dim=128, qk_norm=True, qkv_bias=False, o_bias=False,
        rope=RopeConfig(1e6),
    )  # fmt: skip
    common: dict[str, Any] = {
        "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 12_288,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 40_960, "attention": attention,
    }  # fmt: skip
    ids = np.linspace(min(1, layers - 1), max(0, layers - 3), 5).astype(int)
    return PairConfig(
        TargetConfig(
            **common, family="qwen3", num_layers=layers, tie_word_embeddings=False,
            mlp_bias=False, masks=(LayerMask(True),) * layers, eos_token_ids=(151_645,),
            bos_token_id=None,
        ),
        DrafterConfig(
            **common, num_layers=draft_layers, masks=(LayerMask(False),) * draft_layers,
            block_size=16, mask_token_id=151_669,
            target_layer_ids=tuple(int(i) for i in ids), num_target_layers=layers,
            target_hidden_size=4096, own_embedding=False, own_lm_head=False,
            input_embedding_scale=1.0, output_multiplier=1.0, final_logit_softcapping=None,
        ),
    )  # fmt: skip


class RandomWeights(TrtWeights):
    """Weights of any name and shape, from a file that grows by what is asked for."""

    def __init__(self, file: Path, format_of: Any) -> None:
        super().__init__(self, format_of)  # type: ignore[arg-type]  # `canonical` and `info` are used
        self._file = file
        self._generator = np.random.default_rng(0)
        self.num_bytes = 0
        file.write_bytes(b"")

    def canonical(self, name: str) -> str:
        """The drafter's table and head are the target's."""
        shared = ("drafter.embed_tokens.weight", "drafter.lm_head.weight")
        return name.replace("drafter.", "target.") if name in shared else name

    def info(self, name: str) -> TensorInfo:
        """As if no checkpoint said anything of it."""
        return TensorInfo(name, (), "F32", Path())

    def dense(self, name: str, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        """Random values of a type."""
        key = (self.canonical(name), dtype)
        if key not in self._dense:
            mask, unsigned = FLOAT_MASKS[dtype.name]
            self._dense[key] = self.keep(self._region(shape, dtype, mask, unsigned))
        return self._dense[key].reshape(shape)

    def quantized(self, names: Sequence[str], sizes: Sequence[int], width: int) -> Stack | None:
        """Random codes and scales."""
        owners = tuple(self.canonical(name) for name in names)
        kind, rows = self.format_of(names[0]), sum(sizes)
        if kind is None:
            return None
        if owners not in self._quantized:
            packed: Fp8Weight | Nvfp4Weight
            if kind == "fp8":
                packed = Fp8Weight(self._fp8((rows, width)), 2.0**-8)
            else:
                codes = self._region((rows, width // 2), np.dtype(np.uint8), 0xFF, np.uint8)
                packed = Nvfp4Weight(codes, self._fp8((rows, width // FP4_BLOCK)), 2.0**-8)
            self._quantized[owners] = Stack(packed, (1.0,) * len(sizes))
        return self._quantized[owners]

    def _fp8(self, shape: tuple[int, int]) -> Array:
        return self._region(shape, np.dtype(ml_dtypes.float8_e4m3fn), BYTE_MASK, np.uint8)

    def _region(
        self, shape: Sequence[int], dtype: np.dtype[Any], mask: int, unsigned: Any
    ) -> Array:
        size = math.prod(shape)
        start = self._file.stat().st_size
        with self._file.open("ab") as stream:
            for done in range(0, size, PIECE):
                count = min(PIECE, size - done)
                values = np.frombuffer(
                    self._generator.bytes(count * np.dtype(unsigned).itemsize), unsigned
                )
                stream.write((values & unsigned(mask)).data)
            stream.write(b"\0" * (-stream.tell() % 4096))
        self.num_bytes += size * dtype.itemsize
        mapped = np.memmap(self._file, unsigned, "r", offset=start, shape=tuple(shape))
        return mapped.view(np.ndarray).view(dtype)


class PeakMemory:
    """The most memory of this process that is not a mapped file, sampled while a block runs."""

    def __enter__(self) -> PeakMemory:
        self._stop = threading.Event()
        self.before = self.peak = anonymous_bytes()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.02):
            self.peak = max(self.peak, anonymous_bytes())


def anonymous_bytes() -> int:
    """Resident memory that no file backs."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


def measure(arguments: argparse.Namespace, layers: int, folder: Path) -> dict[str, Any]:
    """Build one engine and tell what it took."""
    pair = qwen3_8b(layers, arguments.draft_layers)
    choices = BuildChoices(
        block=16, max_seq_len=4096, precision=arguments.precision, device=arguments.device,
        logits=False,
    )  # fmt: skip
    device = device_of(choices.device)
    trt = load_flavor(device.backend)
    rows = contract.cache_rows(choices.max_seq_len, choices.block)
    graph = trace_step(pair, choices.block, rows)
    del graph.outputs[contract.LOGITS]
    weights = RandomWeights(folder / "weights", format_of(choices.precision))
    compute = PRECISION_TABLE[choices.precision].compute
    begun = lowered = (time.perf_counter(), time.process_time())

    def define(network: Any) -> list[Array]:
        nonlocal lowered
        lower_to_trt(graph, network, trt, weights, compute, step_fixed(choices.block, rows))
        lowered = (time.perf_counter(), time.process_time())
        return weights.kept

    file = folder / "rank0.engine"
    profiles = contract.profiles(choices, pair.target.vocab_size)
    with PeakMemory() as memory:
        built = build_engine(trt, device, define, profiles, file, lambda *_: None)
    ended = (time.perf_counter(), time.process_time())
    engine_bytes = file.stat().st_size
    return {
        "layers": layers,
        "draft_layers": arguments.draft_layers,
        "precision": choices.precision,
        "device": choices.device,
        "tensorrt": trt.__version__,
        "network_layers": built.num_layers,
        "kernels": len(built.layers["layers"]),
        "write_weights_s": round(lowered[0] - begun[0], 1),
        "build_s": round(ended[0] - lowered[0], 1),
        "build_cpu_s": round(ended[1] - lowered[1], 1),
        "weights_gb": round(weights.num_bytes / GB, 3),
        "engine_gb": round(engine_bytes / GB, 3),
        "engine_over_weights": round(engine_bytes / weights.num_bytes, 4),
        "memory_gb": round((memory.peak - memory.before) / GB, 3),
        "memory_over_engine": round((memory.peak - memory.before) / engine_bytes, 3),
    }


def main() -> None:
    """Measure each depth in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--precision", default="nvfp4", choices=("bf16", "fp16", "fp8", "nvfp4"))
    parser.add_argument("--device", default="sm120")
    parser.add_argument("--layers", type=script.count, nargs="+", default=[36])
    parser.add_argument("--draft-layers", type=script.count, default=5)
    parser.add_argument("--folder", type=Path, help="where the files lie; default: a temporary one")
    parser.add_argument("--output", type=script.output_file, help="a JSON file for the figures")
    arguments = parser.parse_args()
    found = []
    for layers in arguments.layers:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            found.append(measure(arguments, layers, Path(folder)))
        print(json.dumps(found[-1]))
    if arguments.output:
        report = {"machine": machine(), "builds": found}
        arguments.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    script.run(main)
