"""Chat templates: the same text as transformers; bad messages named; hostile templates stopped."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.errors import RequestError, TokenizerError
from dflash_trt.text import Tokenizer
from dflash_trt.text import sandbox as sandbox_module
from dflash_trt.text.chat import ChatTemplate

# Written for this test in the idioms that published templates use.
REALISTIC = r"""
{%- macro describe(tool, depth=0) %}
{{- '- ' ~ tool.function.name ~ ': ' }}{{ tool.function | tojson }}
{%- if depth < 2 %}{{ ' (' ~ depth + 1 ~ ')' }}{% endif %}
{%- endmacro %}
{{- bos_token }}
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{% endif %}
    {%- for tool in tools %}{{ describe(tool, loop.index0) }}{{ "\n" }}{%- endfor %}
    {{- tools | tojson(indent=2) }}<|im_end|>
{% endif %}
{%- set ns = namespace(last=messages|length - 1, seen=false, names=[]) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if not ns.seen and message.role == "user" and message.content is string
        and not message.content.startswith('<tool>') %}
        {%- set ns.seen = true %}{%- set ns.last = index %}{% break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages if message.role != 'tool' %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {%- set content = message.content | default('') | trim %}
    {%- if message.reasoning_content is defined and loop.index0 > ns.last %}
        {{- '<think>' ~ message.reasoning_content.strip('\n') ~ '</think>' }}
    {%- elif '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {{- '<|im_start|>' ~ message['role'] | title ~ '\n' }}{{ content.replace('é', 'e') }}
    {%- for call in message.tool_calls or [] %}
        {{- call.function.name ~ call.function.arguments | tojson(ensure_ascii=true) }}
        {%- for key, value in call.function.arguments.items() | sort %}
            {{- ' %s=%s' % (key, value) }}
        {%- endfor %}
    {%- endfor %}
    {%- if loop.last %}{{ '!' * 3 }}{% elif loop.nextitem is defined %},{% endif %}
    {{- '<|im_end|>\n' }}
    {%- set ns.names = ns.names + [message.role] %}
{%- endfor %}
{{- ns.names | unique | join(', ') | upper }}
{%- set year = strftime_now("%Y") %}{{ year | length }}
{%- generation %}{{ 'seen' }}{% endgeneration %}
{%- if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}
{%- for text in documents or [] | map(attribute='text') %}{{ text | indent(2) }}{% endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""

TOOLS = [
    {"type": "function", "function": {"name": "find", "parameters": {"q": "<a> & 'é'", "n": [1]}}},
    {"type": "function", "function": {"name": "go", "parameters": {"x": None, "y": True}}},
]
CALL = {"function": {"name": "find", "arguments": {"q": "b", "a": 1.5}}}
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": " Be é brief. "}, {"role": "user", "content": '<b> & "q"'}],
    [
        {"role": "user", "content": "Call"},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "name": None},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
        {"role": "assistant", "content": "x</think>\n\nDone", "reasoning": "\nwhy\n"},
        {"role": "skip", "content": "unseen"},
        {"role": "user", "content": "{{ 7 * 7 }} {% raw %} Thanks"},
    ],
]
USER = [{"role": "user", "content": "hello"}]


def load(checkpoint: Callable[..., Path], template: str) -> Tokenizer:
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer.load(
        checkpoint(tokenizer_config_dot_json=config, chat_template_dot_jinja=template)
    )


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize(
    "flags", [{}, {"enable_thinking": False}, {"add_generation_prompt": False}]
)
def test_same_text_as_transformers(
    chat: Any, tools: Any, flags: dict[str, Any], checkpoint: Callable[..., Path]
) -> None:
    transformers = pytest.importorskip("transformers")
    ours = load(checkpoint, REALISTIC)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(
        str(checkpoint(chat_template_dot_jinja=REALISTIC)), bos_token="<s>", eos_token="</s>"
    )
    flags = {"add_generation_prompt": True, **flags}
    expected = theirs.apply_chat_template(chat, tools=tools, tokenize=False, **flags)
    assert ours.apply_chat_template(chat, tools=tools, **flags) == expected


def test_content_parts_become_one_string(checkpoint: Callable[..., Path]) -> None:
    tokenizer = load(checkpoint, "{% for m in messages %}[{{ m.content }}]{% endfor %}")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    chat = [{"role": "user", "content": parts}, {"role": "user", "content": parts[:1]}]
    assert tokenizer.apply_chat_template(chat) == "[a\nb][a]"
    assert chat[0]["content"] == parts


def test_documents_and_flags_reach_the_template(checkpoint: Callable[..., Path]) -> None:
    tokenizer = load(checkpoint, "{{ documents[0].text }} {{ effort }} {{ bos_token }}")
    text = tokenizer.apply_chat_template(USER, documents=[{"text": "d"}], effort="high")
    assert text == "d high <s>"
    assert tokenizer.apply_chat_template(USER, documents=[{}], bos_token="B").endswith("B")


@pytest.mark.parametrize(
    ("messages", "culprit"),
    [
        ([], "messages is empty"),
        ("hi", "messages is a str"),
        (None, "messages is a NoneType"),
        ({"role": "user"}, "messages is a dict"),
        (["hi"], r"messages\[0\] is a str"),
        ([*USER, {"content": "x"}], r"messages\[1\]\.role"),
        ([{"role": 3, "content": "x"}], r"messages\[0\]\.role"),
        ([{"role": "user"}], r"messages\[0\] has no content"),
        ([{"role": "user", "content": None}], r"messages\[0\] has no content"),
        ([{"role": "user", "content": 5}], r"messages\[0\]\.content"),
        ([{"role": "user", "content": {"a": 1}}], r"messages\[0\]\.content"),
        ([{"role": "user", "content": ["a"]}], r"messages\[0\]\.content\[0\]"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
            r"content\[0\] is not a text part",
        ),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], r"content\[0\]"),
        ([{"role": "user", "content": "x", "extra": object()}], "holds a object"),
        ([{"role": "user", "content": "x", 3: "y"}], "key that is not a string"),
    ],
)
def test_bad_messages(messages: Any, culprit: str, checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(RequestError, match=culprit):
        load(checkpoint, "x").apply_chat_template(messages)


@pytest.mark.parametrize(
    ("options", "culprit"),
    [
        ({"tools": "x"}, "tools is a str"),
        ({"tools": [3]}, r"tools\[0\] is a int"),
        ({"documents": {"a": 1}}, "documents is a dict"),
        ({"flag": object()}, "flags holds a object"),
        ({"flag": {1: 2}}, "key that is not a string"),
    ],
)
def test_bad_options(options: Any, culprit: str, checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(RequestError, match=culprit):
        load(checkpoint, "x").apply_chat_template(USER, **options)


def test_endless_nesting_is_a_request_error(checkpoint: Callable[..., Path]) -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(RequestError, match="nested deeper"):
        load(checkpoint, "x").apply_chat_template(USER, flag=loop)


def test_template_that_refuses_messages(checkpoint: Callable[..., Path]) -> None:
    tokenizer = load(checkpoint, "{{ raise_exception('roles must\n alternate') }}")
    with pytest.raises(RequestError, match="refused the messages: roles must alternate"):
        tokenizer.apply_chat_template(USER)


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 / 0 }}",
        "{{ messages[0].nope.deeper }}",
        "{{ nope() }}",
        "{% include 'x' %}",
        "{% extends 'x' %}",
        "{% import '/etc/passwd' as x %}",
        "{{ messages[0].role + 1 }}",
        "{{ nope | tojson }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_failing_templates(template: str, checkpoint: Callable[..., Path]) -> None:
    check_stopped(load(checkpoint, template))


