"""Which weights a precision stores in how many bits."""

from __future__ import annotations

from collections.abc import Callable

from dflash_trt.errors import ConfigError


def bits_of(precision: str) -> Callable[[str], int | None]:
    """For a weight's canonical name: 4 or 8 bits, or None for float32.

    int4: layers in 4 bits; the head in 8, since its errors go straight into the choice of a
    token; the drafter's fc stays float32, for its inputs are raw features with outliers past 2e4.
    """
    if precision == "fp32":
        return lambda name: None
    if precision == "int4":
        return _int4
    raise ConfigError(f"precision {precision!r} has no weight policy")


def _int4(name: str) -> int | None:
    if name == "drafter.fc.weight":
        return None
    return 8 if name.endswith(("lm_head.weight", "embed_tokens.weight")) else 4
