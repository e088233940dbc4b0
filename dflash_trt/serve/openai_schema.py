"""The requests of OpenAI's API, checked, and as requests of ours."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dflash_trt.decode.request import MAX_SEED, SamplingParams
from dflash_trt.errors import RequestError
from dflash_trt.serve.request import GenerateRequest

_TOKEN_ID = re.compile(r"[0-9]{1,10}")
_MAX_NAME = 100  # characters of a field's name in a message: clients may send any name
COMPLETION_TOKENS = 16  # OpenAI's default of a completion; a chat's is what the engine holds


class StreamOptions(BaseModel):
    """What a stream says beside text."""

    model_config = ConfigDict(extra="ignore")
    include_usage: bool = False


class TextFormat(BaseModel):
    """The only output format there is."""

    type: Literal["text"]


class _Request(BaseModel):
    """Fields of both kinds of request; below the line those that other servers have added."""

    # Whatever changes the output must not be passed over, so an unknown field is an error.
    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    n: Literal[1] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] | None = None
    # Accepted: they say who asks, and how it is kept and billed, not what.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: list[int] = Field(default_factory=list)
    bad_words: list[str] = Field(default_factory=list)
    timeout: float | None = None

    @model_validator(mode="before")
    @classmethod
    def _nulls_are_defaults(cls, data: Any) -> Any:
        """Clients send null for what they do not set."""
        if isinstance(data, dict):
            return {key: value for key, value in data.items() if value is not None}
        return data

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Read a body. Raises `RequestError` that names the field."""
        try:
            return cls.model_validate_json(body)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            where = ".".join(str(part) for part in first["loc"] if isinstance(part, str | int))
            where = where if len(where) <= _MAX_NAME else f"{where[:_MAX_NAME]}..."
            raise RequestError(f"{where}: {first['msg']}" if where else first["msg"]) from None

    def _params(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        # A top_p of 0, which OpenAI allows, leaves the likeliest token alone: that is greedy.
        is_greedy = self.top_p == 0
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_k=max(self.top_k, 0) if self.top_k == -1 else self.top_k,  # -1 is off elsewhere
            top_p=1.0 if is_greedy else self.top_p,
            min_p=self.min_p,
            seed=None if self.seed is None else self.seed & MAX_SEED,  # may be any 64 bits
            min_tokens=self.min_tokens,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=_biases(self.logit_bias or {}),
            bad_words=tuple(self.bad_words),
            logprobs=logprobs,
            stop=tuple(text for text in stop if text),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
        )
        return replace(params, temperature=0.0) if is_greedy else params


def _biases(given: dict[str, float]) -> dict[int, float]:
    bad = next((key for key in given if not _TOKEN_ID.fullmatch(key)), None)
    if bad is not None:
        raise RequestError(f"logit_bias: {bad[:40]!r} is not a token id")
    return {int(key): value for key, value in given.items()}


class ChatRequest(_Request):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    response_format: TextFormat | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    # Accepted where they ask for what is done anyhow.
    parallel_tool_calls: bool | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: Literal["none", "auto"] | None = None
    modalities: list[Literal["text"]] | None = None
    verbosity: Literal["medium"] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    def to_generate(self) -> GenerateRequest:
        """The request of ours. Raises `RequestError` for a field out of range."""
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs: needs logprobs to be true")
        if self.tools and self.tool_choice != "none":
            raise RequestError("tools: calls are not parsed", hint="set tool_choice to none")
        if self.functions:
            raise RequestError("functions: calls are not parsed", hint="leave functions out")
        limits = (self.max_completion_tokens, self.max_tokens)
        most = next((limit for limit in limits if limit is not None), None)
        return GenerateRequest(
            params=self._params(most, self.top_logprobs if self.logprobs else None),
            messages=self.messages,
            tools=self.tools,
            template_flags=self.chat_template_kwargs,
            deadline_s=self.timeout,
        )


class CompletionRequest(_Request):
    """POST /v1/completions."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = None
    echo: bool = False
    best_of: Literal[1] = 1
    suffix: Literal[""] | None = None

    def to_generate(self) -> GenerateRequest:
        """The request of ours. Raises `RequestError` for a field out of range."""
        prompt: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]] = self.prompt
        if not isinstance(prompt, str) and prompt and not isinstance(prompt[0], int):
            if len(prompt) != 1:
                raise RequestError(f"prompt: {len(prompt)} prompts, one a request is served")
            prompt = prompt[0]
        if not prompt:
            raise RequestError("prompt: it is empty")
        if self.echo and not isinstance(prompt, str):
            raise RequestError("echo: the prompt is not text")
        if self.echo and (self.logprobs is not None or self.stream):
            raise RequestError("echo: not together with logprobs or stream")
        most = COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        text = prompt if isinstance(prompt, str) else None
        ids = None if isinstance(prompt, str) else [int(token) for token in prompt]  # type: ignore[arg-type]
        return GenerateRequest(
            params=self._params(most, self.logprobs),
            text=text,
            token_ids=ids,
            deadline_s=self.timeout,
        )
