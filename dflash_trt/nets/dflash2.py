"""What DFlash 2 adds to a drafter: convolutions around its sublayers, and a selector of drafts.

Source: the reference implementation, `dflash` 0.1.0 on PyPI. The convolutions run along the rows of
the block and see nothing of the context. The selector replaces the choice of each row's likeliest
token by a walk: the score of a token depends on the one that was taken before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflash_trt.config import DFlash2Config, DrafterConfig
from dflash_trt.contract import DRAFT_ROWS
from dflash_trt.graph import (
    DType,
    LinearWeight,
    Tensor,
    add,
    argmax,
    cast,
    constant,
    embedding,
    equal,
    gather_last,
    less_equal,
    linear,
    maximum,
    minimum,
    mul,
    param,
    reduce,
    reshape,
    scatter_last,
    scope,
    sub,
    take,
    topk,
    where,
)
from dflash_trt.nets.penalties import NEVER
from dflash_trt.nets.sampling import Scored, per_row

SELECTOR = "drafter.candidate_selector"


@dataclass(frozen=True)
class Convolution:
    """One sublayer's convolutions along the block, before and behind it; none in DFlash v1.

    Row t of the result is the sum, over taps o, of kernel o of row t times row t - o of the input:
    nothing where that is before the block.
    """

    offsets: Tensor  # int32 [K]
    before: Sequence[Tensor]  # per tap: F32 [B, K, groups, group]
    behind: Sequence[Tensor]

    def prepare(self, x: Tensor) -> Tensor:
        """The sublayer's input x [B, K, H], convolved."""
        return cast(self._along(x, self.before), x.dtype)

    def finish(self, branch: Tensor) -> Tensor:
        """The sublayer's output [B, K, H], convolved: F32, as the stream that it is added to."""
        return self._along(branch, self.behind)

    def _along(self, x: Tensor, kernels: Sequence[Tensor]) -> Tensor:
        """In FP32: one rounding at the end, not one per tap."""
        if not kernels:
            return x
        rows = reshape(cast(x, DType.F32), kernels[0].shape)
        total = mul(rows, kernels[0])
        for tap, kernel in enumerate(kernels[1:], 1):
            # Never a row that is not there: the block may be empty.
            shifted = take(rows, maximum(sub(self.offsets, tap), 0), 1)
            is_inside = less_equal(constant(tap, DType.I32), self.offsets)
            mask = reshape(cast(is_inside, DType.F32), (1, *self.offsets.shape, 1, 1))
            total = add(total, mul(mul(shifted, mask), kernel))
        return reshape(total, x.shape)


def convolution(config: DrafterConfig, name: str, x: Tensor, offsets: Tensor) -> Convolution:
    """The convolutions `name` (`..attention_conv`) whose kernels follow from x [B, K, H].

    x is the sublayer's normed input. Each row has kernels of its own: `base_kernel` of a channel,
    plus what the projection of x says for its group.
    """
    if config.dflash2 is None:
        return Convolution(offsets, (), ())
    taps, group = config.dflash2.taps, config.dflash2.group_size
    groups = config.hidden_size // group
    with scope(name.rpartition(".")[2]):
        weight = LinearWeight(f"{name}.kernel_projection.weight", 2 * taps * groups)
        delta = linear(x, [weight], DType.F32)[0]
        delta = reshape(delta, (*x.shape[:2], 2 * taps, groups))
        base = param(f"{name}.base_kernel", (2, taps, config.hidden_size))
        base = reshape(base, (2 * taps, groups, group))

        def kernel(index: int) -> Tensor:
            at = constant([index], DType.I32)
            dynamic = reshape(take(delta, at, 2), (*x.shape[:2], groups, 1))
            return add(dynamic, reshape(take(base, at, 0), (1, 1, groups, group)))

        kernels = [kernel(index) for index in range(2 * taps)]
    return Convolution(offsets, kernels[:taps], kernels[taps:])


@dataclass(frozen=True)
class Candidates:
    """The tokens that a drafter's rows may take: of each row its own. See `Scored`."""

    ids: Tensor  # int32 [B, R, C], none twice in a row
    vocab_size: int  # the target's

    def tokens(self, columns: Tensor) -> Tensor:
        """The ids [B, R] of columns [B, R]."""
        index = reshape(columns, (*columns.shape, 1))
        return reshape(gather_last(self.ids, index), columns.shape)

    def spread(self, logits: Tensor, slots: Tensor) -> Tensor:
        """Scores [M, R, C] of slots [M] at the places of their tokens: [M, R, V]."""
        nowhere = constant(np.full((1, 1, self.vocab_size), NEVER), DType.F32)
        return scatter_last(per_row(logits, nowhere), take(self.ids, slots, 0), logits)


