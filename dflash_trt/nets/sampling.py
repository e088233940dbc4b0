"""The choice of a token from logits: greedy, or a race whose noise both models share.

Each token rings after a time that is exponential with its probability for a rate; the first one is
the draw. (With logarithms this is known as Gumbel-max.) The noise of (seed, position, token id) is
one fixed function, so a seed gives the same text with and without drafting, at any block size,
batch and slot: losslessness under sampling is an equality. It is made of INT64 multiply, add and
modulo alone, which ONNX Runtime and TensorRT both have.

Noise for a whole vocabulary would cost more than a small model's step. So groups of tokens race
first, each with the sum of its tokens' probabilities, and then the tokens of the winner: the same
distribution for twice the square root of the vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from dflash_trt.graph import (
    DType,
    Tensor,
    add,
    argmax,
    cast,
    concat,
    cond,
    constant,
    cumsum,
    div,
    floor_div,
    gather_last,
    less,
    less_equal,
    logical_and,
    logical_or,
    maximum,
    mod,
    mul,
    reduce,
    reduce_all,
    reshape,
    scope,
    size,
    sub,
    take,
    topk,
    transpose,
    unary,
    where,
)
from dflash_trt.graph.compounds import threshold
from dflash_trt.nets.penalties import NEVER, Adjustment, adjust

PRIME = 2**31 - 1  # products of two residues fit INT64; 5 does not divide PRIME - 1
NOISE_BITS = 23  # u = (bits + 1/2) / 2^23 is exact in FP32, so never 0 or 1
ROUND_KEYS = (1_013_904_223, 1_664_525_013)
UNCUT = -1e30  # a threshold that keeps every token
SHORTLIST = 128  # a top-k up to here is read off the sorted largest logits
LEAST_MASS = 1e-30  # of what top-p keeps


@dataclass(frozen=True)
class Sampling:
    """How each special slot samples, each [M]."""

    temperature: Tensor  # float32, 0 is greedy
    top_k: Tensor  # int32, 0 is off
    top_p: Tensor  # float32, 1 is off
    min_p: Tensor  # float32, 0 is off
    seed: Tensor  # int64


@dataclass(frozen=True)
class Special:
    """The slots whose choice is more than their largest logit, M of B."""

    slots: Tensor  # int32 [M]: which ones
    source: Tensor  # int32 [B]: where a slot's choice is: b, or B + m for line m of this list
    sampling: Sampling
    adjustment: Adjustment | None = None

    def for_drafts(self, draft_offsets: Tensor) -> Special:
        """The same for draft rows."""
        assert self.adjustment is not None
        adjustment = self.adjustment.for_drafts(draft_offsets)
        return Special(self.slots, self.source, self.sampling, adjustment)


class Scored(Protocol):
    """The tokens that a drafter's logits [B, R, N] are of, where they are not of all."""

    def tokens(self, columns: Tensor) -> Tensor:
        """The ids [B, R] of columns [B, R] of the logits."""

    def spread(self, logits: Tensor, slots: Tensor) -> Tensor:
        """Logits [M, R, N] of slots [M] at the places of their tokens: [M, R, V].

        All others are never chosen. Target and drafter race with the same noise only over the
        same places.
        """


@dataclass(frozen=True)
class DraftVocabulary:
    """The tokens that a drafter's head scores, where it does not score all: the same everywhere."""

    ids: npt.NDArray[np.int32]  # [N]: of the head's rows, none twice
    vocab_size: int  # the target's

    def tokens(self, columns: Tensor) -> Tensor:
        """The ids of rows of the head, of any shape."""
        return take(constant(self.ids, DType.I32), columns, 0)

    def spread(self, logits: Tensor, slots: Tensor) -> Tensor:
        """See `Scored`."""
        size = len(self.ids)
        place = np.full(self.vocab_size, size)
        place[self.ids] = np.arange(size)
        never = per_row(logits, NEVER)
        padded = concat([logits, never], 2, size + 1)
        return take(padded, constant(place, DType.I32), 2)