ESCAPES = [
    "{{ ''.__class__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__base__ }}",
    "{{ messages[0]['__class__'] }}{{ (messages | attr('__class__')).x }}",
    "{{ self.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ range.__self__ }}{{ range.__globals__['sys'] }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__code__ }}",
    "{{ tojson.x }}{{ joiner.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ '{0.__class__}'.format(1) }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "{% set f = ''.format %}{{ '{0.__class__}'.format_map({'0': 1}) }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'a': 1}) }}",
    "{{ dict.update(messages[0], a=1) }}{{ dict.mro() }}",
    "{{ 'x'.encode() }}",
    "{{ (1).to_bytes(1000000000, 'big') }}",
    "{% macro m() %}{% endmacro %}{{ m.__call__.__globals__ }}",
    "{% for x in [1] %}{{ loop.__init__.__globals__ }}{% endfor %}",
]


@pytest.mark.parametrize("template", ESCAPES)
def test_the_sandbox_holds(template: str, checkpoint: Callable[..., Path]) -> None:
    error = check_stopped(load(checkpoint, template))
    assert "sandbox" in error or "failed" in error


def grow(start: str, step: str, use: str = "") -> str:
    """A template that applies `step` to ns.x 99 times."""
    loop = "{% for i in range(99) %}{% set ns.x = " + step + " %}{% endfor %}"
    return "{% set ns = namespace(x=" + start + ") %}" + loop + use


