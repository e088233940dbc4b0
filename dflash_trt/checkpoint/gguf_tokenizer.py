"""Builds a tokenizer from the metadata of a GGUF file, as Hugging Face's files would have it.

Reference for each split rule: the `tokenizer.json` of the family, and llama.cpp for the names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from dflash_trt.checkpoint.facts import NO_TOKEN
from dflash_trt.checkpoint.gguf_header import GgufArray, read_header
from dflash_trt.errors import TokenizerError
from dflash_trt.text import folder
from dflash_trt.text.chat import DEFAULT_TEMPLATE
from dflash_trt.text.tokenizer import Tokenizer

_KEY = "tokenizer.ggml."
_TEMPLATE_KEY = "tokenizer.chat_template"

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

#: Control tokens that end a turn whatever the file says: GGUF has room for one EOS id only.
_END_TOKENS = frozenset(
    ("<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "</s>")
)

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_MODERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class _Split:
    """How one family cuts text before merging; regexes apply in turn, each to the last's pieces."""

    regexes: tuple[str, ...]
    nfc: bool = False
    whole_words: bool = False  # a word that is a token is not merged up to it
    adds_bos: bool = False


_LLAMA3 = _Split((_MODERN.format(digits="{1,3}"),), whole_words=True, adds_bos=True)
_SPLITS = {
    "default": _Split((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": _Split((_GPT2,)),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _Split((_MODERN.format(digits=""),), nfc=True),
    "smollm": _Split((r"\p{N}", _GPT2)),
}


def load_gguf_tokenizer(path: str | Path) -> Tokenizer:
    """Read the tokenizer of a .gguf file.

    Raises `CheckpointError` when the file is not GGUF, `TokenizerError` when it asks for a
    tokenizer we do not have.
    """
    file = Path(path)
    return _Builder(file, tokenizer_metadata(file)).build()


def tokenizer_metadata(path: Path) -> dict[str, Any]:
    """The `tokenizer.*` keys of a .gguf file, arrays as lists. Raises `CheckpointError`."""
    return {
        key: value.values() if isinstance(value, GgufArray) else value
        for key, value in read_header(path).metadata.items()
        if key.startswith("tokenizer.")
    }


class _Builder:
    """One file's metadata, checked on access."""

    def __init__(self, file: Path, found: Mapping[str, Any]) -> None:
        self._file = file
        self._found = found

    def build(self) -> Tokenizer:
        model = self._get("model", str)
        tokens = self._strings("tokens")
        kinds = self._list("token_type", int, len(tokens))
        if len(set(tokens)) != len(tokens):
            self._fail("tokenizer.ggml.tokens names a token twice")
        what = f"{self._file}: its tokenizer cannot be built"
        hint = "convert the model to GGUF again"
        if model == "gpt2":
            split = self._split()
            work = partial(self._byte_level, tokens, split)
            adds_bos = split.adds_bos
        elif model == "llama":
            work = partial(self._sentencepiece, tokens, kinds)
            adds_bos = True
        else:
            self._fail(f"tokenizer model {model!r} is not supported, only gpt2 and llama")
        backend: tokenizers.Tokenizer = folder.call_library(what, work, hint)
        _add_tokens(backend, tokens, kinds)
        special = self._special_tokens(tokens)
        bos = special.get("bos_token") if self._flag("add_bos_token", adds_bos) else None
        eos = special.get("eos_token") if self._flag("add_eos_token", False) else None
        if bos or eos or model == "llama":
            backend.post_processor = folder.make_post_processor(backend, bos, eos)
        return Tokenizer(
            backend,
            special_tokens=special,
            templates=self._templates(),
            stop_ids=self._stop_ids(tokens, kinds),
            source=str(self._file),
        )

    def _split(self) -> _Split:
        pre = self._get("pre", str)
        if pre not in _SPLITS:
            names = ", ".join(_SPLITS)
            self._fail(f"pre-tokenizer {pre!r} is not supported", f"supported: {names}")
        return _SPLITS[pre]

    def _byte_level(self, tokens: Sequence[str], split: _Split) -> tokenizers.Tokenizer:
        merges = [_pair(merge) for merge in self._strings("merges")]
        vocab = {token: index for index, token in enumerate(tokens)}
        model = models.BPE(vocab=vocab, merges=merges, ignore_merges=split.whole_words)
        backend = tokenizers.Tokenizer(model)
        if split.nfc:
            backend.normalizer = normalizers.NFC()
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                *(pre_tokenizers.Split(Regex(r), behavior="isolated") for r in split.regexes),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        backend.decoder = decoders.ByteLevel()
        return backend

    def _sentencepiece(self, tokens: Sequence[str], kinds: Sequence[int]) -> tokenizers.Tokenizer:
        scores = self._list("scores", float, len(tokens))
        vocab = {token: index for index, token in enumerate(tokens)}
        unknown = next((t for t, kind in zip(tokens, kinds, strict=True) if kind == _UNKNOWN), None)
        model = models.BPE(
            vocab=vocab,
            merges=_merges_from_scores(vocab, scores, kinds),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
        backend = tokenizers.Tokenizer(model)
        prefix = self._flag("add_space_prefix", True)
        spaces = normalizers.Replace(" ", "▁")
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), spaces] if prefix else [spaces]
        )
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence(
            [*steps, decoders.Strip(" ", 1, 0)] if prefix else steps
        )
        return backend

    def _special_tokens(self, tokens: Sequence[str]) -> dict[str, str]:
        names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
        found = {}
        for key, name in names.items():
            token_id = self._id(f"{key}_token_id", len(tokens))
            if token_id is not None:
                found[f"{name}_token"] = tokens[token_id]
        return found

    def _stop_ids(self, tokens: Sequence[str], kinds: Sequence[int]) -> list[int]:
        named = [self._id(f"{name}_token_id", len(tokens)) for name in ("eos", "eot", "eom")]
        known = [
            index
            for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind == _CONTROL and token in _END_TOKENS
        ]
        return [token_id for token_id in (*named, *known) if token_id is not None]

    def _templates(self) -> dict[str, str]:
        found = {}
        for key, value in self._found.items():
            if key != _TEMPLATE_KEY and not key.startswith(_TEMPLATE_KEY + "."):
                continue
            name = key.removeprefix(_TEMPLATE_KEY).removeprefix(".") or DEFAULT_TEMPLATE
            if not isinstance(value, str):
                self._fail(f"{key} is not text")
            found[folder.check_name(name, self._file)] = value
        return found

    def _get(self, name: str, kind: type) -> Any:
        value = self._found.get(_KEY + name)
        if value is None:
            self._fail(f"metadata {_KEY}{name} is missing")
        if not isinstance(value, kind):
            self._fail(f"metadata {_KEY}{name} is a {type(value).__name__}, not {kind.__name__}")
        return value

    def _list(self, name: str, kind: type, length: int) -> list[Any]:
        values: list[Any] = self._get(name, list)
        if len(values) != length:
            self._fail(f"{_KEY}{name} has {len(values)} entries for {length} tokens")
        if not all(isinstance(value, kind) for value in values[:1]):
            self._fail(f"{_KEY}{name} does not hold {kind.__name__} values")
        return values

    def _strings(self, name: str) -> list[str]:
        values: list[Any] = self._get(name, list)
        if not values or not isinstance(values[0], str):
            self._fail(f"{_KEY}{name} holds no strings")
        return values

    def _flag(self, name: str, default: bool) -> bool:
        return bool(self._found.get(_KEY + name, default))

    def _id(self, name: str, num_tokens: int) -> int | None:
        value = self._found.get(_KEY + name)
        if value is None or value in NO_TOKEN:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < num_tokens:
            self._fail(f"{_KEY}{name} {value!r} is not an id of the {num_tokens} tokens")
        return value

    def _fail(self, what: str, hint: str = "convert the model to GGUF again") -> NoReturn:
        raise TokenizerError(f"{self._file}: {what}", hint=hint)


def _add_tokens(backend: tokenizers.Tokenizer, tokens: Sequence[str], kinds: Sequence[int]) -> None:
    """Make control and user-defined tokens match whole in any text; only the former are hidden."""
    added = [
        AddedToken(token, special=kind != _USER_DEFINED, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (_CONTROL, _USER_DEFINED, _UNKNOWN) and token
    ]
    backend.add_tokens(added)


def _pair(merge: str) -> tuple[str, str]:
    left, right = merge.split(" ")
    return left, right


def _merges_from_scores(
    vocab: Mapping[str, int], scores: Sequence[float], kinds: Sequence[int]
) -> list[tuple[str, str]]:
    """List every way to join two tokens into a third, best score first.

    SentencePiece merges the pair whose result scores highest; BPE wants the pairs in that order.
    """
    mergeable = {token: i for token, i in vocab.items() if kinds[i] in (_NORMAL, _USER_DEFINED)}
    ranked = []
    for token, index in mergeable.items():
        for cut in range(1, len(token)):
            left, right = mergeable.get(token[:cut]), mergeable.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[index], left, right))
    ranked.sort()
    names = list(vocab)
    return [(names[left], names[right]) for _, left, right in ranked]
