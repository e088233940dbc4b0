"""Requests of tensorrtllm_backend's clients, over HTTP and gRPC, with the public client library."""

from __future__ import annotations

import json
import queue
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
from running import Server

TYPES: dict[str, tuple[str, Any]] = {
    "text_input": ("BYTES", np.object_),
    "messages": ("BYTES", np.object_),
    "chat_template_kwargs": ("BYTES", np.object_),
    "stop_words": ("BYTES", np.object_),
    "bad_words": ("BYTES", np.object_),
    "max_tokens": ("INT32", np.int32),
    "min_tokens": ("INT32", np.int32),
    "top_k": ("INT32", np.int32),
    "end_id": ("INT32", np.int32),
    "input_ids": ("INT32", np.int32),
    "stop_token_ids": ("INT32", np.int32),
    "seed": ("UINT64", np.uint64),
    "random_seed": ("UINT64", np.uint64),
    "temperature": ("FP32", np.float32),
    "top_p": ("FP32", np.float32),
    "repetition_penalty": ("FP32", np.float32),
}


@dataclass
class Answer:
    """What came back: each response's outputs, and the error if there was one."""

    responses: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""

    @property
    def text(self) -> str:
        return "".join(response["text_output"] for response in self.responses)

    @property
    def ids(self) -> list[int]:
        return [token for response in self.responses for token in response["output_ids"]]

    @property
    def last(self) -> dict[str, Any]:
        return self.responses[-1]


def grpc_input(name: str, value: Any) -> grpcclient.InferInput:
    """With the batch dimension that clients of an ensemble send."""
    kind, dtype = TYPES.get(name, ("BOOL", np.bool_))
    items = value if isinstance(value, list) else [value]
    if kind == "BYTES":
        items = [item.encode() if isinstance(item, str) else item for item in items]
    array = np.array([items], dtype)
    made = grpcclient.InferInput(name, list(array.shape), kind)
    made.set_data_from_numpy(array)
    return made


def over_grpc(server: Server, model: str = "ensemble", **fields: Any) -> Answer:
    """A request on a gRPC stream of its own."""
    return grpc_infer(server, [grpc_input(*item) for item in fields.items()], model)


def grpc_infer(
    server: Server,
    inputs: list[grpcclient.InferInput],
    model: str = "ensemble",
    *,
    with_status: bool = False,
) -> Answer:
    """An error is its message, with its status before it if that is asked for.

    Triton sends it to a stream that has a header, and cancels the stream. In 2.51 that is a race:
    four clients at once end Triton with a segmentation fault within a thousand such streams.
    """
    answer = Answer()
    headers = {"triton_grpc_error": "true"} if with_status else None
    results: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    with grpcclient.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
        client.start_stream(lambda result, error: results.put((result, error)), headers=headers)
        client.async_stream_infer(model, inputs, enable_empty_final_response=True)
        while True:
            result, error = results.get(timeout=60)
            if error is not None:
                answer.error = f"{error.status()} " * with_status + error.message()
                break
            answer.responses.append(outputs_of(result))
            if result.get_response().parameters["triton_final_response"].bool_param:
                break
        client.stop_stream()
    return answer


def outputs_of(result: Any) -> dict[str, Any]:
    made = {}
    for output in result.get_response().outputs:
        flat = result.as_numpy(output.name).reshape(-1).tolist()
        flat = [item.decode() if isinstance(item, bytes) else item for item in flat]
        is_list = output.name in ("output_ids", "output_log_probs")
        made[output.name] = flat if is_list else flat[0]
    return made


def over_http(server: Server, model: str = "ensemble", **fields: Any) -> Answer:
    """POST to /generate, or to /generate_stream when `stream` is set."""
    route = "generate_stream" if fields.get("stream") else "generate"
    request = urllib.request.Request(
        server.url(f"/v2/models/{model}/{route}"), json.dumps(fields).encode()
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            body = answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error=f"{error.code} {error.read().decode()}")
    if route == "generate":
        return Answer([_listed(json.loads(body))])
    events = [json.loads(line[6:]) for line in body.split("\n\n") if line.startswith("data: ")]
    error = next((event["error"] for event in events if "error" in event), "")
    return Answer([_listed(event) for event in events if "error" not in event], error)


def _listed(response: dict[str, Any]) -> dict[str, Any]:
    """Triton's JSON writes a list of one element as that element."""
    for name in ("output_ids", "output_log_probs"):
        if name in response and not isinstance(response[name], list):
            response[name] = [response[name]]
    return response
