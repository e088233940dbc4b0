"""Streaming: joined deltas equal one-shot decoding, which equals the `tokenizers` library's."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from dflash_trt.errors import RequestError, TokenizerError
from dflash_trt.text import StopChecker, TextStream, Tokenizer

KINDS = ["byte_level", "sentencepiece"]
TEXTS = [
    "emoji 😀👩‍👩‍👧🇩🇪 end",
    "你好、世界 日本語 한국어",
    "a genuine \ufffd stays",
    "  leading and   runs\t\n ",
    "",
    " ",
    "<|user|> hi <|end|></s>",
]


def stream(tokenizer: Tokenizer, ids: list[int], sizes: list[int], **options: Any) -> list[str]:
    detokenizer, deltas, at = tokenizer.detokenizer(**options), [], 0
    for size in itertools.chain(sizes, itertools.repeat(1)):
        if at >= len(ids):
            break
        deltas.append(detokenizer.push(ids[at : at + size]))
        at += size
    return [*deltas, detokenizer.flush()]


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found: Tokenizer = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="session")
def backends(make_backend: dict[str, Callable[[], Backend]]) -> dict[str, Backend]:
    return {kind: make() for kind, make in make_backend.items()}


@pytest.mark.parametrize("text", TEXTS)
def test_no_replacement_character_from_a_cut_sequence(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    deltas = stream(tokenizer, ids, [1], skip_special_tokens=False)
    assert "".join(deltas) == tokenizer.decode(ids, skip_special_tokens=False)
    assert "".join(deltas).count("\ufffd") == text.count("\ufffd")


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(max_size=40), sizes=st.lists(st.integers(0, 9), max_size=10), skip=st.booleans()
)
@pytest.mark.parametrize("kind", KINDS)
def test_any_text_any_chunking(
    kind: str, text: str, sizes: list[int], skip: bool, request: Any, backends: dict[str, Backend]
) -> None:
    tokenizer = request.getfixturevalue(kind)
    ids = tokenizer.encode(text)
    deltas = stream(tokenizer, ids, sizes, skip_special_tokens=skip)
    assert "".join(deltas) == tokenizer.decode(ids, skip)
    assert "".join(deltas) == backends[kind].decode(ids, skip_special_tokens=skip)
    if skip and "<" not in text:
        assert "".join(deltas) == text


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 700), max_size=40), skip=st.booleans())
def test_any_ids_byte_level(
    ids: list[int], skip: bool, byte_level: Tokenizer, backends: dict[str, Backend]
) -> None:
    expected = backends["byte_level"].decode(ids, skip_special_tokens=skip)
    assert byte_level.decode(ids, skip) == expected
    assert "".join(stream(byte_level, ids, [], skip_special_tokens=skip)) == expected


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 700), max_size=40), skip=st.booleans())
def test_any_ids_sentencepiece(
    ids: list[int], skip: bool, sentencepiece: Tokenizer, backends: dict[str, Backend]
) -> None:
    ours = sentencepiece.decode(ids, skip)
    assert "".join(stream(sentencepiece, ids, [], skip_special_tokens=skip)) == ours
    theirs = backends["sentencepiece"].decode(ids, skip_special_tokens=skip)
    # The library spoils a whole run of bytes when one is bad; a stream cannot know that in time.
    if "\ufffd" not in theirs:
        assert ours == theirs


def test_byte_fallback_differs_from_the_library_only_in_mixed_runs(
    sentencepiece: Tokenizer, backends: dict[str, Backend]
) -> None:
    def byte_ids(data: bytes) -> list[int]:
        return [sentencepiece.token_to_id(f"<0x{byte:02X}>") or 0 for byte in data]

    for data in (b"\xe4\xbd", b"\xff\xfe", b"\x80"):
        ids = byte_ids(data)
        assert sentencepiece.decode(ids) == backends["sentencepiece"].decode(ids)
        assert sentencepiece.decode(ids) == "\ufffd" * len(data)
    mixed = byte_ids("你".encode() + b"\xff")
    assert backends["sentencepiece"].decode(mixed) == "\ufffd" * 4
    assert sentencepiece.decode(mixed) == "你\ufffd"


def test_invalid_bytes_do_not_stall(tokenizer: Tokenizer) -> None:
    name = "<0x{:02X}>" if tokenizer.token_to_id("<0x80>") is not None else None
    lead = tokenizer.token_to_id(name.format(0x80) if name else "Ģ")
    start = tokenizer.token_to_id(name.format(0xF0) if name else "ð")
    assert lead is not None
    assert start is not None
    detokenizer = tokenizer.detokenizer()
    assert detokenizer.push([lead]) == "\ufffd"
    waiting = 0
    for token_id in [start] * 50:
        waiting = 0 if detokenizer.push([token_id]) else waiting + 1
        assert waiting < 4
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_special_tokens_shown_or_hidden(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("<|user|>hi<tool></s>")
    assert byte_level.decode(ids) == "hi<tool>"
    assert byte_level.decode(ids, skip_special_tokens=False) == "<|user|>hi<tool></s>"


def test_added_token_with_plain_text(byte_level: Tokenizer) -> None:
    assert byte_level.decode(byte_level.encode("x汉字y")) == "x汉字y"


def test_only_the_first_space_is_dropped(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("  two")
    assert sentencepiece.decode(ids) == "  two"
    first = sentencepiece.decode(ids[:-1])
    assert not first.startswith("   ")


def test_unknown_and_bad_ids(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hi")
    assert tokenizer.decode([*ids, 10**6]) == "hi"
    for bad in (-1, 2**32, 2**70, 1.5, "a", None):
        with pytest.raises(RequestError, match="token id"):
            tokenizer.decode([bad])


def test_no_decoder_joins_with_spaces(make_tokenizer: Callable[..., Tokenizer]) -> None:
    backend = Backend(models.WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="a"))
    tokenizer = make_tokenizer(backend, special_tokens={})
    assert tokenizer.decode([0, 1, 2]) == backend.decode([0, 1, 2]) == "a b c"
    assert stream(tokenizer, [0, 1, 2], []) == ["a", " b", " c", ""]


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.Strip(" ", 1, 0), decoders.Fuse()]),
    ],
)
def test_decoders_that_cannot_stream_are_refused(
    decoder: Any, make_tokenizer: Callable[..., Tokenizer]
) -> None:
    backend = Backend(models.WordLevel({"a": 0}, unk_token="a"))
    backend.decoder = decoder
    with pytest.raises(TokenizerError, match="cannot be streamed") as caught:
        make_tokenizer(backend, special_tokens={})
    assert "ByteLevel" in caught.value.hint


def test_cost_per_token_does_not_grow(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("The quick brown fox 你好 😀 ") * 4000
    detokenizer = byte_level.detokenizer()
    started = time.process_time()
    for token_id in ids:
        detokenizer.push([token_id])
    assert (time.process_time() - started) / len(ids) < 50e-6


# TextStream: the two together, in blocks.


def test_stream_of_blocks_equals_token_by_token(byte_level: Tokenizer) -> None:
    rng = random.Random(0)
    text = "Say 你好 to 😀, then\n\nstop END here"
    ids = [*byte_level.encode(text), byte_level.eos_token_id or 0, *byte_level.encode("late")]
    for stops in ([], ["\n\n"], [" END"], ["好 t"], ["😀,", "zzz"], ["<|end|>"]):
        results = set()
        for _ in range(20):
            checker = StopChecker(stops, eos_ids=byte_level.stop_ids)
            output = TextStream(byte_level.detokenizer(), checker)
            shown, used, at = "", 0, 0
            while output.reason is None:
                size = rng.randint(1, 9)
                result = output.push(ids[at : at + size])
                shown, used, at = shown + result.text, used + result.num_tokens, at + size
            assert used == output.num_tokens
            results.add((shown, used, result.matched))
        ((shown, used, matched),) = results
        cut = min((text.index(stop) for stop in stops if stop in text), default=len(text))
        assert shown == text[:cut]
        assert byte_level.decode(ids[:used]).startswith(shown)
        assert matched == (stops[0] if cut < len(text) else byte_level.eos_token_id)


def test_stream_releases_everything_at_the_cap(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("ab😀")
    checker = StopChecker(["bX"], max_tokens=len(ids) - 1)
    output = TextStream(byte_level.detokenizer(), checker)
    result = output.push(ids)
    assert result.reason == "length"
    assert result.num_tokens == len(ids) - 1
    assert result.text == byte_level.decode(ids[:-1])
    assert output.finish() == ""


def test_cancelled_stream_gives_back_held_text(byte_level: Tokenizer) -> None:
    output = TextStream(byte_level.detokenizer(), StopChecker(["dog!"]))
    shown = output.push(byte_level.encode("the dog")).text
    assert shown + output.finish() == "the dog"


@pytest.mark.parametrize("skip", [True, False])
def test_special_text_as_stop_string(byte_level: Tokenizer, skip: bool) -> None:
    ids = byte_level.encode("a<|end|>b")
    output = byte_level.text_stream(["<|end|>"], skip_special_tokens=skip)
    result = output.push(ids)
    assert (result.text, result.num_tokens, result.reason) == ("a", 2, "stop")


def test_text_stream_knows_the_models_end(byte_level: Tokenizer) -> None:
    ids = [*byte_level.encode("ab"), byte_level.eos_token_id or 0, *byte_level.encode("c")]
    assert byte_level.text_stream().push(ids).text == "ab"
    assert byte_level.text_stream(ignore_eos=True).push(ids).text == "abc"
    assert byte_level.text_stream(stop_ids=[ids[0]]).push(ids).num_tokens == 1
    for bad in ([""], [None], "x", [1]):
        with pytest.raises(RequestError):
            byte_level.text_stream(bad)
