"""A target and a drafter read together, checked to belong together, and their weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dflash_trt.checkpoint.draft_vocab import DraftIds, read_ids
from dflash_trt.checkpoint.drafter import folder_config as drafter_facts
from dflash_trt.checkpoint.drafter import open_drafter
from dflash_trt.checkpoint.quantized_config import Quantization
from dflash_trt.checkpoint.rope import same_rule
from dflash_trt.checkpoint.target import folder_config as target_facts
from dflash_trt.checkpoint.target import is_gguf, open_target
from dflash_trt.checkpoint.tensors import TensorSource
from dflash_trt.checkpoint.weights import PairWeights
from dflash_trt.config import DrafterConfig, PairConfig, RopeConfig, TargetConfig
from dflash_trt.errors import ConfigError, PairMismatch


@dataclass(frozen=True)
class Pair:
    """Everything read from two checkpoints; `warnings` are one-line remarks for the user.

    `draft_ids` int32 [draft_vocab_size]: the tokens of the draft vocabulary, in the order of the
    drafter's head. `selects_rows`: its head is these rows of a larger one, its own or the target's.
    `quantizations`: how the checkpoints of `target` and `drafter` are quantized, of those that are.
    """

    config: PairConfig
    target_source: TensorSource
    drafter_source: TensorSource
    warnings: tuple[str, ...]
    draft_ids: DraftIds | None = None
    selects_rows: bool = False
    quantizations: Mapping[str, Quantization] = field(default_factory=dict)

    def weights(self) -> PairWeights:
        """Both models' tensors under the names of the step graph."""
        rows = self.draft_ids if self.selects_rows else None
        return PairWeights(self.config, self.target_source, self.drafter_source, rows)


def read_pair(target: Path, drafter: Path, draft_vocab: Path | None = None) -> Pair:
    """Read both checkpoints and check that they belong together; no weight bytes are read.

    `draft_vocab`: a file that says what the drafter shall draft (`read_ids`). Raises
    `CheckpointError` for a bad checkpoint, `PairMismatch` for two that do not fit, `ConfigError`
    for a draft vocabulary that is not the target's, or too small for the drafter's selector.
    """
    read_target, read_drafter = open_target(target), open_drafter(drafter)
    remarks = check_pair(read_target.config, read_drafter.config)
    drafter_config = read_drafter.config
    vocab_size = read_target.config.vocab_size
    if not _has_rows_for_all(drafter_config):
        drafter_config = dataclasses.replace(drafter_config, vocab_size=vocab_size)
    quantizations = {"target": read_target.quantization, "drafter": read_drafter.quantization}
    ids, selects = read_drafter.draft_ids, not drafter_config.own_lm_head
    if ids is not None and ids.max() >= vocab_size:
        raise PairMismatch(
            f"the drafter's draft vocabulary has token {ids.max()}, the target {vocab_size} tokens",
            "this drafter was trained for another target",
        )
    if draft_vocab is not None:
        if ids is not None:
            raise ConfigError(
                f"{drafter} has a draft vocabulary of its own: {len(ids)} tokens",
                hint="leave --draft-vocab out",
            )
        ids, selects = read_ids(draft_vocab, vocab_size), True
        check_selector(drafter_config, draft_vocab, len(ids))
        drafter_config = dataclasses.replace(drafter_config, draft_vocab_size=len(ids))
    return Pair(
        PairConfig(read_target.config, drafter_config),
        read_target.source,
        read_drafter.source,
        (*read_target.notes, *read_drafter.notes, *remarks),
        ids,
        selects and ids is not None,
        {side: found for side, found in quantizations.items() if found is not None},
    )


def check_selector(drafter: DrafterConfig, draft_vocab: Path, count: int) -> None:
    """Refuse a draft vocabulary of too few tokens for a DFlash 2 drafter. Raises `ConfigError`."""
    if drafter.dflash2 is not None and count < drafter.dflash2.selector_top_k:
        raise ConfigError(
            f"{draft_vocab}: has {count} tokens, but the drafter's selector chooses among "
            f"{drafter.dflash2.selector_top_k}",
            hint="take more tokens",
        )


def read_facts(target: Path, drafter: Path) -> PairConfig:
    """What the small files of both say, checked as far as that goes; weights may be missing yet.

    Raises what `read_pair` raises.
    """
    target_config = open_target(target).config if is_gguf(target) else target_facts(target, [])
    config = PairConfig(target_config, drafter_facts(drafter))
    check_pair(config.target, config.drafter, tensors=False)
    return config