def choose(
    logits: Tensor,
    positions: Tensor,
    special: Special,
    scored: Scored | None = None,
) -> Tensor:
    """Tokens int32 [B, R] for logits F32 [B, R, V]; positions int32 [B, R] are the tokens' own.

    Greedy ties go to the lower id. Order of the filters: temperature, top-k, top-p, min-p, as
    Hugging Face applies them, after the adjustment. What slots need that are not special is the
    argmax alone, whatever the others do. `scored`: whose logits they are, where they are a
    drafter's for some tokens only.
    """
    with scope("choose"):
        best = argmax(logits)
        greedy = best if scored is None else scored.tokens(best)

        def with_special() -> Tensor:
            rows, at = take(logits, special.slots, 0), take(positions, special.slots, 0)
            rows = rows if scored is None else scored.spread(rows, special.slots)
            choices = concat([greedy, _pick(rows, at, special)], 0, "choices")
            return take(choices, special.source, 0)

        is_any = less(constant(0, DType.I32), size(special.slots, 0))
        return cond(is_any, with_special, lambda: greedy)


def _pick(logits: Tensor, positions: Tensor, special: Special) -> Tensor:
    """Tokens [M, R] of the special slots."""
    sampling, adjustment = special.sampling, special.adjustment
    x = logits if adjustment is None else adjust(logits, adjustment)
    zero = constant(0.0, DType.F32)
    is_sampled = less(zero, sampling.temperature)
    column = reshape(is_sampled, (*sampling.temperature.shape, 1))

    def sampled() -> Tensor:
        drawn = _draw(x, sampling, positions)
        is_greedy = _any(unary("logical_not", is_sampled))
        return cond(is_greedy, lambda: where(column, drawn, argmax(x)), lambda: drawn)

    return cond(_any(is_sampled), sampled, lambda: argmax(x))


