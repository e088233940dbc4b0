"""DFlash drafters, v1 and 2: `config.json` as facts, plus checked tensors."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash_trt.checkpoint.draft_vocab import TO_DRAFT, TO_TARGET, DraftIds, stored_ids
from dflash_trt.checkpoint.facts import Facts, brief
from dflash_trt.checkpoint.locate import MASK_EMBEDDINGS
from dflash_trt.checkpoint.model_facts import Sizes, read_attention, read_sizes, read_windows
from dflash_trt.checkpoint.quantized import read_quantized
from dflash_trt.checkpoint.quantized_config import Quantization, read_quantization
from dflash_trt.checkpoint.safetensors import SafetensorsSource
from dflash_trt.checkpoint.shapes import (
    SELECTOR,
    SIDES,
    check_layer_count,
    check_shapes,
    drafter_shapes,
)
from dflash_trt.checkpoint.speculators import TRAINING_TENSORS, is_speculators, plain_facts
from dflash_trt.checkpoint.target import config_facts
from dflash_trt.checkpoint.tensors import RenamedSource, TensorSource
from dflash_trt.checkpoint.variants import (
    first,
    is_dflash2,
    refuse_foreign_config,
    refuse_foreign_tensors,
    unused_keys,
)
from dflash_trt.config import DFlash2Config, DrafterConfig, LayerMask
from dflash_trt.errors import BadTensor, UnsupportedArchitecture

EMBEDDING = "embed_tokens.weight"
LM_HEAD = "lm_head.weight"
MAX_BLOCK = 1024  # rows, the anchor counted
# A step compares every two candidates of neighbouring rows by vectors of the selector's rank.
MAX_CANDIDATES, MAX_RANK = 64, 1024

_CODEBOOK = re.compile(rf"({re.escape(SELECTOR)}({'|'.join(SIDES)})_codebook)\.weight")
_ROTARY_BUFFER = re.compile(r"(layers\.\d+\.self_attn\.)?rotary_emb\.(original_)?inv_freq")


@dataclass(frozen=True)
class Drafter:
    """A drafter that was read and whose tensors fit its config; `notes` are for the user.

    `draft_ids` int32 [draft_vocab_size]: the tokens of its draft vocabulary, if it has one.
    """

    config: DrafterConfig
    source: TensorSource
    notes: tuple[str, ...]
    draft_ids: DraftIds | None = None
    quantization: Quantization | None = None


def open_drafter(path: Path) -> Drafter:
    """Read a drafter's facts and check its tensors; no weight bytes are read.

    Raises a `CheckpointError` that names the file and the key or tensor.
    """
    if os.path.isfile(path):
        raise UnsupportedArchitecture(
            f"{path}: a drafter must be a folder with config.json and safetensors; "
            "GGUF drafters are not supported",
            "use the original drafter from the Hub",
        )
    notes: list[str] = []
    facts, quantization = _facts(path, notes)
    source = _plain_names(read_quantized(SafetensorsSource(path), quantization, notes))
    refuse_foreign_tensors(source, source.names(), is_dflash2(facts))
    rows = _draft_vocab_size(facts)
    ids = stored_ids(source, facts.integer("vocab_size"), rows)
    if ids is None and rows is not None:
        facts.fail(
            "draft_vocab_size",
            f"is {rows} of {facts.get('vocab_size')} tokens, but no tensor {TO_TARGET} says which",
            "download the drafter again, or export it with its vocabulary",
        )
    source = _without_tables(facts, source)
    config = _config(facts, source.names(), None if ids is None else len(ids))
    check_layer_count(config.num_layers, source)
    check_shapes(drafter_shapes(config), source)
    for key in unused_keys(facts.data):
        facts.note(f"dflash_config.{brief(key)[1:-1]} is not used")
    return Drafter(config, source, tuple(notes), ids, quantization)


def folder_config(folder: Path) -> DrafterConfig:
    """The facts of a folder's config alone; the tensors may not be there yet.

    Whether it has an embedding and a head of its own is then unknown: it is taken to have both.
    """
    facts, _ = _facts(folder, [])
    return _config(facts, [EMBEDDING, LM_HEAD], _draft_vocab_size(facts))


def read_drafter_config(path: Path) -> DrafterConfig:
    """Only the facts of `open_drafter`; what the user should know goes to `warnings`."""
    drafter = open_drafter(path)
    for note in drafter.notes:
        warnings.warn(note, stacklevel=2)
    return drafter.config


def _facts(folder: Path, notes: list[str]) -> tuple[Facts, Quantization | None]:
    facts = config_facts(folder, notes)
    if is_speculators(facts):
        facts = plain_facts(facts)
    refuse_foreign_config(facts)
    quantization = read_quantization(facts)
    side_files = sorted(folder.glob(MASK_EMBEDDINGS))
    if side_files:
        raise UnsupportedArchitecture(
            f"{side_files[0]}: a mask embedding in a side file is not supported",
            "without it nearly no draft would be accepted; use a drafter that has none",
        )
    return facts, quantization


def _plain_names(source: TensorSource) -> TensorSource:
    """Without the optional `model.` prefix and without rotary tables, which the config implies.

    Codebooks are stored by one name or the other: with `.weight` where a tool made layers of them.
    """
    stored: dict[str, str] = {}
    for name in source.names():
        plain = _CODEBOOK.sub(r"\1", name.removeprefix("model."))
        if _ROTARY_BUFFER.fullmatch(plain):
            continue
        if plain in stored:
            one, other = sorted((stored[plain], name), key=len)
            raise BadTensor(f"{source.path}: has both {one} and {other}")
        stored[plain] = name
    return RenamedSource(source, stored)


def _without_tables(facts: Facts, source: TensorSource) -> TensorSource:
    """Without the tables of a draft vocabulary, which are no weights, and what is for training."""
    names = [name for name in source.names() if name not in (TO_TARGET, TO_DRAFT)]
    kept = [name for name in names if not name.startswith(TRAINING_TENSORS)]
    if len(kept) < len(names):
        left = next(name for name in names if name not in kept)
        facts.note(f"tensor {left} is not used: it is for training")
    return RenamedSource(source, {name: name for name in kept})


def _draft_vocab_size(facts: Facts) -> int | None:
    """How many tokens the drafter can draft, where these are not all.

    More rows than the vocabulary has are padding. A head that has them is refused for its shape.
    """
    place = first(facts, "draft_vocab_size")
    rows = place.optional_integer("draft_vocab_size", low=1)
    if rows is None or rows == facts.integer("vocab_size"):
        return None
    if rows > facts.integer("vocab_size"):
        numbers = f"draft_vocab_size is {rows} and vocab_size {facts.get('vocab_size')}"
        facts.note(f"{numbers}: the former is not used")
        return None
    return rows


def _config(facts: Facts, names: Sequence[str], draft_vocab_size: int | None) -> DrafterConfig:
    sizes = read_sizes(facts)
    block_size = _both(facts, "block_size").integer("block_size", low=2, high=MAX_BLOCK)
    softcap = first(facts, "final_logit_softcapping")
    cap = (
        softcap.number("final_logit_softcapping", low=-1e300)
        if softcap.has("final_logit_softcapping")
        else 0.0
    )
    target_hidden = first(facts, "target_hidden_size")
    masks = _masks(facts, sizes, block_size)
    return DrafterConfig(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_layers=sizes.num_layers,
        rms_norm_eps=sizes.rms_norm_eps,
        max_position_embeddings=sizes.max_position_embeddings,
        attention=read_attention(facts, qk_norm=True),
        masks=masks,
        block_size=block_size,
        mask_token_id=_both(facts, "mask_token_id").integer("mask_token_id", low=0),
        target_layer_ids=_layer_ids(facts),
        num_target_layers=first(facts, "num_target_layers").optional_integer(
            "num_target_layers", low=1
        ),
        # The reference makes fc that wide when the key is absent; fc's shape is checked after.
        target_hidden_size=target_hidden.optional_integer("target_hidden_size", low=1)
        or sizes.hidden_size,
        own_embedding=EMBEDDING in names,
        own_lm_head=LM_HEAD in names,
        input_embedding_scale=_scale(facts, "input_embedding_scale"),
        output_multiplier=_scale(facts, "output_multiplier"),
        final_logit_softcapping=cap if cap > 0 else None,  # the reference's own rule
        draft_vocab_size=draft_vocab_size,
        dflash2=_dflash2(facts, sizes, block_size, draft_vocab_size, masks)
        if is_dflash2(facts)
        else None,
    )


def _dflash2(
    facts: Facts,
    sizes: Sizes,
    block_size: int,
    draft_vocab_size: int | None,
    masks: Sequence[LayerMask],
) -> DFlash2Config:
    def number(key: str, high: int) -> int:
        return first(facts, key).integer(key, high=high)

    group = number("conv_group_size", sizes.hidden_size)
    if sizes.hidden_size % group:
        place, hidden = first(facts, "conv_group_size"), sizes.hidden_size
        place.fail("conv_group_size", f"is {group}, which does not divide hidden_size {hidden}")
    if any(mask.causal for mask in masks):
        raise UnsupportedArchitecture(
            f"{facts.path}: has causal layers, which no DFlash 2 drafter has",
            "is_causal must be false; in speculators' format sliding_window_non_causal true",
        )
    scored = sizes.vocab_size if draft_vocab_size is None else draft_vocab_size
    return DFlash2Config(
        taps=number("conv_kernel_size", block_size),
        group_size=group,
        selector_rank=number("selector_rank", MAX_RANK),
        selector_top_k=number("selector_top_k", min(scored, MAX_CANDIDATES)),
    )


def _both(facts: Facts, key: str) -> Facts:
    """Like `first`, with a note when `dflash_config` and the top level differ."""
    place = first(facts, key)
    if place is not facts and facts.has(key) and facts.get(key) != place.get(key):
        facts.note(
            f"{key} is {brief(facts.get(key))} at top level and {brief(place.get(key))} in "
            "dflash_config; the latter is used"
        )
    return place


def _scale(facts: Facts, key: str) -> float:
    place = first(facts, key)
    return place.number(key) if place.has(key) else 1.0


def _layer_ids(facts: Facts) -> tuple[int, ...]:
    """Whose outputs the drafter sees, in the order of fc's column blocks. Never guessed."""
    place = _both(facts, "target_layer_ids")
    if not place.has("target_layer_ids"):
        facts.fail(
            "dflash_config.target_layer_ids",
            "is missing",
            "other tools guess the layers; a wrong guess drafts badly in silence",
        )
    ids = place.integers("target_layer_ids")
    if len(set(ids)) != len(ids):
        place.fail("target_layer_ids", f"{list(ids)} has an id twice")
    return ids


