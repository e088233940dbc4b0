"""Closing table of `make demo`: `generate --json` without and with the drafter, `verify --json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main() -> int:
    """Print the table; 1 when the two outputs differ or `verify` found a difference."""
    plain, drafted, verified = (json.loads(Path(arg).read_text()) for arg in sys.argv[1:4])
    print(f"\n{'':24}{'plain':>10}{'DFlash':>10}")
    for label, key, form in (
        ("tokens", "completion_tokens", "d"),
        ("decode steps", "steps", "d"),
        ("acceptance length", "acceptance_length", ".2f"),
        ("first token, s", "ttft_s", ".2f"),
        ("decode tokens/s", "decode_tokens_per_s", ".1f"),
    ):
        print(f"{label:24}{_cell(plain[key], form):>10}{_cell(drafted[key], form):>10}")
    same = plain["token_ids"] == drafted["token_ids"]
    print(f"\nsame tokens both ways:  {'yes' if same else 'NO'}")
    print(
        f"verify:                 {'lossless' if verified['lossless'] else 'NOT lossless'} on "
        f"{verified['prompts']} prompts, {verified['tokens']} tokens, acceptance length "
        f"{_cell(verified['acceptance_length'], '.2f')} at width {verified['width']}"
    )
    return 0 if same and verified["lossless"] else 1


def _cell(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)


if __name__ == "__main__":
    sys.exit(main())
