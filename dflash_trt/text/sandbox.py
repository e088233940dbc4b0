"""A Jinja environment for templates from strangers: no Python internals, bounded work and memory.

Jinja's sandbox closes the way to Python's internals but lets a template loop or grow for ever.
Here every loop round, call, filter, operator and literal is charged to a budget *before* it runs,
and operations that make much from little are measured first. One environment serves one render.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from datetime import datetime
from typing import Any, NoReturn, TypeVar

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

#: Loop rounds, calls, operators. A chat of 1000 messages with tools takes about 10,000.
MAX_STEPS = 500_000
#: Values in lists and dicts, counted again whenever one is built or written.
MAX_VALUES = 2**23
#: Characters made, in all intermediate texts together.
MAX_CHARS = 2**27
#: Only for what the other limits do not catch, so that they decide, not the machine's speed.
MAX_SECONDS = 10.0
MAX_WIDTH = 1000
MAX_BITS = 4096
MAX_DEPTH = 100

_FREE_FILTERS = """abs count d default first float groupby int items last length list map max min
    reject rejectattr reverse round safe select selectattr sort unique attr dictsort"""
_TEXT_FILTERS = """capitalize e escape format forceescape indent join lower replace string title
    tojson trim upper wordcount striptags urlencode"""
_SAFE_METHODS = """
    capitalize casefold count endswith find format index isalnum isalpha isascii isdecimal
    isdigit islower isnumeric isprintable isspace istitle isupper join lower lstrip
    partition removeprefix removesuffix replace rfind rindex rpartition rsplit rstrip split
    splitlines startswith strip swapcase title upper copy get items keys values fromkeys
    union intersection difference isdisjoint issubset issuperset is_integer center ljust
    rjust zfill"""
_WIDE_FORMAT = re.compile(r"%[^%a-zA-Z]*(\d{4}|\*)|\{[^{}]*:[^{}]*(\d{4}|\{)|\{[^{}]*\[?\d{9}")

_Call = TypeVar("_Call", bound=Callable[..., Any])


class TemplateRefusal(jinja2.TemplateError):
    """The template itself called `raise_exception`: the messages are not ones it accepts."""


class BudgetExceeded(jinja2.TemplateError):
    """The template asked for more steps, memory or time than any honest template needs."""


class _Generation(jinja2.ext.Extension):
    """The `{% generation %}` block of training templates: shown as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


