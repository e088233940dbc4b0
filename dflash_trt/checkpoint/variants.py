"""Relatives of DFlash that would load and draft badly: recognised by name, and refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dflash_trt.checkpoint.facts import Facts, brief
from dflash_trt.checkpoint.tensors import TensorSource, shown
from dflash_trt.errors import UnsupportedArchitecture

ARCHITECTURE, DFLASH2 = "DFlashDraftModel", "DFlash2DraftModel"

# What `dflash_config` or the top level says of a DFlash 2 drafter alone.
DFLASH2_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")

# Keys of `dflash_config` that this room reads; `mask_token` is only the id's name.
KNOWN_KEYS = frozenset(
    {
        "target_layer_ids", "mask_token_id", "mask_token", "block_size", "causal", "is_causal",
        "use_swa", "swa_window_size", "input_embedding_scale", "output_multiplier",
        "final_logit_softcapping", "target_hidden_size", "num_target_layers", "projector_type",
        "draft_vocab_size", "attention_sink_bias", "attention_value_scale", "logit_scale",
        "is_neox_style", "rope_is_neox_style", "use_aux_hidden_state", "sample_from_anchor",
        "mrope_section", "attention_mode", *DFLASH2_KEYS,
    }
)  # fmt: skip
# How others keys begin that are about training, or about when to draft: none changes the network.
_HARMLESS = (
    "attention_backend", "confidence", "loss_", "num_anchors", "num_speculative_tokens",
    "speculative_tokens", "train", "version",
)  # fmt: skip

SUPPORTED = (
    f"supported drafters: DFlash v1 and 2, as z-lab ({ARCHITECTURE}, {DFLASH2}) or speculators "
    "store them"
)

_OTHER_ARCHITECTURES = {
    "Qwen3DFlash2Model": "DFlash 2 under another name",
    "DSparkDraftModel": "DSpark",
    "Qwen3DSparkModel": "DSpark",
    "DFlashSpeculator": "a speculators-format drafter without speculators_model_type",
    "DflashDraftModel": "Open Spec Config",
}
_FOREIGN_KEYS = {
    "open_spec_config_version": "Open Spec Config",
    "jetspec_config": "JetSpec",
}
# Part of a tensor name -> what such a drafter is. Files are more honest than config strings.
_DFLASH2_TENSORS = ("candidate_selector.", "_conv.base_kernel", "_conv.kernel_projection")
_FOREIGN_TENSORS = {
    "markov_head.": "DSpark",
    "markov_w": "DSpark",
    "confidence_head.": "DSpark",
    "prefix_gru.": "Domino",
    "causal_head": "JetSpec",
    "attention_sink_bias": "a drafter with attention sinks (attention_sink_bias)",
    "self_attn.sinks": "a drafter with attention sinks",
    "encoder.fc.": "Muse-Glimmer assistant",
}


def refuse_foreign_config(facts: Facts) -> None:
    """Raise `UnsupportedArchitecture` unless `config.json` is that of a DFlash drafter, v1 or 2."""
    for key, what in _FOREIGN_KEYS.items():
        if facts.has(key):
            raise _refusal(facts, f"{key} is there: this is {what}")
    names = facts.strings("architectures") if facts.has("architectures") else ()
    if names not in ((ARCHITECTURE,), (DFLASH2,)):
        found = brief(names[0]) if len(names) == 1 else brief(list(names))
        relative = _OTHER_ARCHITECTURES.get(names[0], "") if names else ""
        note = f": this is {relative}" if relative else ""
        raise _refusal(facts, f"architectures is {found}{note}")
    dflash = facts.section("dflash_config")
    projector = first(facts, "projector_type")
    if projector.has("projector_type") and projector.get("projector_type") != "dflash":
        raise _refusal(facts, f"projector_type is {brief(projector.get('projector_type'))}")
    if first(facts, "markov_rank").has("markov_rank"):
        raise _refusal(facts, "markov_rank is there: this is DSpark")
    for key in DFLASH2_KEYS:
        if first(facts, key).has(key) and not is_dflash2(facts):
            raise _refusal(facts, f"architectures is {brief(names[0])} with DFlash 2's {key}")
    _refuse_options(facts, dflash)
    for key in unused_keys(facts.data):
        value = dflash.get(key)
        # null, false and 0 are what an option says that is off
        if value not in (None, False, 0) and not key.startswith(_HARMLESS):
            raise UnsupportedArchitecture(
                f"{facts.path}: dflash_config.{brief(key)[1:-1]} is {brief(value)}: what it does "
                "to the drafter is unknown",
                "if it does nothing to the network, remove it from config.json",
            )


def is_dflash2(facts: Facts) -> bool:
    """Whether the config says so."""
    return facts.has("architectures") and facts.strings("architectures") == (DFLASH2,)


def refuse_foreign_tensors(source: TensorSource, names: Iterable[str], dflash2: bool) -> None:
    """Raise `UnsupportedArchitecture` when the tensors are not those of the config's kind.

    `dflash2`: that is DFlash 2, else v1.
    """
    own = [name for name in names if any(part in name for part in _DFLASH2_TENSORS)]
    if own and not dflash2:
        raise UnsupportedArchitecture(
            f"{source.path}: tensor {shown(own[0])} is there: this is DFlash 2, but config.json "
            f"does not say {DFLASH2}",
            "download the drafter again, or use its own config.json",
        )
    if dflash2 and not own:
        raise UnsupportedArchitecture(
            f"{source.path}: config.json says {DFLASH2}, but there is no tensor of DFlash 2's, "
            f"such as {_DFLASH2_TENSORS[0]}*",
            "download the drafter again, or use its own config.json",
        )
    for name in names:
        for part, what in _FOREIGN_TENSORS.items():
            if part in name:
                raise UnsupportedArchitecture(
                    f"{source.path}: tensor {shown(name)} is there: this is {what}", SUPPORTED
                )


def unused_keys(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Keys of `dflash_config` that nothing here reads, in file order."""
    nested = config.get("dflash_config")
    if not isinstance(nested, Mapping):
        return ()
    return tuple(key for key in nested if key not in KNOWN_KEYS)


def first(facts: Facts, key: str) -> Facts:
    """Where a drafter option stands: in `dflash_config` if there, else at top level."""
    dflash = facts.section("dflash_config")
    return dflash if dflash.has(key) else facts


def _refuse_options(facts: Facts, dflash: Facts) -> None:
    """Options of v1 files whose arithmetic we do not have."""
    for place in (dflash, facts):
        for key in ("is_neox_style", "rope_is_neox_style", "use_aux_hidden_state"):
            if not place.flag(key, default=True):
                raise _refusal(facts, f"{key} is false")
        if place.flag("sample_from_anchor", default=False):
            raise _refusal(facts, "sample_from_anchor is true")
        sinks = place.get("attention_sink_bias")
        if sinks not in (None, False):
            raise _refusal(facts, f"attention_sink_bias is {brief(sinks)}: attention sinks")
        for key in ("attention_value_scale", "logit_scale"):
            if place.has(key) and place.number(key) != 1.0:
                raise _refusal(facts, f"{key} is {brief(place.get(key))}")
        if place.has("mrope_section"):
            raise _refusal(facts, "mrope_section is there: multimodal rotary positions")
    mode = dflash.get("attention_mode")
    if mode not in (None, "gqa", "mha"):
        raise _refusal(facts, f"dflash_config.attention_mode is {brief(mode)}")


def _refusal(facts: Facts, found: str) -> UnsupportedArchitecture:
    return UnsupportedArchitecture(f"{facts.path}: {found}, which is not supported", SUPPORTED)
