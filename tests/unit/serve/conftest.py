"""The toy session of the decode room, for servers without a model."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "decode"))
