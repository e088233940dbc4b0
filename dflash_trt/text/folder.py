"""Tokenizer files of a checkpoint folder or engine directory: read, and written back.

`write` makes the form that engine directories keep: tokenizer.json, tokenizer_config.json, and
chat_template.jinja where the model has a template. `read` takes that form and any checkpoint's.
As in transformers 5, tokenizer.json alone decides whether BOS and EOS are added to a text;
`add_bos_token` and `add_eos_token` of tokenizer_config.json are not consulted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import tokenizers
from tokenizers import AddedToken, processors

from dflash_trt.errors import TokenizerError
from dflash_trt.text.chat import DEFAULT_TEMPLATE

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_FOLDER = "additional_chat_templates"

#: Our own key in an exported tokenizer_config.json: the ids that end an output.
STOP_KEY = "stop_token_ids"

_LEGACY_SPECIAL_FILE = "special_tokens_map.json"
_EOS_FILES = ("generation_config.json", "config.json")
LFS_POINTER = "version https://git-lfs"
_COPY_HINT = "copy the tokenizer files of the model again, or download them anew"


@dataclass(frozen=True)
class Contents:
    """What the files of one folder say."""

    backend: tokenizers.Tokenizer
    special_tokens: Mapping[str, str]
    templates: Mapping[str, str]
    stop_ids: tuple[int, ...]


def read(path: Path) -> Contents:
    """Read a folder. Raises `TokenizerError` naming the file that is missing or wrong."""
    backend = _read_backend(path / TOKENIZER_FILE)
    config = _read_json(path / CONFIG_FILE)
    special_tokens = _special_tokens(path, config)
    _add_missing_tokens(backend, config, path / CONFIG_FILE)
    return Contents(backend, special_tokens, _templates(path, config), _stop_ids(path, config))


def write(path: Path, contents: Contents) -> tuple[str, ...]:
    """Write the exported form. Raises `TokenizerError` when the disk refuses."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **contents.special_tokens,
        STOP_KEY: list(contents.stop_ids),
    }
    files = {
        TOKENIZER_FILE: contents.backend.to_str(),
        CONFIG_FILE: json.dumps(config, indent=2, ensure_ascii=False) + "\n",
    }
    for name, template in contents.templates.items():
        is_default = name == DEFAULT_TEMPLATE
        files[TEMPLATE_FILE if is_default else f"{TEMPLATE_FOLDER}/{name}.jinja"] = template
    try:
        path.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (path / name).parent.mkdir(exist_ok=True)
            # No newline translation: a template's bytes are part of the prompt.
            (path / name).write_bytes(text.encode())
    except OSError as error:
        raise TokenizerError(f"{path}: cannot write the tokenizer: {error.strerror}") from None
    return tuple(files)


def call_library(what: str, work: Callable[[], Any], hint: str = _COPY_HINT) -> Any:
    """Run `tokenizers` code, whose errors are bare Exceptions or Rust panics, as one-line errors.

    Raises `TokenizerError` starting with `what`.
    """
    try:
        return work()
    except BaseException as error:
        # A panic derives from BaseException, like Ctrl-C, and its class cannot be imported.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split())[:200]
        raise TokenizerError(f"{what}: {reason}", hint=hint) from None


def _read_backend(file: Path) -> tokenizers.Tokenizer:
    text = _read_text(file)
    if text is None:
        raise TokenizerError(
            f"{file}: no such file",
            hint="a fast tokenizer is needed: AutoTokenizer.from_pretrained(...).save_pretrained()",
        )
    if text.startswith(LFS_POINTER):
        raise TokenizerError(f"{file}: is a Git LFS pointer, not the file", hint="run git lfs pull")
    work = partial(tokenizers.Tokenizer.from_str, text)
    return cast(tokenizers.Tokenizer, call_library(f"{file}: cannot be read", work))


def _read_text(file: Path) -> str | None:
    if file.exists() and not file.is_file():
        raise TokenizerError(f"{file}: is not a regular file", hint=_COPY_HINT)
    try:
        return file.read_bytes().decode()
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        what = f"byte {error.start} is not UTF-8"
        raise TokenizerError(f"{file}: {what}", hint=_COPY_HINT) from None
    except OSError as error:
        raise TokenizerError(f"{file}: {error.strerror}", hint=_COPY_HINT) from None


def _read_json(file: Path) -> dict[str, Any]:
    text = _read_text(file)
    if text is None:
        return {}
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{file}: not valid JSON: {error}", hint=_COPY_HINT) from None
    if not isinstance(data, dict):
        raise TokenizerError(f"{file}: holds no JSON object", hint=_COPY_HINT)
    return data


