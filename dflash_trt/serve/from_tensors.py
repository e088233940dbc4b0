"""Tensors of a Triton request to a request of ours; what is wrong with them is a RequestError."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_trt.decode.request import MAX_SEED, SamplingParams
from dflash_trt.errors import RequestError
from dflash_trt.serve.request import GenerateRequest
from dflash_trt.serve.tensors import INPUTS, Use

Arrays = Mapping[str, npt.NDArray[Any]]
_KINDS = {"STRING": "OS", "INT32": "i", "UINT64": "u", "FP32": "f", "BOOL": "b"}  # NumPy's
_TABLE = {tensor.name: tensor for tensor in INPUTS}
_MAX_JSON_DEPTH_ERRORS = (RecursionError, ValueError)


@dataclass(frozen=True)
class TensorRequest:
    """A request, and which outputs it wants in what form."""

    generate: GenerateRequest
    stream: bool
    echo: str  # text in front of the output
    log_probs: bool
    perf_metrics: bool
    num_input_tokens: bool
    num_output_tokens: bool
    finish_reason: bool
    token_ids: bool


def read_request(arrays: Arrays) -> TensorRequest:
    """Read a request's inputs by name. Raises `RequestError` that names the tensor."""
    values = {name: _value(name, array) for name, array in arrays.items()}
    text, stream = values.get("text_input"), values.get("stream", False)
    if not any(values.get(form) for form in ("text_input", "messages", "input_ids")):
        raise RequestError("the prompt is empty", hint="send text_input, messages or input_ids")
    # tensorrtllm_backend repeats the prompt unless told otherwise, but never in a stream.
    echoes = bool(text) and not stream and not values.get("exclude_input_in_output", False)
    return TensorRequest(
        generate=GenerateRequest(
            params=_params(values),
            text=text or None,
            messages=_json(values, "messages", list),
            token_ids=values.get("input_ids"),
            template_flags=_json(values, "chat_template_kwargs", dict) or {},
            biased_words=_biased_words(values),
            deadline_s=_deadline(values),
        ),
        stream=stream,
        echo=text or "" if echoes else "",
        log_probs=values.get("return_log_probs", False),
        perf_metrics=values.get("return_perf_metrics", False),
        num_input_tokens=values.get("return_num_input_tokens", False),
        num_output_tokens=values.get("return_num_output_tokens", False),
        finish_reason=values.get("return_finish_reason", False),
        token_ids=values.get("return_token_ids", False),
    )


def _value(name: str, array: npt.NDArray[Any]) -> Any:
    """The plain value of an input: a scalar for dims (1), else a list."""
    tensor = _TABLE.get(name)
    if tensor is None:
        raise RequestError(f"there is no input {name}")
    if tensor.use is Use.IGNORED:
        return None
    if tensor.use is Use.REFUSED:
        flat = array.reshape(-1).tolist()
        if flat and flat != [tensor.default]:
            raise RequestError(f"{name} is not supported")
        return None
    if array.dtype.kind not in _KINDS[tensor.dtype]:
        raise RequestError(f"{name} has elements of {array.dtype}, {tensor.dtype} is needed")
    flat = array.reshape(-1).tolist()
    if tensor.dtype == "STRING":
        flat = [_text(name, item) for item in flat]
    if tensor.dims != (1,):
        return flat
    if len(flat) != 1:
        raise RequestError(f"{name} has {len(flat)} elements, exactly one is needed")
    return flat[0]


def _text(name: str, item: object) -> str:
    if isinstance(item, str):
        return item
    if not isinstance(item, bytes):
        raise RequestError(f"{name} is not a string")
    try:
        return item.decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"{name} is not UTF-8 at byte {error.start}") from None


def _json(values: Mapping[str, Any], name: str, kind: type) -> Any:
    text = values.get(name)
    if not text:
        return None
    try:
        data = json.loads(text)
    except _MAX_JSON_DEPTH_ERRORS as error:
        raise RequestError(f"{name} is not JSON: {str(error)[:100]}") from None
    if not isinstance(data, kind):
        raise RequestError(f"{name} is not a JSON {'list' if kind is list else 'object'}")
    return data


def _params(values: Mapping[str, Any]) -> SamplingParams:
    def given(*names: str, default: Any) -> Any:
        found = (values[name] for name in names if values.get(name) is not None)
        return next(found, default)

    seed = given("seed", "random_seed", default=None)
    end_id = given("end_id", default=None)
    own_end = [] if end_id is None or end_id < 0 else [end_id]
    return SamplingParams(
        max_tokens=values.get("max_tokens"),
        top_k=given("top_k", default=0),
        min_p=given("min_p", default=0.0),
        seed=None if seed is None else seed & MAX_SEED,  # clients may send any 64 bits
        min_tokens=given("min_tokens", "min_length", default=0),
        repetition_penalty=given("repetition_penalty", default=1.0),
        presence_penalty=given("presence_penalty", default=0.0),
        frequency_penalty=given("frequency_penalty", default=0.0),
        # Clients send a list with one empty word for none.
        bad_words=tuple(word for word in values.get("bad_words") or () if word),
        stop=tuple(word for word in values.get("stop_words") or () if word),
        stop_token_ids=(*own_end, *(values.get("stop_token_ids") or ())),
        # An end_id takes the place of the model's own; -1 means that there is none.
        ignore_eos=given("ignore_eos", default=end_id is not None),
        logprobs=0 if values.get("return_log_probs") else None,
        **_randomness(values),
    )


def _randomness(values: Mapping[str, Any]) -> dict[str, Any]:
    """Temperature and top_p, with tensorrtllm_backend's meaning of what is missing or 0.

    There top_k and top_p switch sampling on, and a top_p of 0 is off.
    """
    top_k, top_p = values.get("top_k") or 0, values.get("top_p")
    temperature = values.get("temperature")
    is_greedy = top_p == 0.0 and top_k == 0
    if temperature is None:
        temperature = 1.0 if top_k > 1 or top_p else 0.0
    return {
        "temperature": 0.0 if is_greedy else temperature,
        "top_p": top_p if top_p else 1.0,
    }


def _biased_words(values: Mapping[str, Any]) -> list[tuple[str, float]]:
    words = values.get("embedding_bias_words") or []
    weights = values.get("embedding_bias_weights") or []
    if len(words) != len(weights):
        raise RequestError(
            f"{len(words)} embedding_bias_words, but {len(weights)} embedding_bias_weights"
        )
    return [(word, weight) for word, weight in zip(words, weights, strict=True) if word]


def _deadline(values: Mapping[str, Any]) -> float | None:
    seconds = values.get("timeout_seconds")
    if seconds is not None and not 0 < seconds < np.inf:
        raise RequestError(f"timeout_seconds is {seconds}, allowed are numbers above 0")
    return seconds