def _masks(facts: Facts, sizes: Sizes, block_size: int) -> tuple[LayerMask, ...]:
    """Per layer: explicit causality for all, else causal exactly where the layer is sliding.

    `dflash_config` may have two keys of vLLM's, which ModelOpt writes: `swa_window_size` is the
    window of sliding layers. Where no layer is sliding, `use_swa` gives it to all, and makes none
    causal.
    """
    dflash = facts.section("dflash_config")
    causal = _causality(facts, dflash)
    window = dflash.optional_integer("swa_window_size") or None  # 0: none
    layers = read_windows(facts, sizes.num_layers, window)
    if any(slides for slides, _ in layers):
        in_use = facts.flag("use_sliding_window", default=True)
        other = facts.optional_integer("sliding_window", low=1) if in_use else None
        if window is not None and other not in (None, window):
            dflash.fail("swa_window_size", f"is {window}, but sliding_window is {other}")
    elif dflash.flag("use_swa", default=False):
        layers = [(False, dflash.integer("swa_window_size")) for _ in layers]
    masks = tuple(
        LayerMask(slides if causal is None else causal, window) for slides, window in layers
    )
    for mask in masks:
        if mask.window is not None and mask.window < block_size:
            raise facts.error(
                f"sliding window {mask.window} is smaller than block_size {block_size}",
                "block tokens must see each other",
            )
    return masks


def _causality(facts: Facts, dflash: Facts) -> bool | None:
    stated = {
        place.flag(key, default=False)
        for place, key in ((facts, "is_causal"), (dflash, "causal"), (dflash, "is_causal"))
        if place.has(key)
    }
    if len(stated) > 1:
        facts.fail("is_causal", "and dflash_config's causal or is_causal contradict each other")
    return stated.pop() if stated else None