def select(
    config: DrafterConfig,
    hidden: Tensor,
    logits: Tensor,
    bonus: Tensor,
    draft_offsets: Tensor,
    vocabulary: Scored | None,
) -> tuple[Tensor, Candidates]:
    """Scores F32 [B, R, C] of each row's candidates behind the likeliest path up to it.

    `hidden` [B, R, H] are the normed rows, `logits` [B, R, N] theirs, of the tokens `vocabulary`;
    `bonus` int32 [B, 1] is the token before the first row. A candidate's score is its logit plus
    how well it follows the token before. The path takes the largest score of each row; of equal
    ones the first, and candidates are sorted by logit.
    """
    dflash2 = config.dflash2
    assert dflash2 is not None
    count = dflash2.selector_top_k
    with scope("drafter.selector"):
        row = sub(draft_offsets, 1)
        unary, columns = topk(logits, constant(count, DType.I32), count)
        # A row of NaN, which only broken weights give, must not lead outside of the codebooks.
        columns = maximum(minimum(columns, config.head_rows - 1), 0)
        ids = columns if vocabulary is None else vocabulary.tokens(columns)
        is_first = reshape(equal(row, 0), (1, DRAFT_ROWS, 1))
        before = where(is_first, reshape(bonus, (*bonus.shape, 1)), _row_before(ids, row, 1))
        scores = _scores(config, dflash2, hidden, unary, before, ids)
        path = _walk(argmax(scores), row, config.block_size - 1)
        # The first row's scores are the same behind all candidates of "the row before".
        flat = reshape(scores, (*scores.shape[:2], count * count))
        start = mul(_row_before(path, row, 1), count)
        index = add(start, constant(np.arange(count).reshape(1, 1, -1), DType.I32))
        return gather_last(flat, index), Candidates(ids, config.vocab_size)


def _scores(
    config: DrafterConfig,
    dflash2: DFlash2Config,
    hidden: Tensor,
    unary: Tensor,
    before: Tensor,
    ids: Tensor,
) -> Tensor:
    """F32 [B, R, C, C]: of candidate `ids`[c], the last axis, behind token `before`[b].

    A pair of tokens fits by a product of three vectors: of the token before, of the row, of the
    token.
    """
    rank, lead = dflash2.selector_rank, hidden.shape[:2]
    count = dflash2.selector_top_k
    weight = LinearWeight(f"{SELECTOR}.hidden_projection.weight", rank)
    state = reshape(linear(hidden, [weight], DType.F32)[0], (*lead, 1, rank))

    def vectors(tokens: Tensor, side: str) -> Tensor:
        name = f"{SELECTOR}.{side}_codebook"
        return cast(embedding(tokens, name, config.vocab_size, rank), DType.F32)

    left = reshape(mul(vectors(before, "predecessor"), state), (*lead, count, 1, rank))
    right = reshape(vectors(ids, "successor"), (*lead, 1, count, rank))
    fit = reduce("sum", mul(left, right))
    return add(fit, reshape(unary, (*lead, 1, count)))


def _walk(follows: Tensor, row: Tensor, max_rows: int) -> Tensor:
    """The path's candidate of each row, int32 [B, R, 1].

    `follows` int32 [B, R, C]: the best candidate of each row behind each of the row before; in the
    first row always the same. Rows are maps from candidates to candidates, and a path is what
    their product up to a row maps any candidate to. Products of 2, 4, .. neighbours come first, so
    few ops wait for each other, and none depends on how many rows there are.
    """
    distance = 1
    while distance < max_rows:
        # A product that reaches the first row maps all to one: what is before it does not matter.
        follows = gather_last(follows, _row_before(follows, row, distance))
        distance *= 2
    return take(follows, constant([0], DType.I32), 2)


def _row_before(x: Tensor, row: Tensor, distance: int) -> Tensor:
    """x [B, R, ..] of so many rows before; of the first row where there is none."""
    return take(x, maximum(sub(row, distance), 0), 1)
