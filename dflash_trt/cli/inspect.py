"""`dflash-trt inspect`: what an engine directory is, and whether it is whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from dflash_trt.cli.output import JSON_OPTION, draft_vocab_rows, print_json, print_rows
from dflash_trt.engine_dir import open_engine
from dflash_trt.inspection import describe


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


def _print_tables(figures: dict[str, Any]) -> None:
    layers = ", ".join(key.removeprefix("target layer ") for key in figures["context_feature"])
    per_slot = figures["caches"]["bytes_per_slot"] / 1e6
    print_rows(
        [
            ("engine", figures["engine"]),
            ("backend", figures["backend"]),
            *figures["choices"].items(),
            ("kv injection", figures["kv_injection"]),
            *_side(figures, "target"),
            *_side(figures, "drafter"),
            ("features", f"outputs of target layers {layers}"),
            ("mask token", figures["drafter"]["mask_token_id"]),
            *draft_vocab_rows(figures["drafter"]["draft_vocab_size"]),
            ("caches", f"at most {figures['caches']['rows']} rows, {per_slot:,.0f} MB per slot"),
            *_verdict(figures["certificate"]),
            *_tensorrt(figures),
            *(("version", f"{name} {v}") for name, v in figures["versions"].items()),
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
    source = figures["sources"].get(side, {}).get("reference", "not recorded")
    kind = "DFlash 2, " if facts.get("dflash2") else ""
    return [
        (side, source),
        ("", f"{kind}{facts['num_layers']} layers, hidden {facts['hidden_size']}, {heads} of "
         f"{attention['head_dim']}, {rope}"),
    ]  # fmt: skip


def _tensorrt(figures: dict[str, Any]) -> list[tuple[str, object]]:
    """What TensorRT made of the step graph."""
    facts = figures["tensorrt"]
    if facts is None:
        return []
    step, kernels = facts["step"], facts["kernels"]
    engines = "one engine" if step["engines"] == 1 else f"{step['engines']} engines"
    where = "all of them on the GPU"
    if step["on_host"]:
        where = f"on the host: {', '.join(step['on_host'])}"
    types = ", ".join(f"{name} {count}" for name, count in kernels["types"].items())
    weights = ", ".join(f"{name} {count}" for name, count in kernels["weights"].items())
    return [
        ("tensorrt", f"built for compute capability {facts['compute_capability']}"),
        ("network", f"{facts['layers']} layers, SHA-256 {facts['sha256'][:16]}"),
        *(("profile", _profile(name, dims)) for name, dims in facts["profiles"].items()),
        ("step", f"{engines}, one enqueue: {len(step['inputs'])} inputs, "
         f"{step['caches_in_place']} caches updated in place, "
         f"outputs {', '.join(step['outputs'])}; {where}"),
        ("kernels", f"{kernels['count']} in all profiles: {types}"),
        ("weights", f"kernels that read constants of type {weights}"),
        ("check", facts["check"]),
    ]  # fmt: skip


def _profile(name: str, dims: dict[str, Any]) -> str:
    return f"{name}: " + ", ".join(
        f"{dim} {least} to {most}" for dim, (least, most) in dims.items()
    )


def _verdict(certificate: dict[str, Any] | None) -> list[tuple[str, object]]:
    if certificate is None:
        return []
    verdict = "lossless" if certificate["lossless"] else "NOT lossless"
    return [("certificate", verdict if certificate["is_of_this_engine"] else "of another engine")]
