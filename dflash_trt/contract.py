"""Names, dims and types of the step graph's inputs and outputs: what both halves share.

The build half declares the graph with these names; the run half binds memory to them.
"""

from __future__ import annotations

from dataclasses import dataclass

from dflash_trt.config import AttentionConfig, BuildChoices, PairConfig
from dflash_trt.flavor import PRECISION_TABLE

# Named dims. The letters are those of the shape comments.
SLOTS = "slots"  # B: rows of the step, each one a slot
STEP_TOKENS = "step_tokens"  # S: columns of the step
CAPACITY = "capacity"  # C: rows of every cache
VERIFY_ROWS = "verify_rows"  # R = min(S, K): rows whose logits are read
BLOCK_ROWS = "block_rows"  # K, or 0 in a step that only verifies
DRAFT_ROWS = "draft_rows"  # block rows whose logits are read, at most K - 1
KV_ROWS = "kv_rows"  # S + block_rows: rows that a step writes into a drafter cache
SPECIAL = "special"  # M: slots whose choice is more than their largest logit, 0 in greedy steps
ADJUSTED = "adjusted"  # P: token ids whose logits a step adjusts, 0 in most steps
NEXT_TOKENS = "next_width"  # 1 + draft_rows

DECODE, PREFILL = "decode", "prefill"  # optimization profiles of a TensorRT engine

OTHER_ADJUSTED = 512  # ids that are adjusted though not in the text: biases, banned words, ends

# TensorRT wants addresses that are multiples of 256 bytes: 16 rows of 8 or more 2-byte columns.
CACHE_ROWS_STEP = 16

# Inputs.
TOKENS = "tokens"  # int32 [B, S]: a prompt chunk, or [anchor, d1, ..]
LENGTH = "length"  # int32 [B]: tokens already committed; token i of a row sits at length + i
COUNT = "count"  # int32 [B]: valid tokens of the row, 0 for an idle row
KNOWN = "known"  # int32 [B]: leading tokens committed without question
BLOCK_OFFSETS = "block_offsets"  # int32 [block_rows]: 0..K-1, or empty to draft nothing
DRAFT_OFFSETS = "draft_offsets"  # int32 [draft_rows]: the block rows to read drafts from, 1..
# The choice of a slot is its largest logit, unless it samples or its logits are adjusted. Only such
# slots have a line in the inputs of dim M, so a step pays for them alone; a line may repeat.
SPECIAL_SLOTS = "special_slots"  # int32 [M]: rows of the step, 0..B-1
CHOICE_SOURCE = "choice_source"  # int32 [B]: b for a slot that is not listed, B + m for line m
TEMPERATURE = "temperature"  # float32 [M]: 0 is greedy
TOP_K = "top_k"  # int32 [M]: 0 is off
TOP_P = "top_p"  # float32 [M]: 1 is off
MIN_P = "min_p"  # float32 [M]: 0 is off
SEED = "seed"  # int64 [M]
REPETITION = "repetition_penalty"  # float32 [M]: 1 is off
PRESENCE = "presence_penalty"  # float32 [M]
FREQUENCY = "frequency_penalty"  # float32 [M]
# For each verified row, the ids that its history or a ban touches. The host knows the drafts before
# they are verified, so each row's history is exact: it holds the drafts before that row.
ADJUST_IDS = "adjust_ids"  # int32 [M, R, P]; an id may repeat with equal values (padding)
ADJUST_SEEN = "adjust_seen"  # float32 [M, R, P]: 1 where the id is in prompt or output
ADJUST_COUNT = "adjust_count"  # float32 [M, R, P]: times in the output
ADJUST_BIAS = "adjust_bias"  # float32 [M, R, P]: added; hugely negative bans the id

INPUTS = (
    TOKENS, LENGTH, COUNT, KNOWN, BLOCK_OFFSETS, DRAFT_OFFSETS, SPECIAL_SLOTS, CHOICE_SOURCE,
    TEMPERATURE, TOP_K, TOP_P, MIN_P, SEED, REPETITION, PRESENCE, FREQUENCY,
    ADJUST_IDS, ADJUST_SEEN, ADJUST_COUNT, ADJUST_BIAS,
)  # fmt: skip

