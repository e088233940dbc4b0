"""Lines per room, printed by `make size`; fails when a Python file is over its budget."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAX_FILE_LINES = 400
FOLDERS = ("dflash_trt", "tests", "bench", "engines", "recipes")


def line_counts() -> dict[Path, int]:
    """Lines of every Python file, by path relative to the repository."""
    files = (file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py")))
    return {file.relative_to(ROOT): len(file.read_text().splitlines()) for file in files}


def too_long() -> dict[Path, int]:
    """Files over the budget."""
    return {file: lines for file, lines in line_counts().items() if lines > MAX_FILE_LINES}


def main() -> int:
    """Print the table; 1 when a file is over the budget."""
    rooms: Counter[str] = Counter()
    for file, lines in line_counts().items():
        # A file directly in the package is on the shelf that both halves share.
        rooms["/".join(file.parts[:2]) if len(file.parts) > 2 else file.parts[0]] += lines
    for room in sorted(rooms):
        print(f"{rooms[room]:6,}  {room}")
    package = sum(lines for room, lines in rooms.items() if room.startswith("dflash_trt"))
    print(f"{package:6,}  the package, {sum(rooms.values()):,} in all")
    for file, lines in too_long().items():
        print(f"{file}: {lines} lines, the budget is {MAX_FILE_LINES}", file=sys.stderr)
    return 1 if too_long() else 0


if __name__ == "__main__":
    sys.exit(main())
