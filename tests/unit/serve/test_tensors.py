"""Tensors to requests, the table to config.pbtxt, options to parameters. Starts no server."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import model_config_pb2

from dflash_trt.errors import ConfigError, DFlashError, RequestError
from dflash_trt.serve.from_tensors import read_request
from dflash_trt.serve.options import ServeOptions
from dflash_trt.serve.repository import ALIAS, MODEL, config_pbtxt, model_py, write_repository
from dflash_trt.serve.tensors import INPUTS, OUTPUTS, Use

ROOT = Path(__file__).parents[3]
REPOSITORY = ROOT / "triton_model_repo"


def read(**values: Any) -> Any:
    """A request of plain values, each with a batch dimension."""
    kinds = {tensor.name: tensor.dtype for tensor in INPUTS}
    numpy = {"STRING": object, "INT32": np.int32, "UINT64": np.uint64, "FP32": np.float32,
             "BOOL": bool}  # fmt: skip
    arrays = {}
    for name, value in values.items():
        items = value if isinstance(value, list) else [value]
        items = [item.encode() if isinstance(item, str) else item for item in items]
        arrays[name] = np.array([items], numpy[kinds[name]])
    return read_request(arrays)


@pytest.mark.parametrize(
    ("given_", "temperature", "top_k", "top_p"),
    [
        ({}, 0.0, 0, 1.0),
        ({"temperature": 0.5}, 0.5, 0, 1.0),
        ({"top_k": 1}, 0.0, 1, 1.0),
        ({"top_k": 40}, 1.0, 40, 1.0),
        ({"top_p": 0.5}, 1.0, 0, 0.5),
        ({"top_p": 0.0}, 0.0, 0, 1.0),
        ({"top_p": 0.0, "temperature": 1.0}, 0.0, 0, 1.0),
        ({"top_p": 0.0, "top_k": 5, "temperature": 0.5}, 0.5, 5, 1.0),
        ({"top_k": 0, "top_p": 0.5, "temperature": 0.25}, 0.25, 0, 0.5),
    ],
    ids=str,
)
def test_what_makes_a_request_sample(
    given_: dict[str, float], temperature: float, top_k: int, top_p: float
) -> None:
    params = read(text_input="x", **given_).generate.params
    assert (params.temperature, params.top_k, params.top_p) == (temperature, top_k, top_p)


def test_aliases_and_empty_words() -> None:
    made = read(
        text_input="x", random_seed=2**63 + 5, min_length=3, max_tokens=9, stop_words=["", "a"],
        bad_words=[""], end_id=-1, embedding_bias_words=["w", ""], embedding_bias_weights=[2.0, 1],
    )  # fmt: skip
    params = made.generate.params
    assert (params.seed, params.min_tokens, params.stop, params.bad_words) == (5, 3, ("a",), ())
    assert params.ignore_eos
    assert made.generate.biased_words == [("w", 2.0)]


def test_refused_inputs_pass_when_they_ask_for_nothing() -> None:
    refused = [tensor for tensor in INPUTS if tensor.use is Use.REFUSED]
    assert len(refused) > 10
    for tensor in refused:
        empty = np.zeros((1, *(max(0, dim) for dim in tensor.dims[:-1]), 0), np.int32)
        read_request({"text_input": np.array([[b"x"]], object), tensor.name: empty})
        if tensor.default is not None:
            default = np.array([[tensor.default]], object)
            read_request({"text_input": np.array([[b"x"]], object), tensor.name: default})
        with pytest.raises(RequestError, match=f"^{tensor.name} is not supported"):
            read_request({"text_input": np.array([[b"x"]], object),
                          tensor.name: np.array([[b"ask"]], object)})  # fmt: skip


@given(
    name=st.sampled_from([tensor.name for tensor in INPUTS] + ["other"]),
    shape=st.lists(st.integers(0, 3), max_size=3),
    kind=st.sampled_from([object, np.int32, np.uint64, np.float32, np.float16, bool]),
    value=st.one_of(st.integers(0, 300), st.binary(max_size=9), st.floats(width=32)),
)
def test_any_array_is_read_or_refused(name: str, shape: list[int], kind: Any, value: Any) -> None:
    array = np.empty(shape, object)
    array[...] = value
    try:
        with np.errstate(all="ignore"):
            array = array.astype(kind)
    except (ValueError, OverflowError, TypeError):
        return
    with contextlib.suppress(RequestError):  # anything else is what this test looks for
        read_request({"text_input": np.array([[b"x"]], object), name: array})


def parsed(text: str) -> Any:
    """A config.pbtxt as Triton's own schema reads it."""
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def test_config_pbtxt_is_the_table() -> None:
    config = parsed(config_pbtxt("some", {"engine": 'a "quoted" \\ path/\u00fc'}))
    assert config.parameters["engine"].string_value == 'a "quoted" \\ path/\u00fc'
    assert config.model_transaction_policy.decoupled
    assert config.instance_group[0].count == 1
    assert [one.name for one in config.input] == [tensor.name for tensor in INPUTS]
    assert [one.name for one in config.output] == [tensor.name for tensor in OUTPUTS]
    for one, tensor in zip([*config.input, *config.output], [*INPUTS, *OUTPUTS], strict=True):
        assert model_config_pb2.DataType.Name(one.data_type) == f"TYPE_{tensor.dtype}"
        assert tuple(one.dims) == tensor.dims
    assert all(one.optional for one in config.input)