def exponential_noise(seed: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Exponential noise F32 [M, R, N] of mean 1.

    seed int64 [M], positions int32 [M, R], ids int32 [M, R, N] or [1, 1, N].
    """
    slots, rows = positions.shape
    key, other = (constant(value, DType.I64) for value in ROUND_KEYS)
    low = reshape(mod(seed, PRIME), (slots, 1))
    high = reshape(mod(floor_div(seed, PRIME), PRIME), (slots, 1))
    # Mixed before the position is added, or seed 8 would be seed 7 one position later.
    low = _mix(low, key)
    high = _mix(_mix(high, low), other)
    row = _mix(_mix(cast(positions, DType.I64), low), high)
    first = reshape(_mix(row, key), (slots, rows, 1))
    second = reshape(_mix(row, other), (slots, rows, 1))
    bits = _mix(_mix(cast(ids, DType.I64), first), second)
    bits = floor_div(bits, 2 ** (31 - NOISE_BITS))
    uniform = mul(add(cast(bits, DType.F32), 0.5), 2.0**-NOISE_BITS)
    return mul(unary("log", uniform), -1.0)


def _mix(x: Tensor, key: Tensor) -> Tensor:
    """(x + key)^5 mod PRIME: a permutation of the residues for every key."""
    base = mod(add(x, key), PRIME)
    square = mod(mul(base, base), PRIME)
    return mod(mul(mod(mul(square, square), PRIME), base), PRIME)


def _draw(logits: Tensor, sampling: Sampling, positions: Tensor) -> Tensor:
    """A token of each row, int32 [M, R]; what it is for greedy slots does not matter."""
    temperature = _per_slot(sampling.temperature)
    is_sampled = less(constant(0.0, DType.F32), temperature)
    scaled = div(logits, where(is_sampled, temperature, constant(1.0, DType.F32)))
    relative = sub(scaled, reduce("max", scaled, keepdims=True))
    weight = unary("exp", relative)
    has_filter = logical_or(
        less(constant(0, DType.I32), sampling.top_k),
        logical_or(
            less(sampling.top_p, constant(1.0, DType.F32)),
            less(constant(0.0, DType.F32), sampling.min_p),
        ),
    )
    kept = cond(_any(has_filter), lambda: _filtered(relative, weight, sampling), lambda: weight)
    return _race(kept, sampling.seed, positions)


def _race(weight: Tensor, seed: Tensor, positions: Tensor) -> Tensor:
    """A token of each row drawn in proportion to its weight F32 [M, R, V]: int32 [M, R]."""
    vocab = weight.shape[-1]
    assert isinstance(vocab, int)
    slots, rows = positions.shape
    num_groups = max(n for n in range(1, math.isqrt(vocab) + 1) if vocab % n == 0)
    group_size = vocab // num_groups

    def winner(rates: Tensor, ids: Tensor) -> Tensor:
        first = argmax(div(rates, exponential_noise(seed, positions, ids)))
        return reshape(first, (slots, rows, 1))

    if num_groups == 1:  # the vocabulary is a prime: TensorRT cannot build a race of one group
        ids = constant(np.arange(vocab).reshape(1, 1, -1), DType.I32)
        return reshape(winner(weight, ids), (slots, rows))

    # Neighbouring ids are in unlike groups: frequent tokens have neighbouring ids, and the second
    # race of a group with one likely token hardly ever parts target and drafter.
    columns = reshape(weight, (slots, rows, group_size, num_groups))
    sums = reduce("sum", transpose(columns, (0, 1, 3, 2)))
    group_ids = constant(vocab + np.arange(num_groups).reshape(1, 1, -1), DType.I32)
    group = winner(sums, group_ids)
    members = np.arange(0, vocab, num_groups).reshape(1, 1, -1)
    ids = add(group, constant(members, DType.I32))
    token = add(group, mul(winner(gather_last(weight, ids), ids), num_groups))
    return reshape(token, (slots, rows))


def _filtered(relative: Tensor, weight: Tensor, sampling: Sampling) -> Tensor:
    """Weights with those of the tokens that the filters remove at 0.

    How a slot's threshold is found depends on its own settings alone, as its draw must.
    """
    top_k, top_p = _per_slot(sampling.top_k), _per_slot(sampling.top_p)
    has_top_k = less(constant(0, DType.I32), top_k)
    is_short = logical_and(has_top_k, less_equal(top_k, constant(SHORTLIST, DType.I32)))
    is_long = logical_or(has_top_k, less(top_p, constant(1.0, DType.F32)))
    uncut = per_row(relative, UNCUT)
    short = cond(_any(is_short), lambda: _shortlisted(relative, top_k, top_p), lambda: uncut)
    is_long = logical_and(is_long, unary("logical_not", is_short))
    long = cond(_any(is_long), lambda: _searched(relative, weight, top_k, top_p), lambda: uncut)
    cut = where(is_short, short, where(is_long, long, uncut))
    # The weight is the probability relative to the most likely token's, which stays.
    keep = logical_and(less_equal(cut, relative), less_equal(_per_slot(sampling.min_p), weight))
    return mul(weight, cast(keep, DType.F32))


def _shortlisted(relative: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Thresholds [M, R, 1] of top-k, then top-p, for slots whose top-k is short."""
    vocab = relative.shape[-1]
    assert isinstance(vocab, int)
    length = min(SHORTLIST, vocab)
    values, _ = topk(relative, constant(length, DType.I32), length)
    is_in = less(constant(np.arange(length).reshape(1, 1, -1), DType.I32), top_k)
    weight = mul(unary("exp", values), cast(is_in, DType.F32))
    before = sub(cumsum(weight), weight)
    # A top-p that float32 has no number for is 0: the likeliest token, whose weight is 1, stays.
    need = maximum(mul(reduce("sum", weight, keepdims=True), top_p), LEAST_MASS)
    keep = logical_and(is_in, less(before, need))
    depth = where(keep, mul(values, -1.0), constant(UNCUT, DType.F32))
    return mul(reduce("max", depth, keepdims=True), -1.0)


def _searched(relative: Tensor, weight: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Thresholds [M, R, 1] of top-k, then top-p, for any size: no sort of the vocabulary."""
    one = constant(1.0, DType.F32)
    uncut = per_row(relative, UNCUT)
    has_top_k = less(constant(0, DType.I32), top_k)
    wanted = add(cast(top_k, DType.F32), mul(uncut, 0.0))
    by_rank = cond(_any(has_top_k), lambda: threshold(relative, wanted), lambda: uncut)
    by_rank = where(has_top_k, by_rank, uncut)
    inside = mul(weight, cast(less_equal(by_rank, relative), DType.F32))
    need = mul(reduce("sum", inside, keepdims=True), top_p)
    by_mass = where(less(top_p, one), threshold(relative, need, inside), uncut)
    return maximum(by_rank, by_mass)


def per_row(x: Tensor, value: Tensor | float) -> Tensor:
    """The value in every row of finite x [M, R, N]: [M, R, 1], or as a tensor [1, 1, V] has it."""
    return add(mul(reduce("max", x, keepdims=True), 0.0), value)


def _per_slot(x: Tensor) -> Tensor:
    """[M] for broadcasting over [M, R, V]."""
    return reshape(x, (x.shape[0], 1, 1))


def _any(condition: Tensor) -> Tensor:
    """Whether any element is true: a scalar."""
    return less(constant(0, DType.I32), reduce_all(cast(condition, DType.I32)))
