"""What each token id adds to a text: a tokenizer's `decoder`, read once, applied id by id."""

from __future__ import annotations

import codecs
import json
import re
from operator import index
from typing import Any

import tokenizers

from dflash_trt.errors import RequestError, TokenizerError

#: Bytes wait for the rest of their UTF-8 sequence; a string is finished text.
Piece = bytes | str

#: UTF-8 error rule of byte-fallback tokenizers: one U+FFFD for every bad byte, not per sequence.
EACH_BYTE = "dflash_trt.each_byte"

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
_HINT = "supported decoders: ByteLevel; Sequence of Replace, ByteFallback, Fuse, Strip; none"


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(EACH_BYTE, _replace_each_byte)


def _byte_of_char() -> dict[str, int]:
    """The printable stand-in of every byte in byte-level BPE vocabularies (GPT-2's table)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    table = {chr(byte): byte for byte in plain}
    return table | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()


class Pieces:
    """Maps ids to pieces; immutable but for its cache, so all requests may share one."""

    def __init__(self, backend: tokenizers.Tokenizer, source: str) -> None:
        self._backend = backend
        self._source = source
        self._cache: dict[int, Piece] = {}
        added: dict[int, tokenizers.AddedToken] = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.separator = ""
        self.strip_start = 0
        self.strip_char = " "
        self.utf8_errors = "replace"
        self._byte_level = False
        self._byte_fallback = False
        self._replacements: list[tuple[str, str]] = []
        self._read_program(backend.decoder)

    def __getitem__(self, token_id: int) -> Piece | None:
        """Return the piece of an id; None where the vocabulary has no such id (a padded row)."""
        piece = self._cache.get(token_id)
        if piece is not None:
            return piece
        try:
            token = self._backend.id_to_token(index(token_id))
        except (TypeError, OverflowError):
            raise RequestError(f"token id {token_id!r} is not a whole number from 0") from None
        if token is None:
            return None
        piece = self._cache[token_id] = self._make_piece(token)
        return piece

    def _make_piece(self, token: str) -> Piece:
        if self._byte_level:
            try:
                return bytes([_BYTE_OF_CHAR[char] for char in token])
            except KeyError:  # an added token, stored as plain text
                return token.encode()
        for old, new in self._replacements:
            token = token.replace(old, new)
        if self._byte_fallback and (match := _BYTE_TOKEN.match(token)):
            return bytes([int(match[1], 16)])
        return token

    def _read_program(self, decoder: Any) -> None:
        if decoder is None:  # the library then joins tokens with spaces
            self.separator = " "
            return
        spec = json.loads(decoder.__getstate__())
        steps = spec["decoders"] if spec["type"] == "Sequence" else [spec]
        kinds = [step["type"] for step in steps]
        if kinds == ["ByteLevel"]:
            self._byte_level = True
            return
        # Replace* ByteFallback? Fuse Strip?: only in this order can a token be decoded alone.
        if not re.fullmatch(r"(Replace,)*(ByteFallback,)?Fuse,(Strip,)?", ",".join([*kinds, ""])):
            self._refuse("+".join(kinds))
        for step in steps:
            self._read_step(step)

    def _read_step(self, step: dict[str, Any]) -> None:
        if step["type"] == "Replace":
            pattern = step["pattern"].get("String")
            if not pattern:
                self._refuse("Replace by regex")
            self._replacements.append((pattern, step["content"]))
        elif step["type"] == "ByteFallback":
            self._byte_fallback = True
            self.utf8_errors = EACH_BYTE
        elif step["type"] == "Strip":
            if step["stop"]:
                self._refuse("Strip at the end")
            self.strip_start, self.strip_char = step["start"], step["content"]

    def _refuse(self, what: str) -> None:
        message = f"{self._source}: decoder {what} cannot be streamed token by token"
        raise TokenizerError(message, hint=_HINT)