def test_repository_in_the_tree_is_what_the_writer_writes() -> None:
    assert (REPOSITORY / MODEL / "config.pbtxt").read_text() == config_pbtxt(MODEL, {})
    assert (REPOSITORY / MODEL / "1" / "model.py").read_text() == model_py()
    assert len(model_py().splitlines()) <= 40


def test_written_repository(tmp_path: Path) -> None:
    options = ServeOptions(engine="/engines/one", queue=5, drain_seconds=2.5)
    written = write_repository(tmp_path / "made" / "repo", options, Path("/venv"))
    model, alias = (
        parsed((written / name / "config.pbtxt").read_text()) for name in (MODEL, ALIAS)
    )
    parameters = {key: value.string_value for key, value in model.parameters.items()}
    assert parameters.pop("EXECUTION_ENV_PATH") == "/venv"
    assert ServeOptions.from_parameters(parameters, {}) == options
    assert alias.parameters["alias_of"].string_value == MODEL
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == ["repo"]
    with pytest.raises(ConfigError, match="exists already"):
        write_repository(written, options)
    write_repository(written, ServeOptions(engine="other"), force=True)
    assert '"other"' in (written / MODEL / "config.pbtxt").read_text()


def test_options_from_the_environment() -> None:
    environ = {"DFLASH_TRT_ENGINE": "e", "DFLASH_TRT_QUEUE": "7", "DFLASH_TRT_WIDTH": "4"}
    options = ServeOptions.from_parameters({"queue": "9"}, environ)
    assert (options.engine, options.queue, options.width) == ("e", 9, "4")


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({}, "no engine is named"),
        ({"engine": "e", "queue": "many"}, "queue is 'many', which is not a number"),
        ({"engine": "e", "queue": "-1"}, "queue is -1, allowed are 0 to"),
        ({"engine": "e", "width": "wide"}, "width is 'wide'"),
        ({"engine": "e", "openai_port": "70000"}, "openai_port is 70000"),
        ({"engine": "e", "drain_seconds": "nan"}, "drain_seconds is nan"),
        ({"engine": "e", "model_name": "a\udcff"}, "of model_name is half a surrogate pair"),
    ],
)
def test_bad_options(parameters: dict[str, str], message: str) -> None:
    with pytest.raises(DFlashError, match=message):
        ServeOptions.from_parameters(parameters, {})
