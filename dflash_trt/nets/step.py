"""The step graph: verify, accept, inject, draft. One graph serves prompt chunks and decoding.

The target reads [anchor, d1, ..] causally; the longest prefix of drafts that equals its own choice
is committed together with the anchor; the bonus token after it starts the next block.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dflash_trt import contract as c
from dflash_trt.config import AttentionConfig, PairConfig
from dflash_trt.errors import GraphError
from dflash_trt.graph import (
    DType,
    Graph,
    Tensor,
    add,
    concat,
    constant,
    equal,
    gather_rows,
    iota,
    less,
    logical_and,
    maximum,
    minimum,
    reshape,
    size,
    sub,
    take,
    tracing,
    where,
)
from dflash_trt.graph.compounds import compaction, prefix_count
from dflash_trt.nets.dflash2 import select
from dflash_trt.nets.drafter import (
    Injection,
    draft_hidden,
    draft_logits,
    draft_rows,
    fuse_context,
)
from dflash_trt.nets.layers import Span
from dflash_trt.nets.penalties import Adjustment
from dflash_trt.nets.sampling import DraftVocabulary, Sampling, Scored, Special, choose
from dflash_trt.nets.target import target_forward, target_logits
from dflash_trt.rotary import rotary_tables


def trace_step(
    pair: PairConfig,
    block: int,
    num_positions: int,
    draft_ids: npt.NDArray[np.int32] | None = None,
) -> Graph:
    """The step graph of a pair for `block` (anchor counted); rotary tables of `num_positions`.

    `draft_ids` [draft_vocab_size]: the tokens that the rows of the drafter's head stand for, where
    the pair has a draft vocabulary.
    """
    graph = Graph("step")
    with tracing(graph):
        _step(graph, pair, block, num_positions, _vocabulary(pair, draft_ids))
    return graph


def _vocabulary(
    pair: PairConfig, draft_ids: npt.NDArray[np.int32] | None
) -> DraftVocabulary | None:
    named = None if draft_ids is None else len(draft_ids)
    if named != pair.drafter.draft_vocab_size:
        raise GraphError(f"{named} draft ids, but the head has {pair.drafter.head_rows} rows")
    return None if draft_ids is None else DraftVocabulary(draft_ids, pair.target.vocab_size)


def _step(
    graph: Graph,
    pair: PairConfig,
    block: int,
    num_positions: int,
    vocabulary: DraftVocabulary | None,
) -> None:
    tokens = graph.add_input(c.TOKENS, (c.SLOTS, c.STEP_TOKENS), DType.I32)
    length, count, known = (
        graph.add_input(name, (c.SLOTS,), DType.I32) for name in (c.LENGTH, c.COUNT, c.KNOWN)
    )
    block_offsets = graph.add_input(c.BLOCK_OFFSETS, (c.BLOCK_ROWS,), DType.I32)
    draft_offsets = graph.add_input(c.DRAFT_OFFSETS, (c.DRAFT_ROWS,), DType.I32)
    special = _special_inputs(graph)
    target_kv = _cache_inputs(graph, c.target_caches(pair))
    draft_kv = _cache_inputs(graph, c.draft_caches(pair))
    # An id outside the vocabulary can only be a wrong draft: it must be rejected, not crash.
    in_vocab = _clip(tokens, constant(pair.target.vocab_size - 1, DType.I32))

    # Verify: the target reads the row; its own choice is needed from row known - 1 on.
    step_tokens = size(tokens, 1)
    last = sub(step_tokens, 1)
    seen = _span(pair.target.attention, num_positions, length, iota(step_tokens, c.STEP_TOKENS))
    verified = target_forward(pair.target, in_vocab, seen, target_kv)
    offset = iota(minimum(step_tokens, block), c.VERIFY_ROWS)
    rows = sub(_outer(known, offset), 1)
    logits = target_logits(pair.target, gather_rows(verified.hidden, _clip(rows, last)))
    choice = choose(logits, _outer(add(length, known), offset), special)

    # Accept: the drafts that equal the choice before them, up to the first that does not.
    draft = add(rows, 1)
    is_draft = logical_and(
        less(draft, reshape(count, (c.SLOTS, 1))), less(offset, sub(size(offset, 0), 1))
    )
    matches = equal(choice, gather_rows(tokens, _clip(draft, last)))
    num_accepted = prefix_count(logical_and(matches, is_draft))
    committed = add(known, num_accepted)
    bonus = gather_rows(choice, reshape(num_accepted, (c.SLOTS, 1)))  # [B, 1]

    # Inject and draft: the block [bonus, MASK, ..] sits right behind the committed tokens.
    features = [verified.layer_outputs[i] for i in pair.drafter.target_layer_ids]
    context = fuse_context(pair.drafter, features)
    is_anchor = equal(reshape(block_offsets, (1, c.BLOCK_ROWS)), 0)
    block_ids = where(is_anchor, bonus, constant(pair.drafter.mask_token_id, DType.I32))
    start = add(length, committed)
    attn = pair.drafter.attention
    block_span = _span(attn, num_positions, start, block_offsets)
    kv_rows = compaction(length, committed, step_tokens, size(block_offsets, 0))
    place = Injection(rows=kv_rows, block=block_span, offsets=block_offsets)
    hidden, draft_updated = draft_hidden(pair.drafter, context, block_ids, place, draft_kv)
    hidden = draft_rows(pair.drafter, take(hidden, draft_offsets, 1))
    scores = draft_logits(pair.drafter, hidden)
    scored: Scored | None = vocabulary
    if pair.drafter.dflash2 is not None:
        scores, scored = select(pair.drafter, hidden, scores, bonus, draft_offsets, vocabulary)
    positions = _outer(start, draft_offsets)
    drafted = choose(scores, positions, special.for_drafts(draft_offsets), scored)

    graph.add_output(c.COMMITTED, committed)
    graph.add_output(c.NEXT, concat([bonus, drafted], 1, c.NEXT_TOKENS))
    graph.add_output(c.LOGITS, logits)
    _cache_outputs(graph, c.target_caches(pair), verified.caches)
    _cache_outputs(graph, c.draft_caches(pair), draft_updated)


def _special_inputs(graph: Graph) -> Special:
    def each(name: str, dtype: DType) -> Tensor:
        return graph.add_input(name, (c.SPECIAL,), dtype)

    slots = each(c.SPECIAL_SLOTS, DType.I32)
    source = graph.add_input(c.CHOICE_SOURCE, (c.SLOTS,), DType.I32)
    sampling = Sampling(
        temperature=each(c.TEMPERATURE, DType.F32),
        top_k=each(c.TOP_K, DType.I32),
        top_p=each(c.TOP_P, DType.F32),
        min_p=each(c.MIN_P, DType.F32),
        seed=each(c.SEED, DType.I64),
    )
    rows = (c.SPECIAL, c.VERIFY_ROWS, c.ADJUSTED)
    adjustment = Adjustment(
        repetition=each(c.REPETITION, DType.F32),
        presence=each(c.PRESENCE, DType.F32),
        frequency=each(c.FREQUENCY, DType.F32),
        ids=graph.add_input(c.ADJUST_IDS, rows, DType.I32),
        seen=graph.add_input(c.ADJUST_SEEN, rows, DType.F32),
        count=graph.add_input(c.ADJUST_COUNT, rows, DType.F32),
        bias=graph.add_input(c.ADJUST_BIAS, rows, DType.F32),
    )
    return Special(slots, source, sampling, adjustment)


def _cache_inputs(
    graph: Graph, specs: Sequence[tuple[c.CacheSpec, c.CacheSpec]]
) -> list[tuple[Tensor, Tensor]]:
    def declare(spec: c.CacheSpec) -> Tensor:
        shape = (c.SLOTS, spec.num_heads, c.CAPACITY, spec.head_dim)
        return graph.add_input(spec.name, shape, DType.ACT)

    return [(declare(key), declare(value)) for key, value in specs]


def _cache_outputs(
    graph: Graph,
    specs: Sequence[tuple[c.CacheSpec, c.CacheSpec]],
    caches: Sequence[tuple[Tensor, Tensor]],
) -> None:
    for pair_of_specs, pair_of_caches in zip(specs, caches, strict=True):
        for spec, cache in zip(pair_of_specs, pair_of_caches, strict=True):
            graph.add_output(spec.output, cache)


def _span(attention: AttentionConfig, num_positions: int, start: Tensor, offsets: Tensor) -> Span:
    """Rows offsets [S] behind start [B], with the model's own rotary tables."""
    cos, sin = rotary_tables(attention.rope, attention.head_dim, num_positions)
    return Span(
        start=start,
        positions=_outer(start, offsets),
        kv_length=add(start, size(offsets, 0)),
        cos=constant(cos, DType.F32),
        sin=constant(sin, DType.F32),
    )


def _outer(start: Tensor, offsets: Tensor) -> Tensor:
    """start [B] + offsets [S] -> [B, S]."""
    dim = offsets.shape[0]
    return add(reshape(start, (c.SLOTS, 1)), reshape(offsets, (1, dim)))


def _clip(x: Tensor, high: Tensor) -> Tensor:
    return maximum(minimum(x, high), 0)
