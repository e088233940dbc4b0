"""Scripts of the training texts: how each starts, and what is left to the target.

    python scripts.py -o scripts.jsonl --count 12000

Six of ten are *open*: the user's message is the target's own too, after none or a few words of an
opener. So its topics are those that it was tuned on, and no data set is needed. The others ask for
Python, with heads and docstrings of functions in the standard library and in six packages.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import random
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import command
from evaluation import HUMANEVAL_FORMAT, Overlap
from options import add_target
from target import find_target

from dflash_trt import swap
from dflash_trt.checkpoint import load_tokenizer
from dflash_trt.errors import CheckpointError

PACKAGES = ("algorithms", "boltons", "more_itertools", "toolz", "networkx", "sympy")
MAX_CODE_TOKENS = 110
ROUNDS = 3
"""How often each function may be asked about; when all have been, the scripts left are open."""

OPENERS = (
    "", "", "", "", "", "",
    "What", "What is", "What are", "How do", "How can I", "How does", "Why", "Why do", "Can you",
    "Explain", "Describe", "Tell me", "Give me", "Who", "When", "Where", "Which", "Is it",
    "Should I", "I'm", "I have", "I want to", "My", "Write a", "Write an", "Write a short",
    "Create a", "List",
    "Compare", "Summarize", "Rewrite", "Translate", "Solve", "Calculate", "Suggest", "Help me",
    "What is the difference between", "What is the best way to", "How many",
    "Write a Python function", "Write a Python program", "Write a function that", "Implement",
    "Complete this function:\ndef", "def", "Fix this code:", "What does this Python code do?",
)  # fmt: skip

TEMPLATES = (
    HUMANEVAL_FORMAT.replace("{prompt}", "{code}"),
    "Complete this function:\n{code}",
    "Complete the following Python function:\n```python\n{code}\n```",
    "{code}",
    "Implement this in Python.\n\n{code}",
    "Write a Python function named {name}. {summary}",
    "{summary} Write it in Python.",
)


@dataclass(frozen=True)
class Script:
    """How a text starts. `open`: the target goes on with the user's message before it answers."""

    id: int
    user_ids: tuple[int, ...]
    open: bool
    temperature: float
    """Of the answer; 0 is greedy. An open message is drawn at temperature 1."""


@dataclass(frozen=True)
class Source:
    """A file's first line: whose token ids its scripts have, and what they were drawn from."""

    target: str
    """As `--target` names it; a path is absolute."""
    seed: int


def read_scripts(file: Path) -> tuple[Source, list[Script]]:
    """Scripts of a file, in order. Raises `CheckpointError` for a file that is none of ours."""
    try:
        first, *rows = (json.loads(line) for line in file.read_text().splitlines())
        source = Source(str(first.pop("target")), int(first.pop("seed")))
        return source, [_script(row) for row in rows]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{file}: is not what scripts.py writes", "delete it, and make it again"
        ) from error


def _script(row: dict[str, Any]) -> Script:
    ids = tuple(int(token) for token in row["user_ids"])
    return Script(int(row["id"]), ids, bool(row["open"]), float(row["temperature"]))


def write_scripts(file: Path, source: Source, scripts: Iterable[Script]) -> None:
    """Write a file that appears whole."""
    lines = "".join(json.dumps(asdict(row)) + "\n" for row in (source, *scripts))
    swap.write_file(file, lines.encode())


def sources(packages: Iterable[str] = PACKAGES, *, library: bool = True) -> list[Path]:
    """Files of packages, and of the standard library without its tests; in any place alike."""
    place = Path(sysconfig.get_path("purelib"))
    found = [
        (file.relative_to(place), file)
        for name in packages
        for file in (place / name).rglob("*.py")
    ]
    if library:
        apart = {"site-packages", "test", "tests"}
        place = Path(sysconfig.get_path("stdlib"))
        names = ((file.relative_to(place), file) for file in place.rglob("*.py"))
        found += [(name, file) for name, file in names if not apart & set(name.parts)]
    return [file for _, file in sorted(found)]


def functions(files: Iterable[Path]) -> Iterator[tuple[str, str, str]]:
    """Name, head with docstring, and the docstring's first sentence, of public functions."""
    for file in files:
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        classes = (node.body for node in tree.body if isinstance(node, ast.ClassDef))
        for node in itertools.chain(tree.body, *classes):
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                yield from _function(node)


def requests(seed: int) -> Iterator[str]:
    """Messages that ask for functions, in an order that `seed` draws; read as they are needed.

    ROUNDS of all functions, in frames that are drawn each time.
    """
    choose = random.Random(seed)
    files = sources()
    choose.shuffle(files)
    known: list[list[tuple[str, str, str]]] = []
    for number in range(ROUNDS * len(files)):
        if number < len(files):
            known.append(sorted(set(functions([files[number]]))))
        for name, code, summary in known[number % len(files)]:
            yield choose.choice(TEMPLATES).format(name=name, code=code, summary=summary)


def _function(node: ast.FunctionDef) -> Iterator[tuple[str, str, str]]:
    text = ast.get_docstring(node)
    if not text or len(text) < 20 or ":param" in text[:60]:
        return
    arguments = ast.unparse(node.args)
    if arguments.startswith(("self", "cls")):
        return
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    summary = " ".join(text.split("\n\n")[0].split())
    body = "\n    ".join(line for line in text.split("\n\n")[0].splitlines())
    examples = [line.strip() for line in text.splitlines() if line.strip().startswith(">>>")]
    if examples:
        body += "\n    " + "\n    ".join(examples[:2])
    head = f'def {node.name}({arguments}){returns}:\n    """{body}\n    """'
    yield node.name, head, summary if summary.endswith(".") else summary + "."


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=command.output_file, required=True)
    parser.add_argument("--count", type=command.positive, default=12_000)
    parser.add_argument(
        "--code", type=command.share, default=0.4, help="share that asks for Python"
    )
    add_target(parser)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Write the scripts."""
    args = arguments()
    scripts = list(itertools.islice(all_scripts(args), args.count))
    write_scripts(args.output, Source(args.target, args.seed), scripts)
    print(f"{len(scripts)} scripts, {sum(not s.open for s in scripts)} of them ask for Python")


def all_scripts(args: argparse.Namespace) -> Iterator[Script]:
    """Scripts without end; how many are taken does not change the first ones."""
    choose = random.Random(args.seed)
    tokenizer = load_tokenizer(find_target(args.target))
    evaluation = Overlap.with_evaluation()
    encoded = (
        (text, tokenizer.encode(text, add_special_tokens=False)) for text in requests(args.seed)
    )
    asked = (
        ids for text, ids in encoded
        if len(ids) <= MAX_CODE_TOKENS and not evaluation.found_in(text)
    )  # fmt: skip
    for number in itertools.count():
        opener = choose.choice(OPENERS)
        ids = next(asked, None) if choose.random() < args.code else None
        temperature = choose.choice((0.0, 0.0, 0.0, 0.7))
        if ids is not None:
            yield Script(number, tuple(ids), False, temperature)
        else:
            start = tokenizer.encode(opener, add_special_tokens=False) if opener else []
            yield Script(number, tuple(start), True, temperature)


if __name__ == "__main__":
    command.run(main)