def check_pair(
    target: TargetConfig, drafter: DrafterConfig, *, tensors: bool = True
) -> tuple[str, ...]:
    """Remarks about a pair that fits. Raises `PairMismatch` naming both sides' numbers.

    `tensors`: the drafter's were seen, so whether embedding and head are its own is known.
    """
    remarks = []
    _equal("target_hidden_size", drafter.target_hidden_size, "hidden_size", target.hidden_size)
    shares = not (drafter.own_embedding and drafter.own_lm_head)
    if shares:
        _equal("hidden_size", drafter.hidden_size, "hidden_size", target.hidden_size)
    vocabularies = (
        f"drafter vocab_size {drafter.vocab_size} differs from target vocab_size "
        f"{target.vocab_size}"
    )
    if drafter.mask_token_id >= target.vocab_size:
        larger = f"{vocabularies}, and " if drafter.vocab_size != target.vocab_size else ""
        raise PairMismatch(
            f"{larger}drafter mask_token_id {drafter.mask_token_id} is outside the target's "
            f"embedding of {target.vocab_size} rows",
            "the drafter belongs to a target with a larger embedding",
        )
    if (tensors or drafter.dflash2 is not None) and _has_rows_for_all(drafter):
        # Draft ids are compared with the target's, so even an own head must count the same ids.
        _equal("vocab_size", drafter.vocab_size, "vocab_size", target.vocab_size)
    elif tensors and drafter.vocab_size != target.vocab_size:
        remarks.append(
            f"{vocabularies}: by their padding, if the drafter was trained for this target; it "
            f"uses the target's embedding{'' if drafter.own_lm_head else ' and head'}"
        )
    if drafter.num_target_layers is not None:
        _equal(
            "num_target_layers", drafter.num_target_layers, "num_hidden_layers", target.num_layers
        )
    _check_layer_ids(target, drafter)
    if target.num_layers - 1 in drafter.target_layer_ids:
        remarks.append(
            f"drafter taps the last target layer ({target.num_layers - 1}): its output is taken "
            "before the final norm, which not every training tool does"
        )
    own, others = drafter.attention.rope, target.attention.rope
    if not same_rule(own, others, target.attention.head_dim):
        remarks.append(
            f"the drafter's rotary rule ({_rule(own)}) differs from the target's "
            f"({_rule(others)}): the drafter's own is used; one that was exported with a wrong "
            "rule drafts badly"
        )
    return tuple(remarks)


def _has_rows_for_all(drafter: DrafterConfig) -> bool:
    """Whether a tensor of the drafter's own has one row for every token of the target."""
    own_head = drafter.own_lm_head and drafter.draft_vocab_size is None
    return drafter.own_embedding or own_head or drafter.dflash2 is not None


def check_block(config: PairConfig, block: int) -> None:
    """Refuse a block size that the drafter was not trained for. Raises `PairMismatch`."""
    trained = config.drafter.block_size
    if not 2 <= block <= trained:
        raise PairMismatch(
            f"block {block} was asked for, but the drafter was trained with block {trained}",
            f"choose a block in 2..{trained}",
            choice="block",
        )


def _rule(rope: RopeConfig) -> str:
    numbers = {"theta": rope.theta, **rope.params}
    numbers.pop("divisors", None)
    stated = ", ".join(f"{key} {value:g}" for key, value in numbers.items())
    return f"{rope.kind}, {stated}"


def _equal(drafter_key: str, drafter: int, target_key: str, target: int) -> None:
    if drafter != target:
        raise PairMismatch(
            f"drafter {drafter_key} {drafter} differs from target {target_key} {target}",
            "this drafter was trained for another target",
        )


def _check_layer_ids(target: TargetConfig, drafter: DrafterConfig) -> None:
    ids, last = drafter.target_layer_ids, target.num_layers - 1
    outside = [layer for layer in ids if not 0 <= layer <= last]
    if outside:
        raise PairMismatch(
            f"drafter target_layer_ids {list(ids)}: {outside[0]} is not a layer of the target, "
            f"which has layers 0..{last}",
            "this drafter was trained for another target",
        )
    if len(set(ids)) != len(ids):
        raise PairMismatch(f"drafter target_layer_ids {list(ids)} has an id twice")
