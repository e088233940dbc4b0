"""The keys that targets and drafters share in `config.json`: sizes, attention, layer masks."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_trt.checkpoint.facts import MAX_LAYERS, Facts, brief
from dflash_trt.checkpoint.rope import read_rope
from dflash_trt.config import FULL_ATTENTION, SLIDING_ATTENTION, AttentionConfig, RopeConfig
from dflash_trt.errors import UnsupportedArchitecture


@dataclass(frozen=True)
class Sizes:
    """The numbers that every decoder's config must hold; there is no default for any."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    rms_norm_eps: float
    max_position_embeddings: int


def read_sizes(facts: Facts) -> Sizes:
    """Sizes and epsilon. Raises `CheckpointError` naming the key that is missing or absurd."""
    activation = facts.text("hidden_act") if facts.has("hidden_act") else "silu"
    if activation != "silu":
        raise UnsupportedArchitecture(
            f"{facts.path}: hidden_act {brief(activation)} is not supported, only silu"
        )
    return Sizes(
        vocab_size=facts.integer("vocab_size"),
        hidden_size=facts.integer("hidden_size"),
        intermediate_size=facts.integer("intermediate_size"),
        num_layers=facts.integer("num_hidden_layers", high=MAX_LAYERS),
        rms_norm_eps=facts.number("rms_norm_eps"),
        max_position_embeddings=facts.integer("max_position_embeddings"),
    )


def read_attention(facts: Facts, qk_norm: bool) -> AttentionConfig:
    """Heads, biases and rotary rule of a Hugging Face decoder."""
    num_heads = facts.integer("num_attention_heads", high=65_536)
    # Llama's class documents both rules: no kv heads means one per query head, and no head_dim
    # means hidden_size / heads. Qwen3's class has constants there, so its files must say.
    if facts.has("num_key_value_heads") or qk_norm:
        num_kv_heads = facts.integer("num_key_value_heads", high=65_536)
    else:
        num_kv_heads = num_heads
    if facts.has("head_dim") or qk_norm:
        head_dim = facts.integer("head_dim", high=65_536)
    else:
        head_dim = divided_head_dim(facts, facts.integer("hidden_size"), num_heads)
    bias = facts.flag("attention_bias", default=False)
    return checked_attention(
        facts, num_heads, num_kv_heads, head_dim, qk_norm, (bias, bias), read_rope(facts)
    )


def checked_attention(
    facts: Facts,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    qk_norm: bool,
    biases: tuple[bool, bool],
    rope: RopeConfig,
) -> AttentionConfig:
    """`AttentionConfig` whose rules are checked here, where the file is known."""
    if num_heads % num_kv_heads:
        raise facts.error(
            f"num_attention_heads {num_heads} is not a multiple of "
            f"num_key_value_heads {num_kv_heads}"
        )
    if head_dim % 2:
        raise facts.error(f"head_dim {head_dim} is odd: rotary embedding needs an even one")
    qkv_bias, o_bias = biases
    return AttentionConfig(num_heads, num_kv_heads, head_dim, qk_norm, qkv_bias, o_bias, rope)


def divided_head_dim(facts: Facts, hidden_size: int, num_heads: int) -> int:
    """hidden_size / heads, where a family documents that rule."""
    if hidden_size % num_heads:
        raise facts.error(
            f"head_dim is missing, and hidden_size {hidden_size} is not a multiple of "
            f"the {num_heads} attention heads"
        )
    return hidden_size // num_heads


def read_windows(
    facts: Facts, num_layers: int, window: int | None = None
) -> list[tuple[bool, int | None]]:
    """(is sliding, window) of each layer by Qwen3's rules.

    `use_sliding_window` false takes the window from sliding layers but not their type; without
    `layer_types` the layers from `max_window_layers` on are sliding, if windows are in use.
    `window`: that of all sliding layers, where another key than Qwen3's two gives it.
    """
    in_use = facts.flag("use_sliding_window", default=False)
    if facts.has("layer_types"):
        types = facts.strings("layer_types")
    elif in_use and "sliding_window" not in facts.data:
        facts.fail("sliding_window", "is missing, although use_sliding_window is true")
    elif in_use and facts.has("sliding_window"):
        first = facts.integer("max_window_layers", low=0)
        types = tuple(
            SLIDING_ATTENTION if layer >= first else FULL_ATTENTION for layer in range(num_layers)
        )
    else:
        types = (FULL_ATTENTION,) * num_layers
    if len(types) != num_layers:
        facts.fail("layer_types", f"has {len(types)} entries for {num_layers} layers")
    for name in types:
        if name not in (FULL_ATTENTION, SLIDING_ATTENTION):
            raise UnsupportedArchitecture(
                f"{facts.path}: layer_types has {brief(name)}, which is not supported",
                f"supported: {FULL_ATTENTION}, {SLIDING_ATTENTION}",
            )
    sliding = [name == SLIDING_ATTENTION for name in types]
    if window is None and any(sliding) and not facts.has("use_sliding_window"):
        facts.fail(
            "use_sliding_window",
            "is missing, although layer_types has sliding layers",
            "true if their sliding_window applies, false if not",
        )
    if window is None and any(sliding) and in_use:
        window = facts.integer("sliding_window")
    return [(slides, window if slides else None) for slides in sliding]