GREEDY = [
    "{% for a in range(10**9) %}x{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) if range(99999)|list %}{% endfor %}",
    "{% for a in range(9999) recursive %}{{ loop(range(9999)) }}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(99) }}",
    "{{ 10**(10**10) }}",
    "{{ 'a' * 10**10 }}",
    "{{ 10**10 * 'a' }}",
    "{{ [1] * 10**10 }}",
    "{{ 'a' * (10**5) * (10**5) }}",
    grow("2", "ns.x * ns.x"),
    grow("'a'", "ns.x ~ ns.x"),
    grow("'a'", "ns.x + ns.x"),
    grow("'a'", "'%s%s' % (ns.x, ns.x)"),
    grow("'a'", "'{0}{0}'.format(ns.x)"),
    grow("'a'", "[ns.x, ns.x] | join"),
    grow("'a'", "ns.x.replace('a', 'aa')"),
    grow("'a'", "ns.x | replace('a', 'aa')"),
    grow("[]", "[ns.x, ns.x]", "{{ ns.x }}"),
    grow("{}", "{'a': ns.x, 'b': ns.x}", "{{ ns.x | tojson }}"),
    grow("{}", "dict(a=ns.x, b=ns.x)", "{{ ns.x == ns.x }}"),
    grow("[1]", "ns.x + ns.x"),
    grow("[1]", "ns.x * 2"),
    grow("()", "(ns.x, ns.x)", "{{ ns.x | string }}"),
    "{% set s = 'a' * 99999 %}{{ s.join(range(99999) | map('string') | list) }}",
    "{% set s = 'a' * 99999 %}{{ range(99999) | join(s) }}",
    "{{ '{0}' * 9999 }}{{ ('{0}' * 9999).format('a' * 9999) }}",
    "{{ ('%(a)s' * 9999) % {'a': 'a' * 9999} }}",
    "{{ [2**4000] * 100000 }}",
    "{{ ([2**4000] * 100000) | tojson }}",
    "{{ (range(99999) | list) | tojson(indent=1000) }}",
    grow("[range(99) | list]", "[ns.x]", "{{ ns.x | tojson(indent=100) }}"),
    grow("1", "[[ns.x]]"),
    "{{ '%999999999d' % 1 }}",
    "{{ '%.999999999f' % 1 }}",
    "{{ '%*d' % (999999999, 1) }}",
    "{{ '%999999999d' | format(1) }}",
    "{{ '{:999999999}'.format(1) }}",
    "{{ '{:{}}'.format(1, 999999999) }}",
    "{{ 'a'.ljust(10**9) }}",
    "{{ 'a'.center(10**9) }}",
    "{{ 'a'.zfill(10**9) }}",
    "{{ 'a\tb'.expandtabs(10**9) }}",
    "{{ 'a'.translate({97: 'b'}) }}",
    "{{ ['a\n'] | join | indent(10**9) }}",
    "{{ [1] | tojson(indent=10**9) }}",
    "{% set t %}{% for i in range(99999) %}"
    + "x" * 9999
    + "{% endfor %}{% endset %}{{ t|length }}",
    "{% for i in range(99999) %}" + "x" * 9999 + "{% endfor %}",
    "{% filter upper %}{% for i in range(99999) %}" + "x" * 9999 + "{% endfor %}{% endfilter %}",
    "{% set m = 'a' * 9999999 %}{% for i in range(99999) %}{{ m }}{% endfor %}",
    "{% for i in range(99999) %}{% if 'b' in 'a' * 9999 %}{% endif %}{% endfor %}",
]


