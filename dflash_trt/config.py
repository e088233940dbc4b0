"""Facts of a target and drafter, and the choices of a build; frozen, validated, JSON both ways.

Facts are read from checkpoints and never defaulted; choices come from flags and recipes.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from dflash_trt.errors import ConfigError
from dflash_trt.flavor import device_of, precision_on

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of one model, half-split (NeoX) layout, over the whole head.

    `kind` names the frequency rule as Hugging Face does (`rope_type`); `params` holds exactly the
    fields that rule needs, e.g. llama3: factor, low_freq_factor, high_freq_factor,
    original_max_position_embeddings; yarn: factor, original_max_position_embeddings and optional
    attention_factor, beta_fast, beta_slow, mscale, mscale_all_dim, truncate; linear: factor;
    table: divisors (a tuple of head_dim/2 floats, GGUF's `rope_freqs`).
    """

    theta: float
    kind: Literal["default", "linear", "llama3", "yarn", "table"] = "default"
    params: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class AttentionConfig:
    """Shape and rules of one model's attention: the same in all its layers but for the mask."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool
    rope: RopeConfig

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_attention_heads {self.num_heads} is not a multiple of "
                f"num_key_value_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(
                f"head_dim {self.head_dim} is odd: rotary embedding needs an even one"
            )


@dataclass(frozen=True)
class LayerMask:
    """Which keys a query sees: `causal`: none behind it; `window`: so many back (None: all)."""

    causal: bool
    window: int | None = None


@dataclass(frozen=True)
class TargetConfig:
    """Facts of the target model (families `qwen3`, `llama`)."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    mlp_bias: bool
    attention: AttentionConfig
    masks: tuple[LayerMask, ...]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None


@dataclass(frozen=True)
class DFlash2Config:
    """What DFlash 2 adds to a drafter: convolutions in each layer, and a selector of drafts.

    `taps` rows of the block count for each row of a convolution; `group_size` channels share what
    is dynamic in a kernel. The selector scores pairs of neighbouring tokens by vectors of
    `selector_rank` numbers, for the `selector_top_k` likeliest tokens of each row.
    """

    taps: int
    group_size: int
    selector_rank: int
    selector_top_k: int

    def __post_init__(self) -> None:
        for field_ in dataclasses.fields(self):
            if getattr(self, field_.name) < 1:
                raise ConfigError(f"{field_.name} is {getattr(self, field_.name)}, not above 0")


@dataclass(frozen=True)
class DrafterConfig:
    """Facts of a DFlash drafter. `block_size` counts the anchor: K-1 drafts per block.

    In a pair, `vocab_size` counts the rows of the embedding and head that it uses, be they its own
    or the target's. `draft_vocab_size` counts the rows of a head that scores some tokens only,
    those of the draft vocabulary; None: it scores all. `dflash2` is None for DFlash v1.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    rms_norm_eps: float
    max_position_embeddings: int
    attention: AttentionConfig
    masks: tuple[LayerMask, ...]
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    target_hidden_size: int
    own_embedding: bool
    own_lm_head: bool
    input_embedding_scale: float
    output_multiplier: float
    final_logit_softcapping: float | None
    draft_vocab_size: int | None = None
    dflash2: DFlash2Config | None = None

    def __post_init__(self) -> None:
        if self.dflash2 is None:
            return
        if self.hidden_size % self.dflash2.group_size:
            raise ConfigError(
                f"hidden_size {self.hidden_size} is not a multiple of the convolutions' group "
                f"size {self.dflash2.group_size}"
            )
        if self.dflash2.selector_top_k > self.head_rows:
            raise ConfigError(
                f"the selector chooses among {self.dflash2.selector_top_k} tokens, but the "
                f"drafter's head scores {self.head_rows}"
            )

    @property
    def head_rows(self) -> int:
        """How many tokens the head scores."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size


