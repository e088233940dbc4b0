"""From two checkpoints to an engine directory, in the order that fails early and cheaply."""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import dflash_trt
from dflash_trt import contract, engine_dir, swap
from dflash_trt.build.kv_injection import AUTO, choose_plugin
from dflash_trt.build.onnx_engine import onnx_versions, write_onnx
from dflash_trt.build.reporting import Progress, Reporting
from dflash_trt.build.requantized import own_precision, remarks
from dflash_trt.build.tensorrt import check_buildable
from dflash_trt.build.trt_engine import write_tensorrt
from dflash_trt.checkpoint.draft_vocab import read_ids
from dflash_trt.checkpoint.locate import is_on_hub, locate
from dflash_trt.checkpoint.pair import (
    Pair,
    check_block,
    check_selector,
    read_facts,
    read_pair,
)
from dflash_trt.checkpoint.target import load_tokenizer
from dflash_trt.checkpoint.tied import check_tied_head, without_copies
from dflash_trt.checkpoint.weights import DRAFTER, LM_HEAD, TARGET
from dflash_trt.config import BuildChoices, PairConfig, max_positions
from dflash_trt.engine_dir import (
    BY_PLUGIN,
    NATIVE_LAYERS,
    EngineConfig,
    EngineDir,
    writing_engine,
)
from dflash_trt.errors import BuildError, ConfigError
from dflash_trt.flavor import CPU, Device, device_of, precision_on
from dflash_trt.lower.trt_limits import check_sizes
from dflash_trt.nets.step import trace_step
from dflash_trt.quantize.policy import stored_bytes

DEFAULT_MAX_SEQ_LEN = 4096


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
    versions: Mapping[str, str]  # of the packages that the build uses
    plugin: Path | None  # the library that does the KV injection; None for native layers
    draft_vocab: Path | None  # the file that names the drafter's tokens, where the user gave one

    @property
    def device(self) -> Device:
        """What the engine is for."""
        return device_of(self.choices.device)

    @property
    def kv_injection(self) -> str:
        """How the engine writes the drafter's caches, in the words of its config."""
        return NATIVE_LAYERS if self.plugin is None else BY_PLUGIN

    @property
    def cache_bytes_per_slot(self) -> int:
        """Bytes of all caches of one slot."""
        return contract.cache_bytes_per_slot(self.pair.config, self.choices)


def plan(
    target: str,
    drafter: str,
    choices: Mapping[str, Any],
    *,
    target_base: Path | None = None,
    drafter_base: Path | None = None,
    draft_vocab: Path | None = None,
    plugin: str = AUTO,
) -> Plan:
    """Read and check everything but the weights' bytes. Missing choices come from the pair.

    A relative path is looked up in its base (a recipe's folder), else where the user stands.
    `draft_vocab`: see `read_pair`; `plugin`: see `choose_plugin`. Raises `CheckpointError`,
    `PairMismatch`, `ConfigError`, `MissingPackage` for TensorRT, or `PluginError`.
    """
    device = device_of(choices.get("device", CPU))
    if "precision" in choices:
        precision_on(device, choices["precision"])  # before anything is fetched
    versions = check_buildable(device) if device.is_gpu else onnx_versions()
    places = ((target, target_base), (drafter, drafter_base))
    if any(is_on_hub(*place) for place in places):
        # Weights are gigabytes: first the small files, which say whether they are of any use.
        small = (locate(*place, facts_only=True) for place in places)
        facts = read_facts(*small)
        _resolve(choices, facts)
        if draft_vocab is not None:
            ids = read_ids(draft_vocab, facts.target.vocab_size)
            check_selector(facts.drafter, draft_vocab, len(ids))
    target_path, drafter_path = (locate(*place) for place in places)
    pair = read_pair(target_path, drafter_path, draft_vocab)
    own = None if "precision" in choices else own_precision(pair, device)
    resolved = _resolve(choices if own is None else {**choices, "precision": own}, pair.config)
    warnings = (*pair.warnings, *remarks(pair, resolved.precision, own is not None))
    pair = dataclasses.replace(pair, warnings=warnings)
    head_dim = pair.config.drafter.attention.head_dim
    library = choose_plugin(plugin, device, resolved.precision, head_dim)
    return Plan(
        pair=pair,
        choices=resolved,
        references={"target": target, "drafter": drafter},
        target=target_path,
        drafter=drafter_path,
        source_bytes=_source_bytes(pair),
        weight_bytes=_weight_bytes(pair, resolved),
        versions=versions,
        plugin=library,
        draft_vocab=draft_vocab,
    )


