"""Chat templates: checked messages in, prompt text out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError

from dflash_trt.errors import RequestError, TokenizerError
from dflash_trt.text.sandbox import BudgetExceeded, TemplateEnvironment, TemplateRefusal
from dflash_trt.text.unicode import check_unicode

DEFAULT_TEMPLATE = "default"
TOOL_TEMPLATE = "tool_use"

#: The longest known chat template has 0.05 MB.
MAX_TEMPLATE_CHARS = 2**20

_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
_RESERVED_FLAGS = ("messages", "add_generation_prompt", "tools", "documents")

Messages = Sequence[Mapping[str, Any]]


class ChatTemplate:
    """One compiled template; rendering it keeps no state, so requests may share it."""

    def __init__(self, source: str, origin: str) -> None:
        """`origin` names the template's file in messages.

        Raises `TokenizerError` if the template is too long or not Jinja.
        """
        self.source = source
        self._origin = origin
        if len(source) > MAX_TEMPLATE_CHARS:
            raise TokenizerError(
                f"{origin}: chat template has {len(source)} characters, "
                f"more than {MAX_TEMPLATE_CHARS}"
            )
        self._code = self._guard(lambda: TemplateEnvironment().compile(source))

    def render(self, context: Mapping[str, Any]) -> str:
        """Return the prompt text.

        Raises `RequestError` when the template itself refuses the messages (`raise_exception`),
        `TokenizerError` when it fails, reaches out of the sandbox or works without end.
        """

        def run() -> str:
            # A fresh environment carries the budget of this one render.
            environment = TemplateEnvironment()
            template = jinja2.Template.from_code(environment, self._code, environment.globals)
            return template.render(context)

        return str(self._guard(run))

    def _guard(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except TemplateRefusal as error:
            raise RequestError(f"chat template refused the messages: {_line(error)}") from None
        except BudgetExceeded as error:
            raise self._error(f"chat template was stopped: {_line(error)}") from None
        except SecurityError as error:
            raise self._error(f"chat template left its sandbox: {_line(error)}") from None
        except jinja2.TemplateSyntaxError as error:
            where = f"line {error.lineno}: {_line(error)}"
            raise self._error(f"chat template is not valid Jinja: {where}") from None
        except Exception as error:  # a template may raise anything at all
            what = f"{type(error).__name__}: {_line(error)}"
            raise self._error(f"chat template failed: {what}") from None

    def _error(self, message: str) -> TokenizerError:
        return TokenizerError(
            f"{self._origin}: {message}",
            hint="pass prompt text or token ids instead of messages, or correct the template",
        )


def pick_template(
    templates: Mapping[str, ChatTemplate], tools: Sequence[Any] | None, source: str
) -> ChatTemplate:
    """Return the template `tool_use` where tools are given and it exists, else `default`.

    Raises `TokenizerError` when there is no such template.
    """
    if tools and TOOL_TEMPLATE in templates:
        return templates[TOOL_TEMPLATE]
    if DEFAULT_TEMPLATE in templates:
        return templates[DEFAULT_TEMPLATE]
    hint = "pass prompt text or token ids, or add chat_template.jinja to the checkpoint"
    if not templates:
        raise TokenizerError(f"{source}: the tokenizer has no chat template", hint=hint)
    names = ", ".join(sorted(templates))
    raise TokenizerError(f"{source}: no chat template named default, only {names}", hint=hint)


def build_context(
    messages: Messages,
    special_tokens: Mapping[str, str],
    flags: Mapping[str, Any],
    *,
    add_generation_prompt: bool,
    tools: Sequence[Any] | None,
    documents: Sequence[Any] | None,
) -> dict[str, Any]:
    """Check a request's messages and flags; return what a template sees.

    Raises `RequestError` naming the field that is wrong.
    """
    for name in _RESERVED_FLAGS:
        if name in flags:
            raise RequestError(f"chat template flag {name} is reserved")
    return {
        **special_tokens,
        **_plain_dict(flags, "chat template flags"),
        "messages": _check_messages(messages),
        "tools": _plain_list(tools, "tools"),
        "documents": _plain_list(documents, "documents"),
        "add_generation_prompt": add_generation_prompt,
    }


def _check_messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list | tuple):
        raise RequestError(f"messages is a {type(messages).__name__}, not a list")
    if not messages:
        raise RequestError("messages is empty")
    return [_check_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _check_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} is a {type(message).__name__}, not an object")
    # Templates test for a key's presence: a null must look as if it was not sent.
    plain = {k: v for k, v in _plain_dict(message, where).items() if v is not None}
    if not isinstance(plain.get("role"), str):
        raise RequestError(f"{where}.role is not a string")
    if "content" in plain:
        plain["content"] = _check_content(plain["content"], f"{where}.content")
    elif "tool_calls" not in plain:
        raise RequestError(f"{where} has no content")
    reasoning = next((plain[name] for name in _REASONING_NAMES if name in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


def _check_content(content: Any, where: str) -> str:
    """Return content as one string; text parts are joined by newlines.

    Many text-only templates treat a list as empty text, so no template is given one.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where} is neither a string nor a list of text parts")
    texts = []
    for index, part in enumerate(content):
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise RequestError(f"{where}[{index}] is not a text part: only text is supported")
        texts.append(text)
    return "\n".join(texts)


def _plain_list(values: Any, where: str) -> list[Any] | None:
    if values is None:
        return None
    if not isinstance(values, list | tuple):
        raise RequestError(f"{where} is a {type(values).__name__}, not a list")
    plain: list[Any] = _plain(list(values), where, 0)
    for index, item in enumerate(plain):
        if not isinstance(item, dict):
            raise RequestError(f"{where}[{index}] is a {type(item).__name__}, not an object")
    return plain


def _plain_dict(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    plain: dict[str, Any] = _plain(dict(values), where, 0)
    return plain


def _plain(value: Any, where: str, depth: int) -> Any:
    """Copy JSON values: a template must see no object with methods, nor change the caller's."""
    if depth > 64:
        raise RequestError(f"{where} is nested deeper than 64 levels")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        check_unicode(where, value)
        return str(value)
    for kind in (int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        plain = {}
        for key, item in value.items():
            if not isinstance(key, str):
                raise RequestError(f"{where} has a key that is not a string")
            check_unicode(f"a key of {where}", key)
            plain[str(key)] = _plain(item, where, depth + 1)
        return plain
    if isinstance(value, list | tuple):
        return [_plain(item, where, depth + 1) for item in value]
    raise RequestError(f"{where} holds a {type(value).__name__}, which JSON has not")


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
