"""Stop rules: against a search of the whole text, at every offset and any chunking."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.errors import RequestError
from dflash_trt.text import StopChecker


def naive(text: str, stops: list[str]) -> tuple[str, str | None, int]:
    """Text before the stop string that is complete first (longest on a tie); where it ends."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            longest = max(done, key=len)
            return text[: end - len(longest)], longest, end
    return text, None, len(text)


def run(checker: StopChecker, deltas: list[str]) -> tuple[str, str | int | None, int]:
    shown, used = "", 0
    for token_id, delta in enumerate(deltas):
        result = checker.feed(token_id, delta)
        shown, used = shown + result.text, used + 1
        if result.reason:
            return shown + checker.finish("never shown"), result.matched, used
    return shown + checker.finish(), None, used


def chunk(text: str, cuts: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@settings(max_examples=400, deadline=None)
@given(
    text=st.text("abAB\n", max_size=40),
    stops=st.lists(st.text("abAB\n", min_size=1, max_size=5), max_size=4),
    cuts=st.lists(st.integers(0, 40), max_size=12),
)
def test_equal_to_a_search_of_the_whole_text(text: str, stops: list[str], cuts: list[int]) -> None:
    deltas = chunk(text, cuts)
    expected, matched, end = naive(text, stops)
    shown, got, used = run(StopChecker(stops), deltas)
    assert (shown, got) == (expected, matched)
    if matched is not None:  # the ids end with the token that holds the last character
        assert len("".join(deltas[: used - 1])) < end <= len("".join(deltas[:used]))


@settings(max_examples=200, deadline=None)
@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=3),
)
def test_what_was_shown_is_never_taken_back(text: str, stops: list[str]) -> None:
    checker, shown = StopChecker(stops), ""
    final = naive(text, stops)[0]
    for char in text:
        result = checker.feed(0, char)
        shown += result.text
        assert final.startswith(shown)
        if result.reason:
            break


@pytest.mark.parametrize("stop", ["\n\n", " END", "<|end|>", "日本", "aab"])
def test_stop_string_at_every_offset(stop: str) -> None:
    for before in range(6):
        text = "xaaxaa"[:before] + stop + "never"
        for step in range(1, len(text) + 1):
            deltas = [text[i : i + step] for i in range(0, len(text), step)]
            assert run(StopChecker([stop]), deltas)[0] == naive(text, [stop])[0]


def test_a_prefix_is_held_back_then_released() -> None:
    checker = StopChecker(["<end>"])
    assert checker.feed(1, "a<en").text == "a"
    assert checker.feed(2, "x").text == "<enx"
    assert checker.feed(3, "y<e").text == "y"
    assert checker.finish() == "<e"


def test_stop_id_counts_but_its_text_is_not_shown() -> None:
    checker = StopChecker(eos_ids=[9], max_tokens=5)
    assert checker.feed(10, "a").reason is None
    assert checker.feed(11, "b").reason is None
    result = checker.feed(9, "</s>")
    assert (result.text, result.reason, result.matched) == ("", "stop", 9)
    assert checker.num_tokens == 3


def test_first_token_may_stop() -> None:
    checker = StopChecker(stop_ids=[0], eos_ids=[3])
    assert checker.feed(0, "x").reason == "stop"
    assert checker.finish() == ""


def test_ignore_eos_spares_only_the_models_ids() -> None:
    checker = StopChecker(stop_ids=[7], eos_ids=[9, 8], ignore_eos=True)
    assert checker.feed(9, "").reason is None
    assert checker.feed(8, "").reason is None
    assert checker.feed(7, "").reason == "stop"


def test_stop_wins_over_the_cap_and_the_cap_releases_held_text() -> None:
    both = StopChecker(["ab"], max_tokens=2)
    both.feed(1, "a")
    assert both.feed(2, "b").reason == "stop"
    cap = StopChecker(["ab"], max_tokens=1)
    result = cap.feed(1, "xa")
    assert (result.text, result.reason) == ("x", "length")
    assert cap.finish() == "a"


def test_tail_can_complete_a_stop_string() -> None:
    checker = StopChecker(["a\ufffd"])
    assert checker.feed(1, "xa").text == "x"
    assert checker.finish("\ufffd") == ""
    assert checker.finish("again") == ""


@pytest.mark.parametrize(
    ("stops", "culprit"),
    [
        ([""], r"stop\[0\]"),
        (["a", "x" * 257], r"stop\[1\] has 257"),
        (["a"] * 17, "17 stop strings"),
        ("abc", "list of strings"),
        ([3], r"stop\[0\] is a int"),
    ],
)
def test_bad_stop_strings_are_refused(stops: list[str], culprit: str) -> None:
    with pytest.raises(RequestError, match=culprit):
        StopChecker(stops)


def test_limits_themselves_are_allowed() -> None:
    StopChecker([chr(97 + i) * 256 for i in range(16)], max_tokens=1)


@pytest.mark.parametrize("ids", [[-1], ["a"], [True], [1.5]])
def test_bad_stop_ids_are_refused(ids: list[int]) -> None:
    with pytest.raises(RequestError, match="stop token id"):
        StopChecker(stop_ids=ids)


def test_bad_max_tokens_is_refused() -> None:
    with pytest.raises(RequestError, match="max_tokens 0"):
        StopChecker(max_tokens=0)
