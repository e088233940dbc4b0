"""The noise of (seed, position, token id) by its definition, in Python integers."""

from __future__ import annotations

import math

PRIME = 2147483647
FIRST, SECOND = 1013904223, 1664525013


def mix(x: int, key: int) -> int:
    """A permutation of the residues of PRIME."""
    return pow((x + key) % PRIME, 5, PRIME)


def noise_of(seed: int, position: int, token: int) -> float:
    """Gumbel noise from 23 bits."""
    low = mix(seed % PRIME, FIRST)
    high = mix(mix(seed // PRIME % PRIME, low), SECOND)
    row = mix(mix(position, low), high)
    bits = mix(mix(token, mix(row, FIRST)), mix(row, SECOND)) >> 8
    return -math.log(-math.log((bits + 0.5) / 2**23))