def max_positions(model: TargetConfig | DrafterConfig) -> int:
    """How many positions a model is made for.

    Files with a llama3 rule state the stretched number as `max_position_embeddings`. Those with
    YaRN's often keep the one before, as Qwen3's documentation has it.
    """
    rope = model.attention.rope
    if rope.kind != "yarn":
        return model.max_position_embeddings
    stretched = rope.params["factor"] * rope.params["original_max_position_embeddings"]
    return max(model.max_position_embeddings, int(stretched))


@dataclass(frozen=True)
class PairConfig:
    """A target and a drafter that were checked together (`checkpoint.pair`)."""

    target: TargetConfig
    drafter: DrafterConfig

    def to_json(self) -> dict[str, Any]:
        """Plain lists and dicts, as stored in the engine directory."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> PairConfig:
        """Inverse of `to_json`. Raises `ConfigError` for a missing, unknown or mistyped field."""
        try:
            return cls(
                target=_model_from_json(TargetConfig, data["target"]),
                drafter=_model_from_json(DrafterConfig, data["drafter"]),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"the pair's facts cannot be read: {error!r}") from error


def _model_from_json(cls: type[Any], data: dict[str, Any]) -> Any:
    fields = dict(data)
    attention = dict(fields["attention"])
    rope = dict(attention["rope"])
    # JSON has no tuples: facts compare equal only after the way back.
    rope["params"] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in rope["params"].items()
    }
    attention["rope"] = _typed(RopeConfig, rope)
    fields["attention"] = _typed(AttentionConfig, attention)
    fields["masks"] = tuple(_typed(LayerMask, mask) for mask in fields["masks"])
    if fields.get("dflash2") is not None:
        fields["dflash2"] = _typed(DFlash2Config, fields["dflash2"])
    for name in ("eos_token_ids", "target_layer_ids"):
        if name in fields:
            fields[name] = tuple(fields[name])
    model = _typed(cls, fields)
    if len(model.masks) != model.num_layers:
        raise ConfigError(f"there are {len(model.masks)} masks for {model.num_layers} layers")
    return model


def _typed(cls: type[Any], fields: dict[str, Any]) -> Any:
    """An instance whose fields have the types that the class gives them."""
    hints = get_type_hints(cls)
    for name, value in dict(fields).items():
        if name in hints and not _has_type(value, hints[name]):
            raise ConfigError(f"{name} is {value!r}, which is not of type {hints[name]}")
    return cls(**fields)


def _has_type(value: object, hint: Any) -> bool:
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return value in args
    if origin is tuple:
        return isinstance(value, tuple) and all(_has_type(item, args[0]) for item in value)
    if origin is UnionType:
        return any(_has_type(value, arg) for arg in args)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, origin or hint) and (hint is bool or not isinstance(value, bool))


@dataclass(frozen=True)
class BuildChoices:
    """What the user chooses for an engine. Flags and recipe fields are these fields.

    `block` counts the anchor; `max_seq_len` counts prompt and generated tokens of one request.
    `logits`: the engine can return them, for logprobs; an engine for the CPU always can.
    """

    block: int
    max_seq_len: int
    precision: str = "fp32"
    max_slots: int = 4
    prefill_chunk: int = 256
    device: str = "cpu"
    logits: bool = True

    def __post_init__(self) -> None:
        device = device_of(self.device)
        precision_on(device, self.precision)
        for name, low, high in (
            ("block", 2, 64),
            ("max_seq_len", 2, 1 << 20),
            ("max_slots", 1, 256),
            ("prefill_chunk", 1, 8192),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ConfigError(f"{name} must be a whole number, not {value!r}", choice=name)
            if not low <= value <= high:
                raise ConfigError(f"{name} is {value}, allowed are {low} to {high}", choice=name)
        if not isinstance(self.logits, bool):
            raise ConfigError(f"logits must be true or false, not {self.logits!r}", choice="logits")
        if not (self.logits or device.is_gpu):
            raise ConfigError("logits is false: an engine for the CPU always has them")
