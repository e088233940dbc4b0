"""Messages between the processes of one server: JSON behind its length, arrays as base64.

JSON and not pickles: what arrives can be data and nothing else.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import struct
from typing import Any, BinaryIO

import numpy as np

from dflash_trt.serve.desk import Refusal

_LENGTH = struct.Struct("!Q")
# One key of an object tells what it stands for; no name of a tensor has a `$`.
_ARRAY, _BYTES, _REFUSAL = "$array", "$bytes", "$refusal"


def packed(*message: Any) -> bytes:
    """A message as it goes over a socket: its kind, then JSON's types, arrays and refusals.

    Arrays of text or bytes arrive as arrays of objects, the others as they are.
    """
    body = json.dumps(message, default=_plain, separators=(",", ":")).encode()
    return _LENGTH.pack(len(body)) + body


def read(stream: BinaryIO) -> list[Any] | None:
    """The next message, None when the other end hung up, be it inside a message."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (size,) = _LENGTH.unpack(head)
    body = stream.read(size)
    return _unpacked(body) if len(body) == size else None


async def read_async(reader: asyncio.StreamReader) -> list[Any]:
    """The next message. Raises `asyncio.IncompleteReadError` when the other end hung up."""
    (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return _unpacked(await reader.readexactly(size))


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        if value.dtype.kind in "OSU":
            data: Any = value.ravel().tolist()
        else:
            data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {_ARRAY: value.dtype.str, "shape": value.shape, "data": data}
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}
    if isinstance(value, Refusal):
        return {_REFUSAL: dataclasses.asdict(value)}
    raise TypeError(f"{type(value).__name__} is no part of a message")


def _unpacked(body: bytes) -> list[Any]:
    message: list[Any] = json.loads(body, object_hook=_object)
    return message


def _object(found: dict[str, Any]) -> Any:
    if _BYTES in found:
        return base64.b64decode(found[_BYTES])
    if _REFUSAL in found:
        return Refusal(**found[_REFUSAL])
    if _ARRAY not in found:
        return found
    data, dtype = found["data"], np.dtype(found[_ARRAY])
    if isinstance(data, list):
        array = np.empty(len(data), np.object_)
        array[:] = data
    else:
        array = np.frombuffer(base64.b64decode(data), dtype)
    return array.reshape(found["shape"])
