"""Closing table of `make demo`: `generate --json` without and with the drafter, `verify --json`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import script


def main() -> int:
    """Print the table; 1 when the two outputs differ or `verify` found a difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, what in (
        ("plain", "of `generate --json` at width 1"), ("drafted", "of `generate --json`"),
        ("verified", "of `verify --json`"),
    ):  # fmt: skip
        parser.add_argument(name, type=_figures, help=f"output {what}")
    args = parser.parse_args()
    try:
        lines = _table(args.plain, args.drafted, args.verified)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        script.fail(f"a file has not what the table shows: {type(error).__name__}: {error}")
    print("\n".join(lines))
    same = args.plain["token_ids"] == args.drafted["token_ids"]
    return 0 if same and args.verified["lossless"] else 1


def _figures(file: str) -> dict[str, Any]:
    try:
        data = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise argparse.ArgumentTypeError(f"{file} cannot be read: {reason}") from error
    if not isinstance(data, dict):
        raise argparse.ArgumentTypeError(f"{file} is no JSON object")
    return data


def _table(plain: dict[str, Any], drafted: dict[str, Any], verified: dict[str, Any]) -> list[str]:
    rows = (
        ("tokens", "completion_tokens", "d"),
        ("decode steps", "steps", "d"),
        ("acceptance length", "acceptance_length", ".2f"),
        ("first token, s", "ttft_s", ".2f"),
        ("decode tokens/s", "decode_tokens_per_s", ".1f"),
    )
    same = plain["token_ids"] == drafted["token_ids"]
    return [
        f"\n{'':24}{'plain':>10}{'DFlash':>10}",
        *(
            f"{label:24}{_cell(plain[key], form):>10}{_cell(drafted[key], form):>10}"
            for label, key, form in rows
        ),
        f"\nsame tokens both ways:  {'yes' if same else 'NO'}",
        f"verify:                 {'lossless' if verified['lossless'] else 'NOT lossless'} on "
        f"{verified['prompts']} prompts, {verified['tokens']} tokens, acceptance length "
        f"{_cell(verified['acceptance_length'], '.2f')} at width {verified['width']}",
    ]


def _cell(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)


if __name__ == "__main__":
    script.run(main)
