"""The tokenizer of an engine: text and chat messages to ids, ids to text."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import tokenizers

from dflash_trt.errors import RequestError, TokenizerError
from dflash_trt.text import folder
from dflash_trt.text.chat import ChatTemplate, Messages, build_context, pick_template
from dflash_trt.text.detokenize import Detokenizer
from dflash_trt.text.pieces import Pieces
from dflash_trt.text.stop import StopChecker
from dflash_trt.text.stream import TextStream
from dflash_trt.text.unicode import check_unicode


class Tokenizer:
    """Immutable after construction, so one instance serves all requests and threads.

    Encoding and templates follow Hugging Face, except that prompt text which already starts with
    the BOS token does not get a second one.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        templates: Mapping[str, str],
        stop_ids: Sequence[int] = (),
        source: str,
    ) -> None:
        """Join a `tokenizers` object with what chat and stopping need; `source` names it.

        `special_tokens` maps names such as `bos_token` to text, `templates` names to Jinja.

        Raises `TokenizerError` when these contradict each other.
        """
        # A file may say how training cut and padded its texts; a prompt must stay whole.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._special_tokens = dict(special_tokens)
        self._source = source
        self._pieces = Pieces(backend, source)
        self._templates = {
            name: ChatTemplate(text, f"{source}: {name}") for name, text in templates.items()
        }
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.bos_token = self._special_tokens.get("bos_token")
        self.eos_token = self._special_tokens.get("eos_token")
        self.bos_token_id = self._id_of("bos_token")
        self.eos_token_id = self._id_of("eos_token")
        eos = () if self.eos_token_id is None else (self.eos_token_id,)
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys((*stop_ids, *eos)))
        start = backend.encode("").ids[:1]
        self._adds_bos = self.bos_token_id is not None and start == [self.bos_token_id]

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read a checkpoint's folder, or one that `export` wrote.

        Raises `TokenizerError` naming the file that is missing or wrong.
        """
        found = folder.read(Path(path))
        return cls(
            found.backend,
            special_tokens=found.special_tokens,
            templates=found.templates,
            stop_ids=found.stop_ids,
            source=str(path),
        )

    def export(self, path: str | Path) -> tuple[str, ...]:
        """Write all of it to a folder that `load` reads; return the names of the files.

        Raises `TokenizerError` when the folder cannot be written.
        """
        contents = folder.Contents(
            backend=self._backend,
            special_tokens=self._special_tokens,
            templates={name: template.source for name, template in self._templates.items()},
            stop_ids=self.stop_ids,
        )
        return folder.write(Path(path), contents)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text; special tokens in it become their ids.

        Raises `RequestError` when `text` is not text, or not valid Unicode.
        """
        if not isinstance(text, str):
            raise RequestError(f"prompt is a {type(text).__name__}, not a string")
        check_unicode("the prompt", text)
        work = partial(self._backend.encode, text, add_special_tokens=add_special_tokens)
        ids = folder.call_library(f"{self._source}: cannot encode the prompt", work).ids
        bos = self.bos_token_id
        if add_special_tokens and self._adds_bos and ids[:2] == [bos, bos]:
            return list(ids[1:])
        return list(ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ids; those the vocabulary has not are passed over.

        Raises `RequestError` for an id below 0 or beyond 32 bits.
        """
        detokenizer = self.detokenizer(skip_special_tokens)
        return detokenizer.push(ids) + detokenizer.flush()

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        """Start the incremental decoding of one request."""
        return Detokenizer(self._pieces, skip_special_tokens)

    def text_stream(
        self,
        stop_strings: Sequence[str] = (),
        stop_ids: Collection[int] = (),
        *,
        eos_ids: Collection[int] | None = None,
        ignore_eos: bool = False,
        max_tokens: int | None = None,
        skip_special_tokens: bool = True,
    ) -> TextStream:
        """Start the text of one request: the model's end ids, the request's own rules.

        `eos_ids` are this tokenizer's `stop_ids` unless given.

        A stop string that is a special token's text also stops at its id, as hidden text never
        matches. Raises `RequestError` for a bad rule.
        """
        named = [self.token_to_id(text) for text in stop_strings if isinstance(text, str)]
        checker = StopChecker(
            stop_strings,
            [*stop_ids, *(i for i in named if i in self.special_ids and i is not None)],
            eos_ids=self.stop_ids if eos_ids is None else eos_ids,
            ignore_eos=ignore_eos,
            max_tokens=max_tokens,
        )
        return TextStream(self.detokenizer(skip_special_tokens), checker)

    def apply_chat_template(
        self,
        messages: Messages,
        /,
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        **flags: Any,
    ) -> str:
        """Return the prompt text of a chat; `flags` (`enable_thinking`, ...) go to the template.

        Raises `RequestError` for bad messages, `TokenizerError` for a bad template.
        """
        context = build_context(
            messages,
            self._special_tokens,
            flags,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            documents=documents,
        )
        return pick_template(self._templates, tools, self._source).render(context)

    def encode_chat(
        self, messages: Messages, add_generation_prompt: bool = True, **options: Any
    ) -> list[int]:
        """Return the ids of a chat. The template writes its own BOS, so none is added."""
        text = self.apply_chat_template(messages, add_generation_prompt, **options)
        return self.encode(text, add_special_tokens=False)

    @property
    def has_chat_template(self) -> bool:
        """True when `apply_chat_template` can work."""
        return bool(self._templates)

    @cached_property
    def max_token_chars(self) -> int:
        """Characters of the longest token: n tokens are no longer than n times that."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)))

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids whose text `decode` leaves out by default."""
        return self._pieces.special_ids

    def token_to_id(self, token: str) -> int | None:
        """Return the id of exactly this token, None if there is none."""
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that an id adds to a text, special tokens included; none for an unknown id."""
        piece = self._pieces[token_id]
        if isinstance(piece, str):
            return piece.encode()
        return piece or b""

    def _id_of(self, name: str) -> int | None:
        token = self._special_tokens.get(name)
        if token is None:
            return None
        token_id = self.token_to_id(token)
        if token_id is None:
            raise TokenizerError(
                f"{self._source}: {name} {token!r} is not in the vocabulary",
                hint="tokenizer.json and tokenizer_config.json must come from the same model",
            )
        return token_id
