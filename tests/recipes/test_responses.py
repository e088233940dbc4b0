"""Texts of the continuous batch, against the target run on each text alone."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
import responses
import torch
from responses import Writer, likeliest
from scripts import Script
from shards import PARTS, TOP, Text, finished_ids, read_shards, write_shard
from target import ChatFormat

CHAT = ChatFormat(before=(1, 7, 9, 11), after=(2, 12, 13), ends=frozenset({2}))
LAYERS = (0, 2, 4)


def scripts(count: int) -> list[Script]:
    """Of unlike lengths, so that slots are reused at different steps; every third is open."""
    return [
        Script(i, tuple(range(20 + i, 22 + i + i % 5)), i % 3 == 0, 0.8 if i % 4 == 3 else 0.0)
        for i in range(count)
    ]


def write_all(target: Any, options: Namespace, waiting: list[Script]) -> list[Text]:
    with torch.inference_mode():
        writer = Writer(target, CHAT, LAYERS, options, seed=3)
        texts: list[Text] = []
        while waiting or any(writer.slots):
            writer.fill(waiting)
            texts += writer.step()
    return texts


def test_texts_are_the_targets_own(target: Any, options: Namespace) -> None:
    texts = write_all(target, options, scripts(11))
    target.set_attn_implementation("sdpa")
    assert sorted(text.script for text in texts) == list(range(11))
    for text in texts:
        script = scripts(11)[text.script]
        start = len(CHAT.before) - 1
        whole = torch.tensor([[*CHAT.before[:-1], *text.tokens.tolist()]])
        with torch.inference_mode():
            out = target(whole, output_hidden_states=True)
        states = torch.cat([out.hidden_states[i + 1] for i in LAYERS], -1)[0, start:]
        assert text.features.dtype is torch.bfloat16
        torch.testing.assert_close(text.features.float(), states, atol=1e-3, rtol=5e-3)
        best = out.logits[0, start:].softmax(-1).topk(TOP)
        torch.testing.assert_close(text.top_probs.float(), best.values, atol=2e-3, rtol=0)
        tokens = text.tokens.tolist()
        assert tokens[0] == CHAT.before[-1]
        assert tuple(tokens[1 : 1 + len(script.user_ids)]) == script.user_ids
        assert tuple(tokens[text.answer_start - 3 : text.answer_start]) == CHAT.after
        if not script.open:
            assert text.answer_start == 1 + len(script.user_ids) + 3
        if script.temperature == 0:
            greedy = out.logits[0, start:].argmax(-1).tolist()
            assert tokens[text.answer_start :] == greedy[text.answer_start - 1 : -1]


def test_answers_that_are_cut_are_the_first_tokens_of_whole_ones(
    target: Any, options: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses, "LEAST_ANSWER", 3)
    whole = {text.script: text for text in write_all(target, options, scripts(3))}
    with torch.inference_mode():
        writer = Writer(target, CHAT, LAYERS, options, seed=3)
        writer.fill(scripts(3))
        for _ in range(11):
            writer.step()
    cut = writer.cut()
    assert cut
    for text in cut:
        longer, count = whole[text.script], len(text.tokens)
        assert text.answer_start + 3 <= count < len(longer.tokens)
        for name in PARTS:
            assert torch.equal(getattr(text, name), getattr(longer, name)[:count])


def test_no_text_is_longer_than_asked(target: Any, options: Namespace) -> None:
    for text in write_all(target, options, scripts(11)):
        length = len(text.tokens)
        assert length + len(CHAT.before) - 1 <= options.max_tokens
        assert length - text.answer_start <= options.answer
        assert text.answer_start <= options.user + len(CHAT.after)


def test_a_seed_gives_the_same_texts(target: Any, options: Namespace) -> None:
    one, two = (write_all(target, options, scripts(7)) for _ in range(2))
    assert [text.tokens.tolist() for text in one] == [text.tokens.tolist() for text in two]


def test_likeliest_is_a_sorted_softmax() -> None:
    logits = torch.randn(5, 1024, generator=torch.Generator().manual_seed(0)) * 4
    ids, probs = likeliest(logits)
    best = logits.softmax(-1).topk(responses.CHOICES)
    assert torch.equal(ids, best.indices)
    torch.testing.assert_close(probs, best.values)


def test_shards_give_back_what_was_written(target: Any, options: Namespace, tmp_path: Any) -> None:
    texts = write_all(target, options, scripts(5))
    write_shard(tmp_path / "shard-00-0-1.safetensors", texts[:2])
    write_shard(tmp_path / "shard-00-2-4.safetensors", texts[2:])
    (tmp_path / "shard-00-5-9.part").write_bytes(b"what a kill left")
    assert finished_ids(tmp_path) == set(range(5))
    for found, wanted in zip(read_shards(tmp_path), texts, strict=True):
        assert (found.script, found.answer_start) == (wanted.script, wanted.answer_start)
        for name in ("tokens", "features", "top_ids", "top_probs"):
            assert torch.equal(getattr(found, name), getattr(wanted, name))
