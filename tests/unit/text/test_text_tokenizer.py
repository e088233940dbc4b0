"""Tokenizer folders: the same ids, texts and prompts as transformers; bad files named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.errors import DFlashError, RequestError, TokenizerError
from dflash_trt.text import Tokenizer

PROMPTS = [
    "Hello, world! It's 1234 o'clock.",
    "你好 😀 é\n\n\tx = 1  # two  spaces",
    "<|user|>hi<|end|>",
    "",
    "   ",
]
CHATML = (
    "{{ bos_token }}{% for m in messages %}<|user|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|user|>assistant\n{% endif %}"
)
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hé?"}]
CONFIG = {
    "bos_token": "<s>",
    "eos_token": {"__type": "AddedToken", "content": "</s>", "special": True},
}


def reference(path: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast.from_pretrained(str(path))


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"add_bos_token": True},
        {"add_bos_token": False},
        {"add_bos_token": True, "add_eos_token": True},
        {"add_eos_token": True},
    ],
)
def test_same_as_transformers(
    kind: str, extra: dict[str, Any], checkpoint: Callable[..., Path], make_backend: Any
) -> None:
    path = checkpoint(
        make_backend[kind](),
        tokenizer_config_dot_json={**CONFIG, **extra},
        chat_template_dot_jinja=CHATML,
    )
    ours, theirs = Tokenizer.load(path), reference(path)
    assert ours.vocab_size == len(theirs)
    for text in PROMPTS:
        assert ours.encode(text) == theirs.encode(text)
        plain = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False) == plain
        for skip in (True, False):
            assert ours.decode(plain, skip) == theirs.decode(plain, skip_special_tokens=skip)
    for flag in (True, False):
        prompt = ours.apply_chat_template(MESSAGES, flag)
        expected = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=flag)
        assert prompt == expected
        ids = theirs.apply_chat_template(MESSAGES, add_generation_prompt=flag, return_dict=False)
        assert ours.encode_chat(MESSAGES, flag) == ids
        assert ids.count(theirs.bos_token_id) == 1


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_export_is_the_same_tokenizer(
    kind: str, checkpoint: Callable[..., Path], make_backend: Any, tmp_path: Path
) -> None:
    config = {
        **CONFIG,
        "add_bos_token": True,
        "pad_token": "</s>",
        "chat_template": [
            {"name": "tool_use", "template": "tools"},
            {"name": "default", "template": CHATML + "\r\n\n"},
        ],
    }
    source = checkpoint(
        make_backend[kind](),
        tokenizer_config_dot_json=config,
        generation_config_dot_json={"eos_token_id": [4, 2]},
    )
    first = Tokenizer.load(source)
    files = first.export(tmp_path / "engine" / "tokenizer")
    assert files == (
        "tokenizer.json",
        "tokenizer_config.json",
        "additional_chat_templates/tool_use.jinja",
        "chat_template.jinja",
    )
    again = Tokenizer.load(tmp_path / "engine" / "tokenizer")
    theirs = reference(tmp_path / "engine" / "tokenizer")
    assert again.stop_ids == first.stop_ids == (4, 2)
    assert (again.bos_token, again.eos_token_id) == ("<s>", 2)
    for text in PROMPTS:
        assert again.encode(text) == first.encode(text) == theirs.encode(text)
    assert again.apply_chat_template(MESSAGES) == first.apply_chat_template(MESSAGES)
    assert again.apply_chat_template(MESSAGES, tools=[{"a": 1}]) == "tools"
    assert again.export(tmp_path / "again") == files
    for name in files:
        written = (tmp_path / "engine" / "tokenizer" / name).read_bytes()
        assert (tmp_path / "again" / name).read_bytes() == written


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=30))
def test_bos_is_never_doubled(text: str, sentencepiece: Tokenizer, byte_level: Tokenizer) -> None:
    bos = sentencepiece.bos_token_id
    assert sentencepiece.encode(text)[0] == bos
    assert sentencepiece.encode("<s>" + text) == [
        bos,
        *sentencepiece.encode("<s>" + text, add_special_tokens=False)[1:],
    ]
    # This one adds none, so what the text says stays.
    assert byte_level.encode("<s><s>")[:2] == [bos, bos]


def test_training_truncation_and_padding_are_dropped(
    checkpoint: Callable[..., Path], make_backend: Any
) -> None:
    backend = make_backend["byte_level"]()
    backend.enable_truncation(4)
    backend.enable_padding(length=50)
    tokenizer = Tokenizer.load(checkpoint(backend))
    assert len(tokenizer.encode("the quick brown fox " * 30)) > 50
    assert len(tokenizer.encode("a")) == 1


def test_stop_ids_come_from_all_files(checkpoint: Callable[..., Path]) -> None:
    path = checkpoint(
        tokenizer_config_dot_json=CONFIG,
        generation_config_dot_json={"eos_token_id": [4, 3]},
        config_dot_json={"eos_token_id": 4, "text_config": {"eos_token_id": 0}},
    )
    assert Tokenizer.load(path).stop_ids == (4, 3, 0, 2)


def test_tokens_named_only_in_the_config_are_added(checkpoint: Callable[..., Path]) -> None:
    size = Tokenizer.load(checkpoint()).vocab_size
    token = {"content": "<new>", "special": True, "normalized": False}
    path = checkpoint(tokenizer_config_dot_json={"added_tokens_decoder": {str(size): token}})
    tokenizer = Tokenizer.load(path)
    assert tokenizer.encode("<new>") == [size] == reference(path).encode("<new>")
    assert tokenizer.decode([size]) == ""


def test_flags_in_the_config_win(checkpoint: Callable[..., Path], make_backend: Any) -> None:
    backend = make_backend["byte_level"]()
    tool = backend.token_to_id("<tool>")
    token = {"content": "<tool>", "special": True, "normalized": False}
    path = checkpoint(
        backend, tokenizer_config_dot_json={"added_tokens_decoder": {str(tool): token}}
    )
    assert Tokenizer.load(path).decode([tool]) == ""
    assert reference(path).decode([tool], skip_special_tokens=True) == ""


def test_old_special_tokens_file(checkpoint: Callable[..., Path]) -> None:
    path = checkpoint(special_tokens_map_dot_json={"bos_token": {"content": "<s>"}})
    assert Tokenizer.load(path).bos_token_id == 1


def test_template_sources_in_order(checkpoint: Callable[..., Path]) -> None:
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(TokenizerError, match="no chat template"):
        Tokenizer.load(checkpoint()).apply_chat_template(messages)
    path = checkpoint(tokenizer_config_dot_json={"chat_template": "config"})
    assert Tokenizer.load(path).apply_chat_template(messages) == "config"
    named = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    path = checkpoint(tokenizer_config_dot_json={"chat_template": named})
    assert Tokenizer.load(path).apply_chat_template(messages) == "d"
    path = checkpoint(tokenizer_config_dot_json={"chat_template": named[:1]})
    with pytest.raises(TokenizerError, match="named default, only rag"):
        Tokenizer.load(path).apply_chat_template(messages)
    path = checkpoint(
        chat_template_dot_jinja="file", additional_chat_templates_slash_tool_use_dot_jinja="t"
    )
    tokenizer = Tokenizer.load(path)
    assert tokenizer.has_chat_template
    assert tokenizer.apply_chat_template(messages) == "file"
    assert tokenizer.apply_chat_template(messages, tools=[{}]) == "t"


def broken_json(tmp_path: Path, change: Callable[[dict[str, Any]], Any]) -> str:
    data = json.loads((tmp_path / "tokenizer.json").read_text())
    result = change(data)
    return json.dumps(data if result is None else result)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.pop("model") and None,
        lambda data: data["model"].update(type="Nope"),
        lambda data: data["model"].update(merges=[["zz", "qq"]]),
        lambda data: data["model"].update(merges="x"),
        lambda data: data["model"].update(vocab=["a"]),
        lambda data: data["model"].update(vocab={"a": -1}),
        lambda data: data.update(decoder={"type": "Nope"}),
        lambda data: data.update(decoder=[]),
        lambda data: data.update(pre_tokenizer={"type": "Split", "pattern": {"Regex": "("}}),
        lambda data: data.update(version="9"),
        lambda data: data.update(added_tokens=[{"id": "x"}]),
        lambda data: [],
        lambda data: "text",
    ],
)
def test_malformed_tokenizer_json(
    change: Callable[[Any], Any], checkpoint: Callable[..., Path]
) -> None:
    path = checkpoint()
    (path / "tokenizer.json").write_text(broken_json(path, change))
    check_refused(path, "tokenizer.json")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"\x00" * 9, b"[" * 100_000, b"null"])
@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"]
)
def test_files_that_are_no_json(name: str, content: bytes, checkpoint: Callable[..., Path]) -> None:
    path = checkpoint()
    (path / name).write_bytes(content)
    check_refused(path, name)


@settings(max_examples=40, deadline=None)
@given(at=st.integers(0, 10**6))
def test_truncated_tokenizer_json(at: int, tmp_path_factory: Any, make_backend: Any) -> None:
    path = tmp_path_factory.mktemp("cut")
    text = make_backend["sentencepiece"]().to_str()
    (path / "tokenizer.json").write_text(text[: at % len(text)])
    check_refused(path, "tokenizer.json")


@pytest.mark.parametrize(
    ("config", "culprit"),
    [
        ({"bos_token": "<nope>"}, "bos_token '<nope>'"),
        ({"chat_template": 5}, "chat_template is a int"),
        ({"chat_template": [5]}, "chat template name None"),
        ({"chat_template": [{"name": "../x", "template": "a"}]}, "'../x'"),
        ({"chat_template": [{"name": "x", "template": 1}]}, "not text"),
        ({"chat_template": "{% if %}"}, "not valid Jinja: line 1"),
        ({"chat_template": "x" * (2**20 + 1)}, "1048577 characters"),
        ({"added_tokens_decoder": {"x": {}}}, "added_tokens_decoder"),
        ({"added_tokens_decoder": {"9": {"special": True}}}, "added_tokens_decoder"),
        ({"added_tokens_decoder": {"9": {"content": "<far>"}}}, "'<far>' has id 9"),
        ({"added_tokens_decoder": [1]}, "added_tokens_decoder"),
        ({"stop_token_ids": ["x"]}, "end-of-sequence id 'x'"),
        ({"stop_token_ids": -1}, "end-of-sequence id -1"),
        ({"eos_token": "</s>", "stop_token_ids": [True]}, "id True"),
    ],
)
def test_bad_configs(config: Any, culprit: str, checkpoint: Callable[..., Path]) -> None:
    check_refused(checkpoint(tokenizer_config_dot_json=config), culprit)


def check_refused(path: Path, culprit: str) -> None:
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.load(path)
    assert culprit in caught.value.message
    assert str(path) in caught.value.message
    assert "\n" not in caught.value.message


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: no such file") as caught:
        Tokenizer.load(tmp_path / "absent")
    assert "save_pretrained" in caught.value.hint
    (tmp_path / "tokenizer.json").mkdir()
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_export_to_a_place_that_is_no_folder(byte_level: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TokenizerError, match="cannot write"):
        byte_level.export(tmp_path / "file")


@pytest.mark.parametrize("text", [None, 3, b"x", ["a"], "\ud800", "a\udfffb"])
def test_bad_prompts(text: Any, byte_level: Tokenizer) -> None:
    with pytest.raises(RequestError, match="prompt"):
        byte_level.encode(text)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=50))
def test_round_trip(text: str, byte_level: Tokenizer) -> None:
    ids = byte_level.encode(text)
    assert byte_level.decode(ids, skip_special_tokens=False) == text


def test_errors_are_ours(byte_level: Tokenizer) -> None:
    assert issubclass(TokenizerError, DFlashError)
    assert byte_level.token_to_id("no such token") is None
    assert byte_level.special_ids == {0, 1, 2, 3, 4}