def _content(token: Any) -> Any:
    """The text of a token that is written as a string or as an object with its properties."""
    return token.get("content") if isinstance(token, dict) else token


def _special_tokens(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    legacy = _read_json(path / _LEGACY_SPECIAL_FILE)
    found = {}
    for key, value in {**legacy, **config}.items():
        is_name = key.endswith("_token") and not key.startswith("add_")
        if is_name and isinstance(content := _content(value), str):
            found[key] = content
    return found


def _add_missing_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], file: Path
) -> None:
    """Let `added_tokens_decoder` add tokens and change their flags, as Hugging Face does.

    Each must be at, or land on, the id it is said to have.
    """
    listed = config.get("added_tokens_decoder") or {}
    try:
        wanted = sorted((int(key), dict(value)) for key, value in listed.items())
        tokens = {i: _added_token(**v) for i, v in wanted}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        what = f"added_tokens_decoder cannot be read: {error!r}"
        raise TokenizerError(f"{file}: {what}", hint=_COPY_HINT) from None
    known = {i: repr(token) for i, token in backend.get_added_tokens_decoder().items()}
    for token_id, token in tokens.items():
        if known.get(token_id) != repr(token):
            backend.add_tokens([token])
        if (actual := backend.token_to_id(token.content)) != token_id:
            what = f"token {token.content!r} has id {token_id} here but {actual}"
            raise TokenizerError(f"{file}: {what} in {TOKENIZER_FILE}", hint=_COPY_HINT)


def _added_token(content: str, __type: str = "", **flags: bool) -> AddedToken:
    return AddedToken(content, **flags)


def make_post_processor(
    backend: tokenizers.Tokenizer, bos: str | None, eos: str | None
) -> processors.TemplateProcessing:
    """Build the rule that puts BOS before and EOS behind a text."""
    # Aliases stand for the tokens, whose text may hold what the rule's own syntax reserves.
    specials = []
    for alias, token in (("BOS", bos), ("EOS", eos)):
        if token is None:
            continue
        token_id = backend.token_to_id(token)
        if token_id is None:
            raise TokenizerError(f"token {token!r} is to be added but is not in the vocabulary")
        specials.append({"id": alias, "ids": [token_id], "tokens": [token]})
    single = [*(["BOS"] if bos else []), "$A", *(["EOS"] if eos else [])]
    return processors.TemplateProcessing(
        single=single, pair=[*single, "$B:1"], special_tokens=specials
    )


def _templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Collect templates by name; files win over tokenizer_config.json."""
    found: dict[str, str] = {}
    listed = config.get("chat_template")
    if isinstance(listed, str):
        found[DEFAULT_TEMPLATE] = listed
    elif isinstance(listed, list):
        for item in listed:
            named = item if isinstance(item, dict) else {}
            name = check_name(named.get("name"), path / CONFIG_FILE)
            found[name] = _check_template(named.get("template"), path)
    elif listed is not None:
        _check_template(listed, path)
    files = {file.stem: file for file in sorted((path / TEMPLATE_FOLDER).glob("*.jinja"))}
    for name, file in {**files, DEFAULT_TEMPLATE: path / TEMPLATE_FILE}.items():
        if (text := _read_text(file)) is not None:
            found[check_name(name, file)] = text
    return found


def check_name(name: Any, file: Path) -> str:
    """Return a template's name, which becomes a file's: no separators, no leading dot."""
    if isinstance(name, str) and re.fullmatch(r"\w[\w.-]{0,63}", name):
        return name
    raise TokenizerError(f"{file}: chat template name {name!r} is not one word", hint=_COPY_HINT)


def _check_template(text: Any, path: Path) -> str:
    if isinstance(text, str):
        return text
    what = f"chat_template is a {type(text).__name__}, not text"
    raise TokenizerError(f"{path / CONFIG_FILE}: {what}", hint=_COPY_HINT)


def _stop_ids(path: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    found: dict[int, None] = dict.fromkeys(_ids(config.get(STOP_KEY), path / CONFIG_FILE))
    for name in _EOS_FILES:
        data = _read_json(path / name)
        nested = data.get("text_config")
        for values in (data, nested if isinstance(nested, dict) else {}):
            found |= dict.fromkeys(_ids(values.get("eos_token_id"), path / name))
    return tuple(found)


def _ids(value: Any, file: Path) -> list[int]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    for item in values:
        if isinstance(item, bool) or not isinstance(item, int) or item < 0:
            raise TokenizerError(f"{file}: end-of-sequence id {item!r} is not a whole number")
    return values
