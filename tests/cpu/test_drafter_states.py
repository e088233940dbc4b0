"""Context features, injection and drafts against the dflash package, block by block."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tiny import (
    PairMaker,
    ProbeMaker,
    TinyPair,
    close,
    draft_choice,
    draft_states,
    target_states,
)

TEXT = torch.randint(0, 150, (26,), generator=torch.Generator().manual_seed(19)).tolist()
YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
    "rope_theta": 10000.0,
}  # fmt: skip


def sliding(*kinds: str, window: int = 6) -> dict[str, Any]:
    """A drafter with these layer types; a window shorter than the context."""
    return {
        "use_sliding_window": True, "sliding_window": window, "max_window_layers": 2,
        "layer_types": [f"{kind}_attention" for kind in kinds],
    }  # fmt: skip


DRAFTERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one-layer": {"num_hidden_layers": 1},
    "three-layers": {"num_hidden_layers": 3},
    "attention-bias": {"attention_bias": True},
    "all-sliding": sliding("sliding", "sliding"),
    "mixed-sliding": sliding("sliding", "full"),
    "window-of-the-block": sliding("sliding", "sliding", window=4),
    "causal": {"is_causal": True},
    "sliding-but-not-causal": {**sliding("sliding", "full"), "is_causal": False},
    "yarn": {"rope_parameters": YARN},
    "own-heads": {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 20},
    "embedding-scale": {"dflash": {"input_embedding_scale": 6.5}},
    "output-multiplier": {"dflash": {"output_multiplier": 0.25}},
    "softcap": {"dflash": {"final_logit_softcapping": 2.0}},
    "multiplier-and-softcap": {
        "dflash": {"output_multiplier": 3.0, "final_logit_softcapping": 5.0}
    },
    "one-feature": {"layer_ids": [1]},
    "features-in-another-order": {"layer_ids": [2, 0, 1]},
    "draft-vocabulary": {"draft_ids": range(3, 160, 4)},
    "draft-vocabulary-with-its-head": {"draft_ids": range(0, 160, 3), "has_own_head": True},
    "draft-vocabulary-of-a-tied-target": {
        "draft_ids": [7, 9, 12, 140], "target": {"tie_word_embeddings": True},
    },
    "draft-vocabulary-in-another-order": {"draft_ids": [90, 3, 41, 8], "has_own_head": True},
    "draft-vocabulary-in-another-order-from-the-target": {"draft_ids": [90, 3, 41, 8]},
    "dflash2": {"dflash2": {}},
    "dflash2-of-one-tap": {"dflash2": {"conv_kernel_size": 1, "conv_group_size": 48}},
    "dflash2-of-more-taps": {
        "block": 7, "dflash2": {"conv_kernel_size": 5, "conv_group_size": 1, "selector_rank": 1},
    },
    "dflash2-with-a-tap-per-row": {"dflash2": {"conv_kernel_size": 4, "conv_group_size": 16}},
    "dflash2-with-one-candidate": {"dflash2": {"selector_top_k": 1}},
    "dflash2-with-all-candidates": {
        "dflash2": {"selector_top_k": 40, "selector_rank": 24}, "draft_ids": range(0, 160, 4),
    },
    "dflash2-with-the-most-candidates": {"dflash2": {"selector_top_k": 64, "selector_rank": 24}},
    "dflash2-sliding": {
        **sliding("sliding", "full"), "is_causal": False, "block": 6, "dflash2": {},
    },
    "dflash2-with-logit-options": {
        "dflash2": {"selector_top_k": 7},
        "dflash": {
            "output_multiplier": 0.5, "final_logit_softcapping": 2.0, "input_embedding_scale": 3.0
        },
    },
    "dflash2-with-a-draft-vocabulary": {"draft_ids": range(3, 160, 4), "dflash2": {}},
    "dflash2-with-a-draft-vocabulary-and-its-head": {
        "draft_ids": [90, 3, 41, 8, 155], "has_own_head": True, "dflash2": {},
    },
    "dflash2-biased-of-a-tied-target": {
        "attention_bias": True, "target": {"tie_word_embeddings": True}, "dflash2": {},
    },
}  # fmt: skip


def features_of(pair: TinyPair, text: list[int]) -> Any:
    """The features of a text by transformers: the stream out of each layer named."""
    _, states = target_states(pair.target, text)
    return np.concatenate([states[i + 1] for i in pair.drafter.target_layer_ids], axis=1)


def check_block(
    pair: TinyPair, made: dict[str, Any], text: list[int], row: int = 0, new: int | None = None
) -> None:
    """Compare the block that a step drafted behind `text` with the dflash package's.

    `new` tokens of the text were committed by that step; None: all columns of the step.
    """
    bonus, *drafts = made["next_tokens"][row].tolist()
    context, hidden, logits = draft_states(pair, features_of(pair, text), bonus, len(drafts) + 1)
    tokens = np.array(range(logits.shape[1]) if pair.draft_ids is None else pair.draft_ids)
    close(made["draft_hidden"][row], hidden)
    close(made["draft_logits"][row], logits[:, tokens])
    assert drafts == draft_choice(pair, hidden, logits, bonus)
    fused = made["context"][row, :new]
    close(fused, context[-len(fused) :])


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_hidden_states_logits_and_drafts_equal_the_dflash_package(
    drafter: str, make_pair: PairMaker, make_probe: ProbeMaker
) -> None:
    pair = make_pair(**DRAFTERS[drafter])
    probe = make_probe(pair)
    read = 0
    for size in (9, 1, 12, 3):
        made = probe.step([TEXT[read : read + size]], [read], known=[size])
        read += size
        check_block(pair, made, TEXT[:read])


@pytest.mark.parametrize("block", range(2, 17))
def test_drafts_equal_the_dflash_package_at_every_block_size(
    block: int, make_pair: PairMaker, make_probe: ProbeMaker
) -> None:
    pair = make_pair(block=block)
    check_block(pair, make_probe(pair).step([TEXT], [0], known=[len(TEXT)]), TEXT)


@pytest.mark.parametrize("block", [*range(2, 10), 17, 18])
def test_the_path_of_the_selector_is_the_dflash_packages_at_every_block_size(
    block: int, make_pair: PairMaker, make_probe: ProbeMaker
) -> None:
    """And a choice of its own: neither the likeliest tokens nor what follows the anchor alone."""
    pair = make_pair(block=block, dflash2={"selector_top_k": 5, "selector_rank": 40})
    made = make_probe(pair).step([TEXT], [0], known=[len(TEXT)])
    check_block(pair, made, TEXT)
    _, *drafts = made["next_tokens"][0].tolist()
    assert block < 5 or drafts != made["draft_logits"][0].argmax(-1).tolist()


@pytest.mark.parametrize("rows", range(6))
def test_fewer_rows_are_the_start_of_the_same_path(
    rows: int, make_pair: PairMaker, make_probe: ProbeMaker
) -> None:
    pair = make_pair(block=7, dflash2={})
    whole = make_probe(pair).step([TEXT], [0], known=[len(TEXT)])["next_tokens"][0]
    probe = make_probe(pair)
    made = probe.step([TEXT], [0], known=[len(TEXT)], drafts=rows)
    assert made["next_tokens"][0].tolist() == whole[: 1 + rows].tolist()
    # What was injected without a block is what the next one needs.
    again = probe.step([[int(whole[0])]], [len(TEXT)], known=[1])
    check_block(pair, again, [*TEXT, int(whole[0])])


@pytest.mark.parametrize("built", [2, 5, 7])
@pytest.mark.parametrize("options", [{}, {"dflash2": {}}])
def test_a_block_built_narrower_than_trained_is_a_narrower_block_of_the_dflash_package(
    built: int, options: dict[str, Any], make_pair: PairMaker, make_probe: ProbeMaker
) -> None:
    pair = make_pair(block=8, **options)
    made = make_probe(pair, block=built).step([TEXT], [0], known=[len(TEXT)])
    assert made["draft_logits"].shape[1] == built - 1
    check_block(pair, made, TEXT)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("layer", [0, 2, 4])
def test_features_are_the_output_of_the_named_layer_and_not_its_input(
    family: str, layer: int, make_pair: PairMaker, make_probe: ProbeMaker
) -> None:
    pair = make_pair(family, target={"num_hidden_layers": 5}, layer_ids=[layer])
    made = make_probe(pair).step([TEXT], [0], known=[len(TEXT)])
    _, states = target_states(pair.target, TEXT)
    close(made["features"][0], states[layer + 1])
    assert np.abs(made["features"][0] - states[layer]).max() > 0.1
    if layer < 4:  # transformers norms the last of its hidden_states; a layer's output is not
        given = pair.target(torch.tensor([TEXT]), output_hidden_states=True).hidden_states
        close(made["features"][0], given[layer + 1][0].detach().numpy())


@pytest.mark.parametrize("drafter", ["mixed-sliding", "dflash2"])
def test_rows_of_a_batch_draft_as_they_would_alone(
    drafter: str, make_pair: PairMaker, make_probe: ProbeMaker
) -> None:
    pair = make_pair(**DRAFTERS[drafter])
    probe = make_probe(pair, slots=3)
    texts = [TEXT[:5], TEXT[5:17], TEXT[9:10]]
    made = probe.step(texts, [0, 0, 0], known=[len(text) for text in texts])
    for row, text in enumerate(texts):
        check_block(pair, made, text, row, new=len(text))


@pytest.mark.parametrize("options", [{}, {"dflash2": {}}])
@pytest.mark.parametrize("accepted", range(4))
def test_after_any_number_of_accepted_drafts_the_cache_holds_the_committed_context_only(
    accepted: int, options: dict[str, Any], make_pair: PairMaker, make_probe: ProbeMaker
) -> None:
    pair = make_pair(block=4, **options)
    probe = make_probe(pair)
    first = probe.step([TEXT], [0], known=[len(TEXT)])
    anchor = int(first["next_tokens"][0, 0])
    text = [*TEXT, anchor]
    while len(text) < len(TEXT) + 1 + accepted:
        text.append(int(target_states(pair.target, text)[0][-1].argmax()))
    drafts = text[len(TEXT) + 1 :]
    right = int(target_states(pair.target, text)[0][-1].argmax())
    wrong = [(right + 1 + i) % 150 for i in range(3 - accepted)]
    made = probe.step([[anchor, *drafts, *wrong]], [len(TEXT)], known=[1])
    assert made["committed"].tolist() == [1 + accepted]
    assert made["next_tokens"][0, 0] == right
    check_block(pair, made, text, new=1 + accepted)
    # The step after a reject reads none of what was rejected.
    again = probe.step([[right]], [len(text)], known=[1])
    check_block(pair, again, [*text, right])


@pytest.mark.parametrize("options", [{}, {"dflash2": {}}])
def test_idle_rows_and_padding_do_not_change_a_row(
    options: dict[str, Any], make_pair: PairMaker, make_probe: ProbeMaker
) -> None:
    pair = make_pair(block=4, **options)
    alone = make_probe(pair)
    padded = make_probe(pair, slots=3)
    for text, at in ((TEXT[:6], 0), (TEXT[6:8], 6)):
        single = alone.step([text], [at], known=[len(text)])
        wide = padded.step([[], text, [7] * 9], [0, at, 0], known=[0, len(text), 0],
                           count=[0, len(text), 0])  # fmt: skip
        np.testing.assert_array_equal(wide["next_tokens"][1], single["next_tokens"][0])
        close(wide["draft_logits"][1], single["draft_logits"][0])
        assert wide["committed"].tolist() == [0, len(text), 0]