# Outputs.
COMMITTED = "committed"  # int32 [B]: known + num_accepted
NEXT = "next_tokens"  # int32 [B, 1 + draft_rows]: [bonus, d1, ..], the next step's row
LOGITS = "logits"  # float32 [B, R, V]: the target's, for the verified rows; bound on request only
UPDATED = "updated_"  # prefix of a cache's output name; bound to the memory of the input


@dataclass(frozen=True)
class CacheSpec:
    """One key or value cache: [slots, num_heads, capacity, head_dim] in the activation type."""

    name: str
    num_heads: int
    head_dim: int

    @property
    def output(self) -> str:
        """Name of the graph output that aliases this cache."""
        return UPDATED + self.name


def target_caches(pair: PairConfig) -> list[tuple[CacheSpec, CacheSpec]]:
    """(key, value) cache of each target layer."""
    return _caches("target", pair.target.num_layers, pair.target.attention)


def draft_caches(pair: PairConfig) -> list[tuple[CacheSpec, CacheSpec]]:
    """(key, value) cache of each drafter layer."""
    return _caches("draft", pair.drafter.num_layers, pair.drafter.attention)


def all_caches(pair: PairConfig) -> list[CacheSpec]:
    """Every cache, in the order of the graph's inputs."""
    return [spec for kv in target_caches(pair) + draft_caches(pair) for spec in kv]


def cache_rows(max_seq_len: int, block: int) -> int:
    """Rows a cache needs: a step may write a verify block and a draft block past the last token.

    Rounded up to `CACHE_ROWS_STEP`, which makes every slot's cache start where TensorRT wants it.
    """
    return -(-(max_seq_len + 2 * block) // CACHE_ROWS_STEP) * CACHE_ROWS_STEP


def cache_bytes_per_slot(pair: PairConfig, choices: BuildChoices) -> int:
    """Bytes of all caches of one slot in the type that the engine computes in, at their longest."""
    size = PRECISION_TABLE[choices.precision].compute_bytes
    row_bytes = sum(size * spec.num_heads * spec.head_dim for spec in all_caches(pair))
    return row_bytes * cache_rows(choices.max_seq_len, choices.block)


@dataclass(frozen=True)
class Profile:
    """What one optimization profile of a TensorRT engine serves, by named dim."""

    name: str
    dims: dict[str, tuple[int, int, int]]  # least, tuned for, most


def profiles(choices: BuildChoices, vocab_size: int) -> tuple[Profile, Profile]:
    """(decode, prefill): a row of at most K tokens of each slot, and a prompt chunk of one slot.

    In this order: TensorRT takes the shapes that an engine reports from its first profile, and
    prefill's single slot would become a constant there.
    """
    chunk, block = choices.prefill_chunk, choices.block
    most_ids = max_adjusted(choices, vocab_size)

    def profile(name: str, slots: int, tokens: int) -> Profile:
        verified = min(tokens, block)
        dims = {
            SLOTS: (1, slots, slots),
            STEP_TOKENS: (1, tokens, tokens),
            VERIFY_ROWS: (1, verified, verified),
            SPECIAL: (0, slots, slots),
            ADJUSTED: (1, 1, most_ids),
        }
        return Profile(name, dims)

    return profile(DECODE, choices.max_slots, block), profile(PREFILL, 1, chunk)


def max_adjusted(choices: BuildChoices, vocab_size: int) -> int:
    """Ids that one slot's history, drafts, biases and bans can touch in a step on a GPU."""
    return min(vocab_size, choices.max_seq_len + choices.block + OTHER_ADJUSTED)


def build_properties(block: int, max_seq_len: int) -> dict[str, str]:
    """What a graph was built for and its inputs do not show: kept in the model, checked at load."""
    return {"block": str(block), "max_seq_len": str(max_seq_len)}


def _caches(
    model: str, num_layers: int, attention: AttentionConfig
) -> list[tuple[CacheSpec, CacheSpec]]:
    def spec(kind: str, layer: int) -> CacheSpec:
        name = f"{model}_{kind}_{layer}"
        return CacheSpec(name, attention.num_kv_heads, attention.head_dim)

    return [(spec("k", layer), spec("v", layer)) for layer in range(num_layers)]