def build(plan: Plan, output: Path, *, force: bool, progress: Progress) -> EngineDir:
    """Write the engine directory of a plan. Nothing is left on failure.

    Raises `BuildError`, or a `CheckpointError` for what only the weights or the tokenizer show.
    """
    device = plan.device
    output = swap.real_path(output)
    _check_disk(output, plan.weight_bytes)
    tokenizer = load_tokenizer(plan.target)
    check_tied_head(plan.pair.config.target, plan.pair.target_source)
    pair = without_copies(plan.pair)
    config = EngineConfig(
        device.backend, plan.choices, pair.config, plan.versions.get(device.backend)
        if device.is_gpu else None, plan.kv_injection,
    )  # fmt: skip
    rows = contract.cache_rows(plan.choices.max_seq_len, plan.choices.block)
    graph = trace_step(pair.config, plan.choices.block, rows, pair.draft_ids)
    manifest = _manifest(plan)
    vocab_size = pair.config.target.vocab_size
    write_gpu = partial(write_tensorrt, vocab_size=vocab_size, plugin=plan.plugin)
    write = write_gpu if device.is_gpu else write_onnx
    with writing_engine(output, config, manifest, force=force) as folder:
        tokenizer.export(folder)
        reader = Reporting(pair.weights(), progress, plan.source_bytes)
        manifest |= write(graph, plan.choices, reader, folder)
        progress("checksums", plan.source_bytes, plan.source_bytes)
    return engine_dir.open_engine(output, check_hashes=False)


def _resolve(choices: Mapping[str, Any], pair: PairConfig) -> BuildChoices:
    """All choices, checked against the pair's facts."""
    positions = {"target": max_positions(pair.target), "drafter": max_positions(pair.drafter)}
    limit = min(positions.values())
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
            f"max_seq_len {resolved.max_seq_len} is beyond the positions that the models are made "
            f"for: {', '.join(f'{side} {number}' for side, number in positions.items())}",
            hint=f"choose at most {limit}",
            choice="max_seq_len",
        )
    check_block(pair, resolved.block)
    check_sizes(pair, device)
    return resolved


def _source_bytes(pair: Pair) -> int:
    """Float32 bytes of all tensors of both checkpoints: what the build reads."""
    weights = pair.weights()
    return sum(4 * math.prod(weights.info(name).shape) for name in weights.names())


def _weight_bytes(pair: Pair, choices: BuildChoices) -> int:
    """Bytes of the engine's weights, within alignment and the small constants."""
    weights = pair.weights()
    infos = (weights.info(name) for name in weights.names())
    heads = {weights.canonical(side + LM_HEAD) for side in (TARGET, DRAFTER)}
    return sum(
        stored_bytes(
            choices.precision, info.name, info.shape, info.kept_as, is_head=info.name in heads
        )
        for info in infos
    )


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


def _manifest(plan: Plan) -> dict[str, Any]:
    """Where the engine came from and what made it; the writer adds the files' sums."""
    sides = {"target": plan.target, "drafter": plan.drafter}
    sources = {
        side: {"reference": plan.references[side], "files": _files_of(path)}
        for side, path in sides.items()
    }
    if plan.draft_vocab is not None:
        files = _files_of(plan.draft_vocab)
        sources["draft_vocab"] = {"reference": str(plan.draft_vocab), "files": files}
    return {
        "sources": sources,
        "versions": {"dflash_trt": dflash_trt.__version__, **plan.versions},
    }


def _files_of(path: Path) -> dict[str, int]:
    """Names and sizes of a checkpoint's weight and config files."""
    if path.is_file():
        return {path.name: path.stat().st_size}
    kinds = (".safetensors", ".json")
    files = (f for f in sorted(path.iterdir()) if f.suffix in kinds and f.is_file())
    return {file.name: file.stat().st_size for file in files}
