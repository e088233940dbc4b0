"""`dflash-trt inspect`: what an engine directory is, and whether it is whole."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import typer

from dflash_trt import contract
from dflash_trt.cli.output import JSON_OPTION, print_json, print_rows
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
            "bytes_per_slot": contract.cache_bytes_per_slot(config.pair, config.choices),
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
    layers = ", ".join(key.removeprefix("target layer ") for key in figures["context_feature"])
    per_slot = figures["caches"]["bytes_per_slot"] / 1e6
    print_rows(
        [
            ("engine", figures["engine"]),
            ("backend", figures["backend"]),
            *figures["choices"].items(),
            *_side(figures, "target"),
            *_side(figures, "drafter"),
            ("features", f"outputs of target layers {layers}"),
            ("mask token", figures["drafter"]["mask_token_id"]),
            ("caches", f"at most {figures['caches']['rows']} rows, {per_slot:,.0f} MB per slot"),
            *_verdict(figures["certificate"]),
            *(("version", f"{name} {v}") for name, v in figures.get("versions", {}).items()),
            *(
                ("file", f"{name}  {entry['bytes']:,} bytes  {entry['sha256'][:16]}")
                for name, entry in figures["files"].items()
            ),
        ]
    )


def _side(figures: dict[str, Any], side: str) -> list[tuple[str, object]]:
    facts = figures[side]
    attention = facts["attention"]
    heads = f"{attention['num_heads']}/{attention['num_kv_heads']} heads"
    rope = f"rope {attention['rope']['kind']} theta {attention['rope']['theta']:g}"
    source = figures.get("sources", {}).get(side, {}).get("reference", "not recorded")
    return [
        (side, source),
        ("", f"{facts['num_layers']} layers, hidden {facts['hidden_size']}, {heads} of "
         f"{attention['head_dim']}, {rope}"),
    ]  # fmt: skip


def _verdict(certificate: dict[str, Any] | None) -> list[tuple[str, object]]:
    if certificate is None:
        return []
    verdict = "lossless" if certificate["lossless"] else "NOT lossless"
    return [("certificate", verdict if certificate["is_of_this_engine"] else "of another engine")]
