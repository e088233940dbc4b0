"""The engine's output in the forms of OpenAI's API: whole, or as events of a stream."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from dflash_trt.decode.generation import Generation
from dflash_trt.decode.logprobs import TokenLogprob
from dflash_trt.decode.request import Delta
from dflash_trt.text import Tokenizer
from dflash_trt.text.stop import FinishReason

DONE = b"data: [DONE]\n\n"


def event(data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(data, ensure_ascii=False).encode(errors="replace") + b"\n\n"


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """The usage object."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def _reason(reason: FinishReason) -> str:
    """A reason of OpenAI's: clients read no other. What was cut by its deadline was too long."""
    return "length" if reason == "timeout" else reason


class ChatAnswer:
    """Answers of one chat."""

    kind = "chat.completion"
    prefix = "chatcmpl"

    def __init__(self, request_id: str, model: str, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._head = {
            "id": f"{self.prefix}-{request_id}",
            "object": self.kind,
            "created": int(time.time()),
            "model": model,
        }
        self._started = False

    def whole(self, made: Generation) -> dict[str, Any]:
        """The answer as one object."""
        choice = {
            "index": 0,
            **self._text(made.text),
            "logprobs": self._logprobs(made.logprobs),
            "finish_reason": _reason(made.finish_reason),
        }
        numbers = usage(made.prompt_tokens, len(made.token_ids))
        return {**self._head, "choices": [choice], "usage": numbers}

    def parts(self, delta: Delta) -> list[bytes]:
        """The events of a delta: text, then the end."""
        logprobs = self._logprobs(delta.logprobs)
        events = []
        if delta.text or logprobs is not None:
            events.append(self._chunk(self._piece(delta.text), logprobs, None))
        if delta.finish_reason is not None:
            events.append(self._chunk(self._piece(None), None, _reason(delta.finish_reason)))
        return events

    def usage_part(self, prompt_tokens: int, completion_tokens: int) -> bytes:
        """The event with the usage."""
        numbers = usage(prompt_tokens, completion_tokens)
        return event({**self._head, "object": self._chunk_kind, "choices": [], "usage": numbers})

    @property
    def _chunk_kind(self) -> str:
        return f"{self.kind}.chunk"

    def _chunk(self, piece: dict[str, Any], logprobs: Any, reason: str | None) -> bytes:
        choice = {"index": 0, **piece, "logprobs": logprobs, "finish_reason": reason}
        return event({**self._head, "object": self._chunk_kind, "choices": [choice]})

    def _text(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}

    def _piece(self, text: str | None) -> dict[str, Any]:
        role = {} if self._started else {"role": "assistant"}
        self._started = True
        return {"delta": role if text is None else {**role, "content": text}}

    def _logprobs(self, entries: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
        if entries is None:
            return None
        return {
            "content": [
                {
                    **self._token(entry.token_id, entry.logprob),
                    "top_logprobs": [self._token(token, value) for token, value in entry.top],
                }
                for entry in entries
            ]
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token)
        return {"token": raw.decode(errors="replace"), "logprob": logprob, "bytes": list(raw)}


class CompletionAnswer(ChatAnswer):
    """Answers of one completion."""

    kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, request_id: str, model: str, tokenizer: Tokenizer, echo: str) -> None:
        super().__init__(request_id, model, tokenizer)
        self._echo = echo
        self._offset = len(echo)

    @property
    def _chunk_kind(self) -> str:
        return self.kind

    def _text(self, text: str) -> dict[str, Any]:
        return {"text": self._echo + text}

    def _piece(self, text: str | None) -> dict[str, Any]:
        return {"text": text or ""}

    def _logprobs(self, entries: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
        if entries is None:
            return None
        texts = [self._string(entry.token_id) for entry in entries]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [
                {self._string(token): value for token, value in entry.top} for entry in entries
            ],
            "text_offset": offsets,
        }

    def _string(self, token: int) -> str:
        return self._tokenizer.token_bytes(token).decode(errors="replace")
