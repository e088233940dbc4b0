"""What the engine brought to a Triton request, as arrays by output name."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_trt.decode.generation import Generation
from dflash_trt.decode.request import Delta
from dflash_trt.serve.from_tensors import TensorRequest
from dflash_trt.serve.tensors import OUTPUTS

Arrays = dict[str, npt.NDArray[Any]]

_NUMPY: dict[str, Any] = {
    "STRING": np.object_, "INT32": np.int32, "INT64": np.int64, "FP32": np.float32,
}  # fmt: skip
_TABLE = {tensor.name: tensor for tensor in OUTPUTS}


class Answer:
    """The responses of one request, in order."""

    def __init__(self, asked: TensorRequest, prompt_tokens: int) -> None:
        self._asked = asked
        self._prompt_tokens = prompt_tokens
        self._arrival_ns = time.time_ns()
        self._log_prob = 0.0  # of all tokens so far

    def part(self, delta: Delta, whole: Generation | None) -> Arrays:
        """The outputs for a delta; `whole` is given with the last, which may be the only one."""
        asked = self._asked
        values: dict[str, Any] = {
            "text_output": [asked.echo + delta.text],
            "batch_index": [0],
            "sequence_index": [0],
        }
        if asked.token_ids:
            values["output_ids"] = delta.token_ids
        if asked.num_output_tokens:
            values["num_output_tokens"] = [len(delta.token_ids)]  # clients add up those of a stream
        if asked.log_probs:
            log_probs = [entry.logprob for entry in delta.logprobs or ()]
            self._log_prob += sum(log_probs)
            values["output_log_probs"] = [log_probs]
            values["cum_log_probs"] = [self._log_prob]
        if asked.num_input_tokens:
            values["num_input_tokens"] = [self._prompt_tokens]
        if asked.finish_reason and whole is not None:
            values["finish_reason"] = [whole.finish_reason]
        if asked.perf_metrics and whole is not None:
            values |= _perf_metrics(whole, self._arrival_ns)
        return {name: _array(name, value) for name, value in values.items()}


def _perf_metrics(whole: Generation, arrival_ns: int) -> dict[str, Sequence[float]]:
    stats = whole.stats
    accepted, offered = sum(stats.accepted), sum(stats.offered)
    first_ns = arrival_ns + int((whole.ttft_s or 0.0) * 1e9)
    return {
        "acceptance_rate": [accepted / offered if offered else 0.0],
        "acceptance_length": [stats.acceptance_length or 0.0],
        "total_accepted_draft_tokens": [accepted],
        "total_draft_tokens": [offered],
        "arrival_time_ns": [arrival_ns],
        "first_token_time_ns": [first_ns],
        "last_token_time_ns": [first_ns + int(whole.decode_s * 1e9)],
    }


def _array(name: str, value: Any) -> npt.NDArray[Any]:
    """With the batch dimension in front."""
    kind = _NUMPY[_TABLE[name].dtype]
    if kind is np.object_:
        value = [text.encode(errors="replace") for text in value]
    return np.asarray(value, kind)[None]
