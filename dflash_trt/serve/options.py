"""What a server is told: flags of `serve`, parameters of a Triton model, or DFLASH_TRT_*."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_trt.decode.admission import RunConfig
from dflash_trt.decode.width import parse_width
from dflash_trt.errors import ConfigError
from dflash_trt.runtime.threads import MAX_THREADS
from dflash_trt.text.unicode import check_unicode

ENV_PREFIX = "DFLASH_TRT_"
MAX_CONNECTIONS = 1 << 16
MAX_BODY_BYTES = 1 << 30


@dataclass(frozen=True)
class ServeOptions:
    """Choices of a server. A field `x_y` is the model parameter `x_y` and the variable
    `DFLASH_TRT_X_Y`; a parameter wins. Raises `ConfigError` for a value out of range.
    """

    engine: str  # the engine directory
    model_name: str = ""  # in OpenAI's API; default: the engine directory's name
    queue: int = 64  # requests that may wait, beyond those in slots
    width: str = "auto"  # tokens that a step verifies, or auto, which measures
    threads: int = 0  # CPU threads; 0: this process's CPU allowance
    max_prompt_tokens: int = 0  # of one request; 0: what the engine holds
    max_output_tokens: int = 0  # of one request, and the default of max_tokens; 0: likewise
    request_seconds: float = 0.0  # the longest that a request may take; 0: no limit
    step_seconds: float = RunConfig.max_step_s  # then the engine is dead; 0: no limit
    drain_seconds: float = 120.0  # how long running requests may go on after SIGTERM
    address: str = "0.0.0.0"
    openai_port: int = 0  # 0: no OpenAI front end
    api_key_file: str = ""  # one key a line; empty: no key is asked for
    max_connections: int = 1024  # HTTP requests that the OpenAI front end holds at a time
    max_body_bytes: int = 8 << 20  # of one of them
    socket: str = ""  # for other processes; default: one that models of the same Triton find

    def __post_init__(self) -> None:
        if not self.engine:
            raise ConfigError(
                "no engine is named", hint=f"set the parameter engine, or {ENV_PREFIX}ENGINE"
            )
        for name, low, high in (
            ("queue", 0, 1 << 20),
            ("threads", 0, MAX_THREADS),
            ("max_prompt_tokens", 0, 1 << 30),
            ("max_output_tokens", 0, 1 << 30),
            ("request_seconds", 0, 1e6),
            ("step_seconds", 0, 1e6),
            ("drain_seconds", 0, 1e6),
            ("openai_port", 0, 65535),
            ("max_connections", 1, MAX_CONNECTIONS),
            ("max_body_bytes", 1, MAX_BODY_BYTES),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ConfigError(f"{name} is {value}, allowed are {low} to {high:.0f}")
        parse_width(self.width)
        check_unicode("model_name", self.model_name)

    @classmethod
    def from_parameters(
        cls, parameters: Mapping[str, str], environ: Mapping[str, str] | None = None
    ) -> ServeOptions:
        """Read a Triton model's parameters, and `environ` for those it has not.

        Raises `ConfigError` for a value that cannot be read or is out of range.
        """
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            text = parameters.get(field.name, environ.get(ENV_PREFIX + field.name.upper(), ""))
            if text:
                values[field.name] = _parse(field.name, str(field.type), text)
        return cls(**{"engine": "", **values})

    def to_parameters(self) -> dict[str, str]:
        """The parameters that `from_parameters` reads: those that differ from the default."""
        return {
            field.name: str(value)
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != field.default
        }


def _parse(name: str, kind: str, text: str) -> Any:
    try:
        return {"int": int, "float": float, "str": str}[kind](text)
    except ValueError as error:
        raise ConfigError(f"{name} is {text!r}, which is not a number") from error