class _MeteredCode(CodeGenerator):
    """Compiles loops, literals and `~` so that they report to the environment."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:  # noqa: N802
        tick = nodes.EnvironmentAttribute("tick()")
        # A loop with a test may pass over items without running its body: the test must count.
        node.test = tick if node.test is None else nodes.And(tick, node.test)
        super().visit_For(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self.write("environment.join_parts((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:  # noqa: N802
        self._metered(super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802
        self._metered(super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:  # noqa: N802
        if node.ctx == "load":
            self._metered(super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return f"environment.constant({super()._output_const_repr(group)})"

    def _metered(self, visit: Callable[[Any, Frame], None], node: nodes.Node, frame: Frame) -> None:
        self.write("environment.built(")
        visit(node, frame)
        self.write(")")


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The names, filters and rules that Hugging Face gives chat templates, within a budget."""

    code_generator_class = _MeteredCode
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # nothing may be computed before the budget watches
            finalize=_finalize,
            cache_size=0,
            extensions=[jinja2.ext.loopcontrols, _Generation],
        )
        self._steps = MAX_STEPS
        self._values = MAX_VALUES
        self._chars = MAX_CHARS
        self._deadline = time.monotonic() + MAX_SECONDS
        known = {**self.filters, "tojson": _tojson}
        free = {name: self._free_filter(known[name]) for name in _FREE_FILTERS.split()}
        text = {name: self._text_filter(name, known[name]) for name in _TEXT_FILTERS.split()}
        self.filters = free | text
        # `dict` itself would hand out `dict.update` and the like, past the immutable sandbox.
        self.globals.pop("lipsum")
        self.globals.update(
            dict=_make_dict, raise_exception=_raise_exception, strftime_now=_strftime_now
        )

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        """Refuse at once: by default a forbidden attribute that is only printed is empty text."""
        what = f"{type(obj).__name__}.{attribute}"
        raise SecurityError(f"attribute {what} is not allowed in a chat template")

    # What the compiled template calls.

    def tick(self) -> bool:
        """Charge a loop round; true, as the compiled loop asks whether to run it."""
        self._step()
        return True

    def constant(self, text: str) -> str:
        """Charge text that stands in the template itself: a loop can repeat it without end."""
        self._spend(len(text))
        return text

    def built(self, value: Any) -> Any:
        """Charge a list, tuple or dict that the template made, nested ones counted again."""
        self._step()
        self._charge(value, text=False)
        return value

    def join_parts(self, parts: tuple[Any, ...]) -> str:
        """The `~` operator."""
        self._step()
        self._charge(parts, text=True)
        return "".join(map(str, parts))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Run `+ * ** %` once their result is known to be small."""
        self._step()
        self._check_numbers(left, right)
        if operator == "*":
            self._check_product(left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            self._check_numbers(1 << min(left.bit_length() * max(0, right), MAX_BITS + 1))
        elif operator == "%" and isinstance(left, str):
            self._check_format(left, right)
        elif operator == "+":
            self._charge((left, right), text=isinstance(left, str))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call what the template may call; methods of plain values only by an allow-list."""
        __self._step()
        method_of = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(method_of, str | bytes | int | float | list | tuple | dict | set):
            __self._check_method(method_of, __obj.__name__, args, kwargs)
        elif not isinstance(__obj, Macro):
            __self._charge((args, kwargs), text=False)
        return super().call(__context, __obj, *args, **kwargs)

    # The budget.

    def _step(self) -> None:
        self._steps -= 1
        if self._steps < 0:
            raise BudgetExceeded(f"it takes more than {MAX_STEPS} steps")
        if not self._steps & 0xF and time.monotonic() > self._deadline:
            raise BudgetExceeded(f"it takes more than {MAX_SECONDS:g} seconds")

    def _spend(self, chars: int) -> None:
        self._chars -= chars
        if self._chars < 0:
            raise BudgetExceeded(f"it makes more than {MAX_CHARS} characters")

    def _charge(self, value: Any, *, text: bool) -> None:
        """Charge a value with all it holds, also its length where it is to become text."""
        level, values, chars, depth = [value], 0, 0, 0
        while level:
            depth += 1
            values += len(level)
            if values > self._values:
                raise BudgetExceeded(f"it handles more than {MAX_VALUES} values")
            if depth > MAX_DEPTH:
                raise BudgetExceeded(f"it nests values deeper than {MAX_DEPTH} levels")
            below: list[Any] = []
            for item in level:
                if isinstance(item, str):
                    chars += len(item)
                elif isinstance(item, int):
                    chars += item.bit_length() >> 1
                elif isinstance(item, dict):
                    below += item.keys()
                    below += item.values()
                elif isinstance(item, list | tuple | set):
                    below += item
            level = below
        self._values -= values
        self._spend(chars + 8 * values if text else 0)

    def _check_product(self, left: Any, right: Any) -> None:
        for value, count in ((left, right), (right, left)):
            if isinstance(count, int) and isinstance(value, str):
                self._spend(len(value) * max(0, count))
            elif isinstance(count, int) and isinstance(value, list | tuple):
                before = self._values
                self._charge(value, text=False)
                self._values -= (before - self._values) * max(0, count)
                self._charge((), text=False)

    def _check_numbers(self, *numbers: Any) -> None:
        if any(isinstance(number, int) and number.bit_length() > MAX_BITS for number in numbers):
            raise BudgetExceeded(f"it makes a number of more than {MAX_BITS} bits")

    def _check_format(self, pattern: str, values: Any) -> None:
        if _WIDE_FORMAT.search(pattern):
            raise SecurityError(f"format {pattern[:40]!r} is not allowed in a chat template")
        before = self._chars
        self._charge(values, text=True)
        fields = pattern.count("%") + pattern.count("{")  # each may name the same long value
        self._spend(len(pattern) + fields * (before - self._chars + MAX_WIDTH))

    def _check_method(self, value: Any, name: str, args: Any, kwargs: Any) -> None:
        if name not in _SAFE_METHODS.split():
            what = f"{type(value).__name__}.{name}"
            raise SecurityError(f"method {what} is not allowed in a chat template")
        self._check_widths(args)
        self._charge((args, kwargs), text=isinstance(value, str))
        if not isinstance(value, str):
            return
        self._spend(len(value))
        if name == "replace":
            self._check_replace(value, *args)
        elif name == "join" and args and isinstance(args[0], list | tuple):
            self._spend(len(args[0]) * len(value))
        elif name == "format":
            self._check_format(value, (args, kwargs))

    def _check_replace(self, value: str, old: Any = "", new: Any = "", *_: Any) -> None:
        times = value.count(str(old)) if old else len(value) + 1
        self._spend(times * len(str(new)))

    def _check_widths(self, args: Iterable[Any]) -> None:
        for width in args:
            if isinstance(width, int) and abs(width) > MAX_WIDTH:
                raise SecurityError(f"width {width} is not allowed in a chat template")

    # Filters: the generated code passes (environment | context | eval_ctx)? value, *arguments.

    def _free_filter(self, function: _Call) -> Callable[..., Any]:
        @functools.wraps(function)
        def metered(*args: Any, **kwargs: Any) -> Any:
            self._step()
            result = function(*args, **kwargs)
            self._charge(result, text=False)
            return result

        return metered

    def _text_filter(self, name: str, function: _Call) -> Callable[..., Any]:
        skip = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)
        def metered(*args: Any, **kwargs: Any) -> Any:
            self._step()
            own, (value, *rest) = args[:skip], args[skip:]
            if isinstance(value, Iterator):
                value = list(value)
            before = self._values
            self._charge((value, rest, kwargs), text=True)
            options = [*rest, *kwargs.values()]
            self._check_widths(options)
            if name == "replace":
                self._check_replace(str(value), *options)
            elif name == "format":
                self._check_format(str(value), options)
            elif name in ("join", "indent", "tojson"):
                parts = before - self._values if name == "tojson" else _num_parts(value)
                self._spend(parts * max(map(_width, options), default=0))
            return function(*own, value, *rest, **kwargs)

        return metered


def _num_parts(value: Any) -> int:
    if isinstance(value, str):
        return value.count("\n") + 1
    return len(value) if isinstance(value, Sized) else 0


def _width(option: Any) -> int:
    """How many characters an option may add to every part, `tojson` to every level of one."""
    if isinstance(option, str):
        return len(option)
    return MAX_DEPTH * option if isinstance(option, int) else 0


@jinja2.pass_context
def _finalize(context: Context, value: Any) -> Any:
    """Charge what the template writes; as a context function it also forbids constant folding."""
    environment = context.environment
    assert isinstance(environment, TemplateEnvironment)
    environment._charge(value, text=True)
    return value


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _raise_exception(message: Any) -> NoReturn:
    raise TemplateRefusal(str(message))


def _strftime_now(pattern: str) -> str:
    if len(pattern) > MAX_WIDTH:
        raise SecurityError("the pattern of strftime_now is too long")
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which would change the prompt.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
