"""`dflash-trt inspect`: what an engine directory is, and whether it is whole."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from dflash_trt import contract
from dflash_trt.cli.output import JSON_OPTION, messages, print_json
from dflash_trt.engine_dir import MANIFEST, EngineDir, open_engine, sha256
from dflash_trt.lossless.certificate import STORED_AS


def inspect(
    engine: Path = typer.Argument(help="Engine directory."),
    as_json: bool = JSON_OPTION,
) -> None:
    """Show an engine's facts, choices, sources and files; every checksum is verified."""
    opened = open_engine(engine)
    figures = describe(opened)
    if as_json:
        print_json(figures)
    else:
        _print_tables(figures)


def describe(engine: EngineDir) -> dict[str, Any]:
    """Everything `inspect` shows, as plain types."""
    config = engine.config
    rows = contract.cache_rows(config.choices.max_seq_len, config.choices.block)
    caches = contract.all_caches(config.pair)
    return {
        "engine": str(engine.path),
        "backend": config.backend,
        "choices": dataclasses.asdict(config.choices),
        "max_drafts": config.choices.block - 1,
        "target": dataclasses.asdict(config.pair.target),
        "drafter": dataclasses.asdict(config.pair.drafter),
        "context_feature": {
            f"target layer {i}": f"output of target.layers.{i} (before layer {i + 1} or the norm)"
            for i in config.pair.drafter.target_layer_ids
        },
        "caches": {
            "count": len(caches),
            "rows": rows,
            "bytes_per_slot": sum(s.num_heads * s.head_dim * rows * 4 for s in caches),
        },
        "certificate": _certificate(engine),
        **engine.manifest,
    }


def _certificate(engine: EngineDir) -> dict[str, Any] | None:
    """The verdict of a lossless certificate that is kept in the directory."""
    try:
        data = json.loads((engine.path / STORED_AS).read_bytes())
        stands = data["engine_sha256"] == sha256(engine.path / MANIFEST)
        return {"lossless": data["lossless"], "is_of_this_engine": stands}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _print_tables(figures: dict[str, Any]) -> None:
    table = Table(show_header=False, box=None)
    table.add_row("engine", figures["engine"])
    table.add_row("backend", figures["backend"])
    for key, value in figures["choices"].items():
        table.add_row(key, str(value))
    for side in ("target", "drafter"):
        facts = figures[side]
        attention = facts["attention"]
        table.add_row(
            side,
            f"{facts['num_layers']} layers, hidden {facts['hidden_size']}, "
            f"{attention['num_heads']}/{attention['num_kv_heads']} heads of "
            f"{attention['head_dim']}, rope {attention['rope']['kind']} "
            f"theta {attention['rope']['theta']:g}",
        )
        sources = figures.get("sources", {})
        table.add_row("", str(sources.get(side, {}).get("reference", "source not recorded")))
    layers = ", ".join(key.removeprefix("target layer ") for key in figures["context_feature"])
    table.add_row("features", f"outputs of target layers {layers}")
    table.add_row("mask token", str(figures["drafter"]["mask_token_id"]))
    per_slot = figures["caches"]["bytes_per_slot"] / 1e6
    table.add_row("caches", f"{figures['caches']['rows']} rows, {per_slot:,.0f} MB per slot")
    if figures["certificate"] is not None:
        lossless, own = (
            figures["certificate"]["lossless"],
            figures["certificate"]["is_of_this_engine"],
        )
        verdict = "lossless" if lossless else "NOT lossless"
        table.add_row("certificate", verdict if own else "of another engine")
    for name, entry in figures["files"].items():
        table.add_row("file", f"{name}  {entry['bytes']:,} bytes  {entry['sha256'][:16]}")
    messages.print(table)
