"""Turns token ids into text as they arrive; never shows half a character."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from dflash_trt.text.pieces import Pieces


class Detokenizer:
    """Incremental decoder of one request: the deltas joined equal `Tokenizer.decode` of all ids.

    Every token costs its own length, however long the text: a token is looked up as bytes or text
    and the only state is an unfinished UTF-8 sequence of at most 3 bytes. Bytes that can no longer
    become a character are shown as U+FFFD at once, so invalid output never stalls a stream.
    """

    def __init__(self, pieces: Pieces, skip_special_tokens: bool = True) -> None:
        self._pieces = pieces
        self._hidden = pieces.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors=pieces.utf8_errors)
        self._strip_left = pieces.strip_start
        self._is_first = True

    def push(self, ids: Sequence[int]) -> str:
        """Add ids and return the text that is now certain.

        Raises `RequestError` for an id below 0 or beyond 32 bits.
        """
        parts = []
        for token_id in ids:
            piece = None if token_id in self._hidden else self._pieces[token_id]
            if piece is None:
                continue
            if self._pieces.separator and not self._is_first:
                parts.append(self._pieces.separator)
            self._is_first = False
            if isinstance(piece, bytes):
                parts.append(self._utf8.decode(piece))
            else:
                parts += (self._end_bytes(), piece)
        return self._strip("".join(parts))

    def flush(self) -> str:
        """Return what the last bytes amount to (U+FFFD, as no more will come); call at the end."""
        return self._strip(self._end_bytes())

    def _end_bytes(self) -> str:
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text

    def _strip(self, text: str) -> str:
        while self._strip_left and text:
            if not text.startswith(self._pieces.strip_char):
                self._strip_left = 0
                break
            text = text[1:]
            self._strip_left -= 1
        return text
