"""What any front end asks of the engine: a prompt in one of three forms, and how to continue it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dflash_trt.decode.request import SamplingParams
from dflash_trt.errors import CapacityError, RequestError
from dflash_trt.text import Tokenizer


@dataclass(frozen=True)
class GenerateRequest:
    """One request. Exactly one of `text`, `messages` and `token_ids` is given."""

    params: SamplingParams
    text: str | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    token_ids: Sequence[int] | None = None
    template_flags: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Any] | None = None
    biased_words: Sequence[tuple[str, float]] = ()  # added to the logits of the words' tokens
    deadline_s: float | None = None

    def prompt_ids(self, tokenizer: Tokenizer, max_seq_len: int) -> list[int]:
        """The prompt's ids.

        Raises `RequestError`, `CapacityError` for one that is too long to look at, or
        `TokenizerError` for a template's fault.
        """
        forms = (self.text, self.messages, self.token_ids)
        if sum(form is not None for form in forms) != 1:
            raise RequestError("give exactly one of a text, messages and token ids as the prompt")
        if self.token_ids is not None:
            return list(self.token_ids)
        if self.messages is not None:
            if "tools" in self.template_flags:
                raise RequestError("chat template flag tools is reserved")
            text = tokenizer.apply_chat_template(
                list(self.messages), tools=self.tools, **self.template_flags
            )
            return _encode(tokenizer, text, max_seq_len, add_special_tokens=False)
        assert self.text is not None
        return _encode(tokenizer, self.text, max_seq_len, add_special_tokens=True)

    def all_params(self, tokenizer: Tokenizer) -> SamplingParams:
        """The parameters, with biased words as biases of ids."""
        if not self.biased_words:
            return self.params
        bias = dict(self.params.logit_bias)
        for word, weight in self.biased_words:
            for token in set(tokenizer.encode(word, add_special_tokens=False)):
                bias[token] = bias.get(token, 0.0) + weight
        return replace(self.params, logit_bias=bias)


def _encode(
    tokenizer: Tokenizer, text: str, max_seq_len: int, *, add_special_tokens: bool
) -> list[int]:
    """Ids of a text, which is not even looked at when it cannot fit: that would take long."""
    most = tokenizer.max_token_chars * max_seq_len
    if len(text) > most:
        raise CapacityError(
            f"the prompt has {len(text)} characters, the engine holds {max_seq_len} tokens",
            hint="shorten the prompt",
        )
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)
