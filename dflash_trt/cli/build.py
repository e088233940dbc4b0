"""`dflash-trt build`: two checkpoints to one engine directory."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import typer

from dflash_trt.build.kv_injection import AUTO
from dflash_trt.build.pipeline import Plan, plan
from dflash_trt.build.pipeline import build as build_engine
from dflash_trt.build.recipe import Recipe, find_recipe, recipe_names, remarks
from dflash_trt.cli.output import (
    JSON_OPTION,
    draft_vocab_rows,
    messages,
    print_json,
    print_rows,
    progress_bar,
)
from dflash_trt.engine_dir import EngineDir
from dflash_trt.errors import ConfigError
from dflash_trt.flavor import DEVICES, PRECISIONS
from dflash_trt.kv_plugin import VARIABLE


def build(
    target: str = typer.Option(
        ..., help="Recipe name, recipe file, checkpoint folder, .gguf file, or hf:ORG/NAME."
    ),
    drafter: str | None = typer.Option(
        None, help="Drafter checkpoint: a folder or hf:ORG/NAME. A recipe names its own."
    ),
    output: Path | None = typer.Option(
        None,
        "--output",
        "-o",
        help="Engine directory to write. Default: ./NAME-PRECISION-bBLOCK, "
        "with the device after the name for a GPU.",
    ),
    block: int | None = typer.Option(
        None,
        help="Block size, anchor counted. Default: what the drafter was trained with; a narrower "
        "one shows it less than it learned from, and lowers acceptance.",
    ),
    precision: str | None = typer.Option(
        None,
        help=f"Weights: {', '.join(PRECISIONS)}. Default: the recipe's, else fp32 for the CPU and "
        "for a GPU bf16, or fp8 or nvfp4 of a target whose codes it can take over.",
    ),
    device: str | None = typer.Option(
        None, help=f"What it runs on: {', '.join(DEVICES)}. Default: the recipe's, else cpu."
    ),
    max_seq_len: int | None = typer.Option(
        None,
        help="Prompt and output tokens of one request. Default: what both models allow, "
        "at most 4096.",
    ),
    max_slots: int | None = typer.Option(None, help="Requests that decode together. Default: 4."),
    prefill_chunk: int | None = typer.Option(
        None, help="Prompt tokens that one step reads. Default: 256."
    ),
    logits: bool | None = typer.Option(
        None,
        "--logits",
        help="A GPU engine returns logits too, for logprobs; a CPU one always can.",
    ),
    draft_vocab: Path | None = typer.Option(
        None,
        help="JSON list of token ids: the drafter drafts these alone, so its head is smaller and "
        "faster. `dflash-trt draft-vocab` makes one. Default: the drafter's own, else all tokens.",
    ),
    plugin: str = typer.Option(
        AUTO,
        metavar="auto|off|PATH",
        help=f"KV-injection plugin, for data-center GPUs: auto takes ${VARIABLE} or what `make "
        "plugins` built, off native layers; a PATH to the library is required.",
    ),
    force: bool = typer.Option(False, "--force", help="Replace an engine that is there."),
    as_json: bool = JSON_OPTION,
) -> None:
    """Build an engine directory from a target and its DFlash drafter."""
    if not target.strip():
        raise ConfigError(
            "--target is empty", hint=f"name a checkpoint or a recipe: {', '.join(recipe_names())}"
        )
    start = time.perf_counter()
    recipe = find_recipe(target)
    flags = {
        "block": block,
        "precision": precision,
        "max_seq_len": max_seq_len,
        "max_slots": max_slots,
        "prefill_chunk": prefill_chunk,
        "device": device,
        "logits": logits,
    }
    chosen = {key: value for key, value in flags.items() if value is not None}
    made = _plan(target, drafter, recipe, chosen, draft_vocab, plugin)
    warnings = [*remarks(target), *made.pair.warnings]
    for warning in warnings:
        messages.print(f"warning: {warning}", soft_wrap=True)
    name = recipe.name if recipe else made.target.stem
    choices = made.choices
    parts = [name, choices.precision, f"b{choices.block}"]
    if made.device.is_gpu:
        parts.insert(1, choices.device)
    folder = output or Path("-".join(parts))
    with progress_bar() as bar:
        task = bar.add_task("weights", total=made.source_bytes)
        engine = build_engine(
            made,
            folder,
            force=force,
            progress=lambda stage, done, total: bar.update(
                task, description=stage, completed=done, total=total
            ),
        )
    figures = _figures(made, engine, warnings, time.perf_counter() - start)
    if as_json:
        print_json(figures)
    else:
        _print_table(figures)


def _plan(
    target: str,
    drafter: str | None,
    recipe: Recipe | None,
    chosen: dict[str, Any],
    draft_vocab: Path | None,
    plugin: str,
) -> Plan:
    if recipe is not None:
        with recipe.blamed(chosen):
            return plan(
                recipe.target,
                recipe.drafter if drafter is None else drafter,
                {**recipe.choices_for(chosen.get("device")), **chosen},
                target_base=recipe.base,
                drafter_base=recipe.base if drafter is None else None,
                # A recipe's vocabulary was chosen for its own drafter, which may have one itself.
                draft_vocab=draft_vocab or (recipe.draft_vocab if drafter is None else None),
                plugin=plugin,
            )
    if drafter is None:
        names = ", ".join(recipe_names())
        raise ConfigError(
            f"{target} is not a recipe, and no --drafter is given",
            hint=f"recipes are {names}; for checkpoints give both --target and --drafter",
        )
    return plan(target, drafter, chosen, draft_vocab=draft_vocab, plugin=plugin)


def _figures(made: Plan, engine: EngineDir, warnings: list[str], seconds: float) -> dict[str, Any]:
    files = engine.manifest["files"].values()
    return {
        "engine": str(engine.path),
        "backend": engine.config.backend,
        "target": made.references["target"],
        "drafter": made.references["drafter"],
        **dataclasses.asdict(made.choices),
        "draft_vocab_size": made.pair.config.drafter.draft_vocab_size,
        "kv_injection": made.kv_injection,
        "plugin": None if made.plugin is None else str(made.plugin),
        "engine_bytes": sum(entry["bytes"] for entry in files),
        "cache_bytes_per_slot": made.cache_bytes_per_slot,
        "build_s": round(seconds, 3),
        "warnings": warnings,
    }


def _print_table(figures: dict[str, Any]) -> None:
    plain = (
        "engine",
        "target",
        "drafter",
        "backend",
        "device",
        "precision",
        "block",
        "max_seq_len",
    )
    per_slot = figures["cache_bytes_per_slot"] / 1e6
    way = figures["kv_injection"]
    library = f" {figures['plugin']}" if figures["plugin"] else ""
    print_rows(
        [
            *((key, figures[key]) for key in plain),
            *draft_vocab_rows(figures["draft_vocab_size"]),
            ("kv injection", f"{way}{library}"),
            ("size", f"{figures['engine_bytes'] / 1e6:,.0f} MB"),
            ("caches", f"at most {per_slot:,.0f} MB each, {figures['max_slots']} slots"),
            ("time", f"{figures['build_s']:.1f} s"),
        ]
    )
