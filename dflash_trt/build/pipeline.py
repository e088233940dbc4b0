"""From two checkpoints to an engine directory, in the order that fails early and cheaply."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnxruntime

import dflash_trt
from dflash_trt import contract, engine_dir
from dflash_trt.checkpoint.gguf_tokenizer import load_gguf_tokenizer
from dflash_trt.checkpoint.locate import locate
from dflash_trt.checkpoint.pair import Pair, check_block, read_pair
from dflash_trt.config import BuildChoices, PairConfig
from dflash_trt.engine_dir import EngineConfig, EngineDir, writing_engine
from dflash_trt.errors import BuildError, ConfigError
from dflash_trt.flavor import CPU, ONNXRUNTIME, device_of
from dflash_trt.lower.onnx import lower_to_onnx
from dflash_trt.lower.onnx_weights import F32, OnnxWeights, StoredBlocks, WeightReader
from dflash_trt.nets.step import trace_step
from dflash_trt.quantize.blocks import BLOCK_SIZE
from dflash_trt.quantize.policy import bits_of
from dflash_trt.text import Tokenizer

DEFAULT_MAX_SEQ_LEN = 4096

Progress = Callable[[str, int, int], None]  # stage, done bytes, total bytes


@dataclass(frozen=True)
class Plan:
    """A checked pair with checked choices: what `build` will write, before any weight is read."""

    pair: Pair
    choices: BuildChoices
    references: Mapping[str, str]  # as the user or recipe names target and drafter
    target: Path
    drafter: Path
    source_bytes: int
    weight_bytes: int

    @property
    def cache_bytes_per_slot(self) -> int:
        """Float32 bytes of all caches of one slot."""
        choices = self.choices
        return contract.cache_bytes_per_slot(self.pair.config, choices.max_seq_len, choices.block)


def plan(
    target: str,
    drafter: str,
    choices: Mapping[str, Any],
    *,
    target_base: Path | None = None,
    drafter_base: Path | None = None,
) -> Plan:
    """Read and check everything but the weights' bytes. Missing choices come from the pair.

    A relative path is looked up in its base (a recipe's folder), else where the user stands.
    Raises `CheckpointError`, `PairMismatch` or `ConfigError`.
    """
    target_path, drafter_path = locate(target, target_base), locate(drafter, drafter_base)
    pair = read_pair(target_path, drafter_path)
    resolved = _resolve(choices, pair.config)
    check_block(pair.config, resolved.block)
    return Plan(
        pair=pair,
        choices=resolved,
        references={"target": target, "drafter": drafter},
        target=target_path,
        drafter=drafter_path,
        source_bytes=_source_bytes(pair),
        weight_bytes=_weight_bytes(pair, resolved),
    )


def build(plan: Plan, output: Path, *, force: bool, progress: Progress) -> EngineDir:
    """Write the engine directory of a plan. Raises `BuildError`; nothing is left on failure."""
    if device_of(plan.choices.device).is_gpu:
        raise BuildError(f"engines for device {plan.choices.device} are not built yet")
    output = output.absolute()  # the working directory may be what is replaced
    config = EngineConfig(ONNXRUNTIME, plan.choices, plan.pair.config)
    _check_disk(output, plan.weight_bytes)
    tokenizer = _tokenizer(plan.target)
    rows = contract.cache_rows(plan.choices.max_seq_len, plan.choices.block)
    graph = trace_step(plan.pair.config, plan.choices.block, rows)
    with writing_engine(output, config, _manifest(plan), force=force) as folder:
        tokenizer.export(folder)
        with (folder / engine_dir.WEIGHTS).open("wb") as data:
            reader = _Reporting(plan.pair.weights(), progress, plan.source_bytes)
            weights = OnnxWeights(reader, data, engine_dir.WEIGHTS, bits_of(plan.choices.precision))
            model = lower_to_onnx(graph, weights)
        onnx.helper.set_model_props(
            model, contract.build_properties(plan.choices.block, plan.choices.max_seq_len)
        )
        (folder / engine_dir.MODEL).write_bytes(model.SerializeToString())
        progress("checksums", plan.source_bytes, plan.source_bytes)
    return engine_dir.open_engine(output, check_hashes=False)


class _Reporting:
    """A weight reader that tells how far the reading has come."""

    def __init__(self, reader: WeightReader, progress: Progress, total: int) -> None:
        self._reader = reader
        self._progress = progress
        self._total = total
        self._done = 0

    def canonical(self, name: str) -> str:
        return self._reader.canonical(name)

    def read(self, name: str) -> F32:
        return self._count(self._reader.read(name))

    def read_rows(self, name: str, start: int, stop: int) -> F32:
        return self._count(self._reader.read_rows(name, start, stop))

    def q4_blocks(self, name: str) -> StoredBlocks | None:
        blocks = self._reader.q4_blocks(name)
        if blocks is not None:
            self._advance(4 * blocks.scales.size * BLOCK_SIZE)
        return blocks

    def _count(self, array: F32) -> F32:
        self._advance(array.nbytes)
        return array

    def _advance(self, num_bytes: int) -> None:
        self._done += num_bytes
        self._progress("weights", min(self._done, self._total), self._total)


def _resolve(choices: Mapping[str, Any], pair: PairConfig) -> BuildChoices:
    limit = min(pair.target.max_position_embeddings, pair.drafter.max_position_embeddings)
    device = device_of(choices.get("device", CPU))
    defaults = {
        "block": pair.drafter.block_size,
        "max_seq_len": min(limit, DEFAULT_MAX_SEQ_LEN),
        "precision": device.precisions[0],
        "logits": not device.is_gpu,
    }
    resolved = BuildChoices(**{**defaults, **choices})
    if resolved.max_seq_len > limit:
        raise ConfigError(
            f"max_seq_len {resolved.max_seq_len} is beyond max_position_embeddings: target "
            f"{pair.target.max_position_embeddings}, drafter "
            f"{pair.drafter.max_position_embeddings}",
            hint=f"choose at most {limit}",
        )
    return resolved


def _source_bytes(pair: Pair) -> int:
    """Float32 bytes of all tensors of both checkpoints: what the build reads."""
    weights = pair.weights()
    return sum(4 * math.prod(weights.info(name).shape) for name in weights.names())


def _weight_bytes(pair: Pair, choices: BuildChoices) -> int:
    """Bytes of the weights file, within alignment and the small constants."""
    weights, bits = pair.weights(), bits_of(choices.precision)
    total = 0
    for name in weights.names():
        shape = weights.info(name).shape
        size = math.prod(shape)
        packed = bits(name) if len(shape) == 2 and shape[1] % BLOCK_SIZE == 0 else None
        is_embedding = name.endswith("embed_tokens.weight")
        if packed is None or is_embedding:
            total += 4 * size
        if packed is not None:
            # codes, a float32 scale per block, and for Q4_1 a float32 offset
            total += size * packed // 8 + 2 * 4 * size // BLOCK_SIZE
    return total


def _check_disk(output: Path, needed: int) -> None:
    parent = output.absolute().parent
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise BuildError(
            f"{parent} has {free / 1e9:.1f} GB free, the engine needs {needed / 1e9:.1f} GB",
            hint="free space or choose another --output",
        )


def _tokenizer(target: Path) -> Tokenizer:
    return load_gguf_tokenizer(target) if target.suffix == ".gguf" else Tokenizer.load(target)


def _manifest(plan: Plan) -> dict[str, Any]:
    """Where the engine came from and what made it; the writer adds the files' sums."""
    return {
        "sources": {
            side: {"reference": plan.references[side], "files": _files_of(path)}
            for side, path in (("target", plan.target), ("drafter", plan.drafter))
        },
        "versions": {
            "dflash_trt": dflash_trt.__version__,
            "onnx": onnx.__version__,
            "onnxruntime": onnxruntime.__version__,
        },
    }


def _files_of(path: Path) -> dict[str, int]:
    """Names and sizes of a checkpoint's weight and config files."""
    if path.is_file():
        return {path.name: path.stat().st_size}
    kinds = (".safetensors", ".json")
    files = (f for f in sorted(path.iterdir()) if f.suffix in kinds and f.is_file())
    return {file.name: file.stat().st_size for file in files}
