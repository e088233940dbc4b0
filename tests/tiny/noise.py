"""The noise of (seed, position, token id) by its definition, in Python integers."""

from __future__ import annotations

import math
from collections.abc import Sequence

PRIME = 2147483647
FIRST, SECOND = 1013904223, 1664525013


def mix(x: int, key: int) -> int:
    """A permutation of the residues of PRIME."""
    return pow((x + key) % PRIME, 5, PRIME)


def noise_of(seed: int, position: int, token: int) -> float:
    """Exponential noise from 23 bits."""
    low = mix(seed % PRIME, FIRST)
    high = mix(mix(seed // PRIME % PRIME, low), SECOND)
    row = mix(mix(position, low), high)
    bits = mix(mix(token, mix(row, FIRST)), mix(row, SECOND)) >> 8
    return -math.log((bits + 0.5) / 2**23)


def draw_of(weights: Sequence[float], seed: int, position: int) -> int:
    """The token drawn: groups (ids modulo their number) race, then the tokens of the winner."""
    vocab = len(weights)
    groups = max(n for n in range(1, vocab + 1) if vocab % n == 0 and n * n <= vocab)
    members = [range(g, vocab, groups) for g in range(groups)]
    sums = [math.fsum(weights[i] for i in ids) for ids in members]
    best = max(range(groups), key=lambda g: sums[g] / noise_of(seed, position, vocab + g))
    return max(members[best], key=lambda i: weights[i] / noise_of(seed, position, i))
