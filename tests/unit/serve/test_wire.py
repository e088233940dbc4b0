"""Messages between the processes of one server."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from dflash_trt.serve import wire
from dflash_trt.serve.desk import Refusal
from dflash_trt.serve.wire import packed

DTYPES = st.sampled_from([np.int32, np.uint64, np.float32, np.bool_]).map(np.dtype)
NUMBERS = DTYPES.flatmap(lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_side=0)))
TEXTS = st.lists(st.one_of(st.text(), st.binary()), max_size=4)


def there(*message: Any) -> list[Any] | None:
    return wire.read(io.BytesIO(packed(*message)))


@given(NUMBERS)
def test_numbers_arrive_as_they_are(array: np.ndarray) -> None:
    kind, arrived = there("request", {"tensor": array}) or []
    assert kind == "request"
    assert arrived["tensor"].dtype == array.dtype
    np.testing.assert_array_equal(arrived["tensor"], array)


@given(TEXTS, st.booleans())
def test_texts_and_bytes_arrive_as_objects(texts: list[str | bytes], is_row: bool) -> None:
    array = np.empty(len(texts), np.object_)
    array[:] = texts
    array = array.reshape(1, -1) if is_row else array
    _, arrived = there("request", {"tensor": array}) or []
    assert arrived["tensor"].shape == array.shape
    assert arrived["tensor"].ravel().tolist() == texts


def test_fixed_width_strings_arrive_as_objects() -> None:
    _, arrived = there("request", {"tensor": np.array([[b"ab", b""]])}) or []
    assert arrived["tensor"].tolist() == [[b"ab", b""]]


@pytest.mark.parametrize("refusal", [None, Refusal("UNAVAILABLE", "full; try later")])
def test_a_response_arrives_whole(refusal: Refusal | None) -> None:
    assert there("response", 7, {}, refusal, True) == ["response", 7, {}, refusal, True]


def test_both_readers_see_the_same_messages_and_the_end() -> None:
    data = packed("cancel", 1) + packed("drain")
    stream = io.BytesIO(data)
    assert [wire.read(stream) for _ in range(3)] == [["cancel", 1], ["drain"], None]

    async def read_all() -> list[Any]:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        found = [await wire.read_async(reader) for _ in range(2)]
        with pytest.raises(asyncio.IncompleteReadError):
            await wire.read_async(reader)
        return found

    assert asyncio.run(read_all()) == [["cancel", 1], ["drain"]]


@pytest.mark.parametrize("kept", [0, 3, 8, 12])
def test_an_end_inside_a_message_is_an_end(kept: int) -> None:
    assert wire.read(io.BytesIO(packed("cancel", 123456)[:kept])) is None


def test_what_is_no_data_is_not_sent() -> None:
    with pytest.raises(TypeError, match="object is no part of a message"):
        packed("request", object())
