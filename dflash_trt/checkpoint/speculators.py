"""Drafters in the format of vLLM's `speculators` library, retold in z-lab's words.

The body is DFlash's, v1 or 2. The decoder's facts stand in `transformer_layer_config`, the
drafter's at top level; layer ids count what ENTERS a layer, and so are one higher than z-lab's.
"""

from __future__ import annotations

from typing import Any

from dflash_trt.checkpoint.facts import Facts, brief
from dflash_trt.checkpoint.variants import ARCHITECTURE, DFLASH2, DFLASH2_KEYS
from dflash_trt.errors import UnsupportedArchitecture

DECODER, KIND, LAYER_IDS = (
    "transformer_layer_config", "speculators_model_type", "aux_hidden_state_layer_ids"
)  # fmt: skip
# What its files hold for training alone.
TRAINING_TENSORS = ("verifier_norm.", "verifier_lm_head.")

# Per kind: its class as z-lab calls it, other names of that, and whether sliding layers are without
# causality where the config does not say (the defaults of the two config classes).
_KINDS = {"dflash": (ARCHITECTURE, ("DFlashSpeculator",), False), "dflash2": (DFLASH2, (), True)}
_DRAFTING = (
    "block_size", "mask_token_id", "draft_vocab_size", "target_hidden_size", *DFLASH2_KEYS
)  # fmt: skip
# Read here, or not about the network.
_NOT_CARRIED = {
    DECODER, KIND, LAYER_IDS, "sliding_window_non_causal", "architectures", "model_type",
    "auto_map", "speculators_config", "speculators_version", "tie_word_embeddings",
}  # fmt: skip


def is_speculators(facts: Facts) -> bool:
    """Whether a drafter's config is in this format."""
    return facts.has(KIND) or facts.has("speculators_config") or facts.has(DECODER)


def plain_facts(facts: Facts) -> Facts:
    """The same drafter's facts under z-lab's keys.

    Raises `UnsupportedArchitecture` for another kind of speculator, and `CheckpointError` naming
    the key that is missing or wrong.
    """
    kind = facts.text(KIND)
    names = facts.strings("architectures") if facts.has("architectures") else ()
    architecture, others, non_causal = _KINDS.get(kind, ("", (), False))
    if any(name not in (architecture, *others) for name in names) or not architecture:
        found = brief(list(names)) if architecture else brief(kind)
        raise UnsupportedArchitecture(
            f"{facts.path}: this is a speculator of kind {found}, which is not supported",
            "supported: dflash (DFlash v1), dflash2 (DFlash 2)",
        )
    decoder = facts.section(DECODER)
    if not facts.has(DECODER):
        facts.fail(DECODER, "is missing", "a fact about the model must come from its files")
    if decoder.text("model_type") not in ("qwen3", "llama"):
        decoder.fail(
            "model_type", f"is {brief(decoder.get('model_type'))}, expected qwen3 or llama"
        )
    # Null counts as absent: it takes nothing from what the decoder's part says.
    carried = {key: facts.get(key) for key in facts.data if facts.has(key)}
    carried = {key: value for key, value in carried.items() if key not in _NOT_CARRIED}
    drafting = {key: carried.pop(key) for key in _DRAFTING if key in carried}
    # Nothing writes one beside these keys; what is in it is judged as in z-lab's files.
    own = facts.section("dflash_config").data
    dflash: dict[str, Any] = {**own, **drafting, "target_layer_ids": _layer_ids(facts)}
    if facts.flag("sliding_window_non_causal", default=non_causal):
        dflash["causal"] = False
    return Facts(
        facts.path,
        {**decoder.data, **carried, "architectures": [architecture], "dflash_config": dflash},
        notes=facts.notes,
    )


def _layer_ids(facts: Facts) -> list[int]:
    """Whose OUTPUT the drafter sees, as z-lab counts."""
    if not facts.has(LAYER_IDS):
        facts.fail(
            LAYER_IDS,
            "is missing",
            "other tools guess the layers; a wrong guess drafts badly in silence",
        )
    entered = facts.integers(LAYER_IDS)
    if 0 in entered:
        facts.fail(LAYER_IDS, f"is {list(entered)}: 0 is the embedding, which is no layer's output")
    return [layer - 1 for layer in entered]
