"""The safetensors reader against the reference library, damaged files and hostile ones."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from checkpoint_files import problem_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from dflash_trt.checkpoint.safetensors import SafetensorsSource
from dflash_trt.errors import BadTensor, CheckpointError, MissingTensor


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_floats_equal_reference(tmp_path: Path, dtype: torch.dtype) -> None:
    # Every bit pattern of a 16-bit type, so subnormals, infinities and NaNs are among them.
    bits = torch.arange(-32768, 32768, dtype=torch.int16).reshape(256, 256)
    values = bits.view(dtype) if dtype.itemsize == 2 else torch.randn(256, 256)
    path = tmp_path / "x.safetensors"
    save_file({"odd": torch.ones(3, dtype=torch.uint8), "a": values, "b": values[:7].clone()}, path)
    source = SafetensorsSource(path)
    with safe_open(path, "pt") as reference:
        for name in ("a", "b"):
            expected = reference.get_tensor(name)
            assert source.info(name).shape == tuple(expected.shape)
            read = source.read(name)
            assert read.dtype == np.float32
            assert read.flags.c_contiguous
            assert read.flags.aligned
            np.testing.assert_array_equal(read, expected.float().numpy())
            np.testing.assert_array_equal(
                source.read_rows(name, 2, 5), expected[2:5].float().numpy()
            )
    assert source.names() == ["a", "b", "odd"] or set(source.names()) == {"a", "b", "odd"}


def test_raw_keeps_stored_type_and_is_a_read_only_view(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"w": torch.randn(4, 8).to(torch.bfloat16), "f": torch.randn(4, 8)}, path)
    source = SafetensorsSource(path)
    assert source.raw("w").dtype == ml_dtypes.bfloat16
    for array in (source.raw("w"), source.read("f")):
        assert not array.flags.owndata
        assert not array.flags.writeable
    assert np.shares_memory(source.read("f"), source.raw("f"))
    assert source.q4_blocks("w") is None


def test_other_types_are_raw_only(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"d": torch.ones(2, dtype=torch.float64), "i": torch.arange(3)}, path)
    source = SafetensorsSource(path)
    np.testing.assert_array_equal(source.raw("i"), [0, 1, 2])
    with pytest.raises(BadTensor, match=r"x\.safetensors: tensor d has type F64"):
        source.read("d")


def test_empty_and_scalar_tensors(tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors",
                 {"e": entry([0, 4], 0, 0), "s": entry([], 0, 4)}, b"\0\0\x80?")  # fmt: skip
    source = SafetensorsSource(path)
    assert source.read("e").shape == (0, 4)
    assert source.read("s").shape == ()
    assert source.read("s") == 1.0


def test_missing_tensor_and_bad_rows(tmp_path: Path) -> None:
    source = SafetensorsSource(write(tmp_path / "x.safetensors", {"a": entry([2], 0, 8)}, bytes(8)))
    for call in (source.info, source.read, source.raw, source.q4_blocks):
        with pytest.raises(MissingTensor, match=r"tensor nope is missing"):
            call("nope")
    with pytest.raises(BadTensor, match="a has 2 rows, so rows 1 to 3"):
        source.read_rows("a", 1, 3)


HOSTILE: dict[str, tuple[Any, bytes, int | None, str]] = {
    "truncated data": ({"a": entry([4], 0, 16)}, bytes(12), None, "tensor a: ends at byte"),
    "wrong size": ({"a": entry([4], 0, 12)}, bytes(12), None, "tensor a: has 12 bytes"),
    "reversed": ({"a": entry([0], 8, 4)}, bytes(8), None, "tensor a: data_offsets"),
    "negative": ({"a": entry([4], -16, 0)}, b"", None, "tensor a: data_offsets"),
    "huge offset": ({"a": entry([4], 2**70, 2**70 + 16)}, b"", None, "tensor a: data_offsets"),
    "overlap": ({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, bytes(12), None,
                "tensor b overlaps a"),
    "same range": ({"a": entry([2], 0, 8), "b": entry([2], 0, 8)}, bytes(8), None,
                   "tensor b overlaps a"),
    "gap": ({"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, bytes(12), None,
            "tensor b leaves a gap after a"),
    "tail": ({"a": entry([1], 0, 4)}, bytes(9), None, "5 bytes after the last tensor"),
    "shape overflow": ({"a": entry([2**62, 4], 0, 0)}, b"", None, "tensor a: has 0 bytes"),
    "absurd empty": ({"a": entry([0, 2**40], 0, 0)}, b"", None, "absurd"),
    "many axes": ({"a": entry([1] * 100, 0, 4)}, bytes(4), None, "tensor a: shape"),
    "float shape": ({"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}, bytes(4),
                    None, "tensor a: shape"),
    "bool shape": ({"a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}, bytes(4),
                   None, "tensor a: shape"),
    "unknown dtype": ({"a": entry([1], 0, 4, "F4")}, bytes(4), None, "tensor a: type 'F4'"),
    "list dtype": ({"a": {"dtype": [], "shape": [], "data_offsets": [0, 4]}}, bytes(4), None,
                   r"tensor a: type \[\]"),
    "extra key": ({"a": entry([1], 0, 4) | {"x": 1}}, bytes(4), None, "tensor a: header entry"),
    "not dict entry": ({"a": 3}, b"", None, "tensor a: header entry is 3"),
    "list header": ([1, 2], b"", None, "header is not a JSON object"),
    "not json": (b"{{{{", b"", None, "header is not valid JSON"),
    "not utf8": (b'{"\xff": 1}', b"", None, "header is not valid JSON"),
    "twice": (b'{"a":1,"a":2}', b"", None, "key a occurs twice"),
    "nan": (b'{"a":NaN}', b"", None, "NaN is not JSON"),
    "deep": (b'{"a":' + b"[" * 200_000, b"", None, "header is not valid JSON"),
    "long int": (b'{"a":' + b"9" * 10_000 + b"}", b"", None, "header is not valid JSON"),
    "huge header": ({"a": 1}, b"", 2**63, "header length"),
    "header past end": ({"a": 1}, b"", 1000, "header length 1000"),
    "zero header": (b"", b"", 0, "header length 0"),
    "metadata": ({"__metadata__": 4}, b"", None, "__metadata__ is 4"),
    "newline name": ({"a\nb": 3}, b"", None, r"tensor 'a\\nb'"),
    "surrogate name": (b'{"\\ud800": 3}', b"", None, r"tensor '\\ud800'"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_file_is_refused_in_one_line(tmp_path: Path, case: str) -> None:
    header, data, length, message = HOSTILE[case]
    path = write(tmp_path / "bad.safetensors", header, data, length)
    with pytest.raises(CheckpointError, match=message) as caught:
        SafetensorsSource(path)
    assert "bad.safetensors" in caught.value.message
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 800
    caught.value.message.encode()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "file is empty"),
        (b"abc", "truncated"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "Git-LFS pointer"),
    ],
)
def test_no_safetensors_at_all(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        SafetensorsSource(tmp_path)
    assert "model.safetensors" in caught.value.message


def test_pipe_and_folder_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")  # opening this would wait for ever
    with pytest.raises(CheckpointError, match="no such file"):
        SafetensorsSource(tmp_path)


@pytest.fixture(scope="module")
def good_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("good") / "x.safetensors"
    save_file({"a.weight": torch.randn(3, 4), "b": torch.ones(2, dtype=torch.bfloat16)}, path)
    return path.read_bytes()


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(edits=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=4),
       cut=st.none() | st.integers(0, 400))  # fmt: skip
def test_mutated_bytes_never_raise_anything_else(
    tmp_path: Path, good_file: bytes, edits: list[tuple[int, int]], cut: int | None
) -> None:
    data = bytearray(good_file)
    for position, value in edits:
        data[position % len(data)] = value
    path = tmp_path / "m.safetensors"
    path.write_bytes(bytes(data[:cut]))

    def read() -> None:
        source = SafetensorsSource(path)
        for name in source.names():
            source.raw(name)
            source.read(name)

    assert "\n" not in problem_of(read)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    header=st.dictionaries(
        st.text(max_size=8),
        st.fixed_dictionaries(
            {
                "dtype": st.sampled_from(["F32", "BF16", "I8", "X"]) | st.none(),
                "shape": st.lists(st.integers(-1, 2**64), max_size=3) | st.integers(),
                "data_offsets": st.lists(st.integers(-1, 2**64), max_size=3),
            }
        )
        | st.none(),
        max_size=4,
    ),
    data=st.binary(max_size=32),
)
def test_made_up_headers(tmp_path: Path, header: dict[str, Any], data: bytes) -> None:
    path = write(tmp_path / "h.safetensors", header, data)

    def read() -> None:
        source = SafetensorsSource(path)
        for name in source.names():
            source.raw(name)

    assert "\n" not in problem_of(read)


def shards(folder: Path, weight_map: dict[str, Any], files: dict[str, list[str]]) -> Path:
    for file, names in files.items():
        save_file({name: torch.full((2,), float(len(name))) for name in names}, folder / file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_shards(tmp_path: Path) -> None:
    source = SafetensorsSource(
        shards(
            tmp_path,
            {"a": "one.safetensors", "bb": "two.safetensors"},
            {"one.safetensors": ["a"], "two.safetensors": ["bb"], "other.safetensors": ["a"]},
        )
    )
    assert source.names() == ["a", "bb"]
    assert source.read("bb")[0] == 2
    assert source.info("bb").file.name == "two.safetensors"


@pytest.mark.parametrize(
    "shard",
    ["../one.safetensors", "/etc/one.safetensors", "sub/one.safetensors", "..\\one.safetensors",
     "C:one.safetensors", "one.bin", "", 7, None, "a\0.safetensors", "x" * 300 + ".safetensors"],
)  # fmt: skip
def test_index_cannot_leave_its_folder(tmp_path: Path, shard: Any) -> None:
    shards(tmp_path, {"a": shard}, {"one.safetensors": ["a"]})
    with pytest.raises(CheckpointError, match=r"index\.json: tensor a is placed in"):
        SafetensorsSource(tmp_path)


def test_shard_problems(tmp_path: Path) -> None:
    one, two = {"one.safetensors": ["a"]}, {"two.safetensors": ["a"]}
    cases: list[tuple[dict[str, Any], dict[str, list[str]], str]] = [
        ({"a": "gone.safetensors"}, {}, "shard gone.safetensors is missing"),
        ({"b": "one.safetensors"}, one, "places tensor b in one.safetensors"),
        ({"a": "one.safetensors", "b": "two.safetensors"}, one | two, "tensor a is also in one"),
        ({}, one, "weight_map is {}"),
    ]
    for number, (weight_map, files, message) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        shards(folder, weight_map, files)
        with pytest.raises(CheckpointError, match=message):
            SafetensorsSource(folder)


def test_shards_through_symlinks_as_in_the_hub_cache(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots"
    blobs.mkdir()
    snapshot.mkdir()
    save_file({"a": torch.ones(2)}, blobs / "0123")
    (snapshot / "model.safetensors").symlink_to("../blobs/0123")
    assert SafetensorsSource(snapshot).read("a")[1] == 1


def test_folder_contents(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no \.safetensors file"):
        SafetensorsSource(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="pickled weights are never loaded"):
        SafetensorsSource(tmp_path)
    save_file({"a": torch.ones(2)}, tmp_path / "weights.safetensors")
    assert SafetensorsSource(tmp_path).names() == ["a"]
    save_file({"a": torch.ones(2)}, tmp_path / "weights2.safetensors")
    with pytest.raises(CheckpointError, match=r"2 \.safetensors files but no"):
        SafetensorsSource(tmp_path)
