"""Relatives of DFlash v1 that would load and draft badly: recognised by name, and refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dflash_trt.checkpoint.facts import Facts, brief
from dflash_trt.checkpoint.tensors import TensorSource, shown
from dflash_trt.errors import UnsupportedArchitecture

ARCHITECTURE = "DFlashDraftModel"

# Keys of `dflash_config` that this room reads; `mask_token` is only the id's name.
KNOWN_KEYS = frozenset(
    {
        "target_layer_ids", "mask_token_id", "mask_token", "block_size", "causal", "is_causal",
        "use_swa", "swa_window_size", "input_embedding_scale", "output_multiplier",
        "final_logit_softcapping", "target_hidden_size", "num_target_layers", "projector_type",
        "draft_vocab_size", "attention_sink_bias", "attention_value_scale", "logit_scale",
        "is_neox_style", "rope_is_neox_style", "use_aux_hidden_state", "sample_from_anchor",
        "mrope_section", "attention_mode",
    }
)  # fmt: skip
# How others keys begin that are about training, or about when to draft: none changes the network.
_HARMLESS = (
    "attention_backend", "confidence", "loss_", "num_anchors", "num_speculative_tokens",
    "speculative_tokens", "train", "version",
)  # fmt: skip

_OTHER_ARCHITECTURES = {
    "DFlash2DraftModel": "DFlash 2",
    "Qwen3DFlash2Model": "DFlash 2",
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
_FOREIGN_TENSORS = {
    "candidate_selector.": "DFlash 2",
    "_conv.base_kernel": "DFlash 2",
    "_conv.kernel_projection": "DFlash 2",
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
    """Raise `UnsupportedArchitecture` unless `config.json` is that of a DFlash v1 drafter."""
    for key, what in _FOREIGN_KEYS.items():
        if facts.has(key):
            raise _refusal(facts, f"{key} is there: this is {what}")
    names = facts.strings("architectures") if facts.has("architectures") else ()
    if names != (ARCHITECTURE,):
        found = brief(names[0]) if len(names) == 1 else brief(list(names))
        relative = _OTHER_ARCHITECTURES.get(names[0], "") if names else ""
        note = f": this is {relative}" if relative else ""
        raise _refusal(facts, f"architectures is {found}{note}")
    dflash = facts.section("dflash_config")
    projector = first(facts, "projector_type")
    if projector.has("projector_type") and projector.get("projector_type") != "dflash":
        raise _refusal(facts, f"projector_type is {brief(projector.get('projector_type'))}")
    for key in ("selector_rank", "conv_kernel_size", "markov_rank"):
        if first(facts, key).has(key):
            raise _refusal(facts, f"{key} is there: this is DFlash 2 or DSpark")
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


def refuse_foreign_tensors(source: TensorSource, names: Iterable[str]) -> None:
    """Raise `UnsupportedArchitecture` when a tensor belongs to a relative of DFlash v1."""
    for name in names:
        for part, what in _FOREIGN_TENSORS.items():
            if part in name:
                raise UnsupportedArchitecture(
                    f"{source.path}: tensor {shown(name)} is there: this is {what}",
                    "only DFlash v1 drafters are supported",
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
    return UnsupportedArchitecture(
        f"{facts.path}: {found}, which is not supported",
        f"supported drafters: DFlash v1, as z-lab ({ARCHITECTURE}) or speculators store it",
    )
