"""The choice of a token from logits: greedy, or Gumbel-max with noise that both models share.

The noise of (seed, position, token id) is one fixed function, so a seed gives the same text with
and without drafting, at any block size, batch and slot: losslessness under sampling is an equality.
It is made of INT64 multiply, add and modulo alone, which ONNX Runtime and TensorRT both have.
"""

from __future__ import annotations

from dataclasses import dataclass

from dflash_trt.graph import (
    DType,
    Tensor,
    add,
    argmax,
    cast,
    cond,
    constant,
    cumsum,
    div,
    equal,
    floor_div,
    iota,
    less,
    less_equal,
    logical_and,
    logical_or,
    maximum,
    minimum,
    mod,
    mul,
    reduce,
    reduce_all,
    reshape,
    scope,
    sub,
    topk,
    unary,
    where,
)
from dflash_trt.nets.penalties import Adjustment, adjust

PRIME = 2**31 - 1  # products of two residues fit INT64; 5 does not divide PRIME - 1
NOISE_BITS = 23  # u = (bits + 1/2) / 2^23 is exact in FP32, so never 0 or 1
NOISE_SPAN = 19.5  # Gumbel noise of such a u lies in [-2.82, 16.64]: an exact cut
MASKED = -1e30
ROUND_KEYS = (1_013_904_223, 1_664_525_013)


@dataclass(frozen=True)
class Sampling:
    """Per-slot sampling inputs, each [B]."""

    temperature: Tensor  # float32, 0 is greedy
    top_k: Tensor  # int32, 0 is off
    top_p: Tensor  # float32, 1 is off
    min_p: Tensor  # float32, 0 is off
    seed: Tensor  # int64


def choose(
    logits: Tensor, sampling: Sampling, positions: Tensor, adjustment: Adjustment | None = None
) -> Tensor:
    """Tokens int32 [B, R] for logits F32 [B, R, V]; positions int32 [B, R] are the tokens' own.

    Greedy ties go to the lower id. Order of the filters: temperature, top-k, top-p, min-p, as
    Hugging Face applies them, after the adjustment. A step in which every slot is greedy and
    nothing is adjusted computes the argmax alone.
    """
    zero = constant(0.0, DType.F32)
    any_sampled = less(zero, reduce_all(sampling.temperature))

    def pick(x: Tensor) -> Tensor:
        """With sampling where a slot asks for it."""
        greedy = argmax(x)

        def sampled() -> Tensor:
            is_sampled = less(zero, sampling.temperature)
            column = reshape(is_sampled, (*sampling.temperature.shape, 1))
            return where(column, _draw(x, sampling, positions), greedy)

        return cond(any_sampled, sampled, lambda: greedy)

    with scope("choose"):
        if adjustment is None:
            return pick(logits)
        is_special = logical_or(any_sampled, adjustment.is_needed)
        return cond(is_special, lambda: pick(adjust(logits, adjustment)), lambda: argmax(logits))


def gumbel_noise(seed: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Gumbel noise F32 [B, R, N]: seed int64 [B], positions int32 [B, R], ids int32 [B, R, N]."""
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
    inner = mul(unary("log", uniform), -1.0)
    return mul(unary("log", inner), -1.0)


def _mix(x: Tensor, key: Tensor) -> Tensor:
    """(x + key)^5 mod PRIME: a permutation of the residues for every key."""
    base = mod(add(x, key), PRIME)
    square = mod(mul(base, base), PRIME)
    return mod(mul(mod(mul(square, square), PRIME), base), PRIME)


def _draw(logits: Tensor, sampling: Sampling, positions: Tensor) -> Tensor:
    vocab = logits.shape[-1]
    assert isinstance(vocab, int)
    slots = positions.shape[0]

    def per_slot(x: Tensor) -> Tensor:
        return reshape(x, (slots, 1, 1))

    temperature = per_slot(sampling.temperature)
    is_sampled = less(constant(0.0, DType.F32), temperature)
    top_k, top_p = per_slot(sampling.top_k), per_slot(sampling.top_p)
    has_top_k = less(constant(0, DType.I32), top_k)
    scaled = div(logits, where(is_sampled, temperature, constant(1.0, DType.F32)))
    relative = sub(scaled, reduce("max", scaled, keepdims=True))
    mass = reduce("sum", unary("exp", relative), keepdims=True)
    # Tokens that cannot be drawn: further below the maximum than the noise spans, or so unlikely
    # that all such tokens together do not fill the tail that top-p cuts off.
    tail = unary("log", div(mul(mass, sub(constant(1.0, DType.F32), top_p)), float(vocab)))
    cut = maximum(tail, -NOISE_SPAN)
    alive = reduce("sum", cast(less_equal(cut, relative), DType.I32), keepdims=True)
    limit = where(has_top_k, minimum(top_k, vocab), alive)
    limit = where(is_sampled, limit, constant(1, DType.I32))
    num_candidates = maximum(reduce_all(limit), 1)  # the maximum of no rows is not a count
    values, ids = topk(relative, num_candidates, "candidates")
    rank = reshape(iota(num_candidates, "candidates"), (1, 1, "candidates"))
    weight = where(less(rank, limit), unary("exp", values), constant(0.0, DType.F32))
    total = where(has_top_k, reduce("sum", weight, keepdims=True), mass)
    before = sub(cumsum(weight), weight)
    keep = logical_and(less(rank, limit), less(before, mul(total, top_p)))
    # exp(values) is the probability relative to the most likely token's, which stays.
    keep = logical_and(keep, less_equal(per_slot(sampling.min_p), unary("exp", values)))
    score = add(values, gumbel_noise(sampling.seed, positions, ids))
    best = argmax(where(keep, score, constant(MASKED, DType.F32)))
    is_best = equal(rank, reshape(best, (*best.shape, 1)))
    return reduce("sum", where(is_best, ids, constant(0, DType.I32)))