@pytest.mark.parametrize("template", GREEDY)
def test_greedy_templates_are_stopped(
    template: str, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox_module, "MAX_STEPS", 20_000)
    monkeypatch.setattr(sandbox_module, "MAX_VALUES", 2**18)
    monkeypatch.setattr(sandbox_module, "MAX_CHARS", 2**24)
    started = time.process_time()
    check_stopped(load(checkpoint, template))
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        grow("'a'", "ns.x ~ ns.x"),
        grow("[]", "[ns.x, ns.x]", "{{ ns.x }}"),
    ],
)
def test_the_real_limits_are_met_in_time(template: str, checkpoint: Callable[..., Path]) -> None:
    started = time.process_time()
    check_stopped(load(checkpoint, template))
    assert time.process_time() - started < 2 * sandbox_module.MAX_SECONDS


@pytest.mark.parametrize(
    "template",
    ["{{ 'a' | center(9) }}", "{{ lipsum(n=100) }}", "{{ 'x' | nope }}", "{{ 'x' is nope }}"],
)
def test_needless_functions_are_absent(template: str, checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(TokenizerError):
        load(checkpoint, template).apply_chat_template(USER)


def test_slow_steps_meet_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_module, "MAX_SECONDS", 0.05)
    template = ChatTemplate("{% for a in range(99999) %}{{ a }}{% endfor %}", "test")
    with pytest.raises(TokenizerError, match="seconds"):
        template.render({})


def check_stopped(tokenizer: Tokenizer) -> str:
    with pytest.raises(TokenizerError) as caught:
        tokenizer.apply_chat_template(USER)
    assert "\n" not in caught.value.message
    assert "chat template" in caught.value.message
    assert caught.value.hint
    return caught.value.message


def test_deeply_nested_source(checkpoint: Callable[..., Path]) -> None:
    for source in ("{{ " + "(" * 5000, "{{ " + "-" * 5000 + "1 }}", "{% if 1 %}" * 500):
        with pytest.raises(TokenizerError):
            load(checkpoint, source)


def test_large_honest_chats_fit_the_budget(checkpoint: Callable[..., Path]) -> None:
    tokenizer = load(checkpoint, REALISTIC)
    chat = [{"role": "user", "content": "word " * 800}, CHATS[2][3]] * 500
    assert len(tokenizer.apply_chat_template(chat, tools=TOOLS * 20)) > 2_000_000


def test_a_template_serves_threads_at_once(checkpoint: Callable[..., Path]) -> None:
    tokenizer = load(checkpoint, REALISTIC)
    expected = [tokenizer.apply_chat_template(chat) for chat in CHATS]
    wrong: list[str] = []

    def work() -> None:
        for _ in range(20):
            got = [tokenizer.apply_chat_template(chat) for chat in CHATS]
            if got != expected:
                wrong.append(str(got))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


PIECES = ["{{", "}}", "{%", "%}", " for x in messages ", " if ", " endif ", " endfor ", "x", "|"]
PIECES += ["tojson", "(", ")", "'", "[0]", ".role", " set y = ", "*", "9", "range(", "~", "{#"]


@settings(max_examples=300, deadline=None)
@given(source=st.lists(st.sampled_from(PIECES), max_size=15).map("".join))
def test_any_source_gives_text_or_our_error(source: str) -> None:
    try:
        ChatTemplate(source, "test").render({"messages": USER})
    except (TokenizerError, RequestError) as error:
        assert "\n" not in error.message  # noqa: PT017
