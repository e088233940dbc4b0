"""Scripts of the training texts: how each starts, and what is left to the target.

    python scripts.py -o scripts.jsonl --count 12000

Six of ten are *open*: the user's message is the target's own too, after none or a few words of an
opener. So its topics are those that it was tuned on, and no data set is needed. The others ask for
Python, with heads and docstrings of functions in the standard library and in six packages.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import command
from evaluation import HUMANEVAL_FORMAT, Overlap
from target import find_target, load_tokenizer

from dflash_trt import swap

PACKAGES = ("algorithms", "boltons", "more_itertools", "toolz", "networkx", "sympy")
MAX_CODE_TOKENS = 110

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


def read_scripts(file: Path) -> list[Script]:
    """Scripts of a file, in order."""
    rows = (json.loads(line) for line in file.read_text().splitlines())
    return [Script(**{**row, "user_ids": tuple(row["user_ids"])}) for row in rows]


def sources(packages: Iterable[str] = PACKAGES, *, library: bool = True) -> list[Path]:
    """Files of packages, and of the standard library without its tests."""
    found = [
        file
        for name in packages
        for file in (Path(sysconfig.get_path("purelib")) / name).rglob("*.py")
    ]
    if library:
        apart = {"site-packages", "test", "tests"}
        whole = Path(sysconfig.get_path("stdlib")).rglob("*.py")
        found += [file for file in whole if not apart & set(file.parts)]
    return sorted(found)


def functions(files: Iterable[Path]) -> Iterator[tuple[str, str, str]]:
    """Name, head with docstring, and the docstring's first sentence, of public functions."""
    for file in files:
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                yield from _function(node)


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


def main() -> None:
    """Write the scripts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=command.output_file, required=True)
    parser.add_argument("--count", type=command.positive, default=12_000)
    parser.add_argument("--code", type=float, default=0.4, help="share that asks for Python")
    command.add_target(parser)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    choose = random.Random(args.seed)
    tokenizer = load_tokenizer(find_target(args.target))
    evaluation = Overlap.with_evaluation()
    found = sorted(set(functions(sources())))
    choose.shuffle(found)
    scripts, used, passed = [], 0, 0
    for number in range(args.count):
        user, is_open = choose.choice(OPENERS), True
        if choose.random() < args.code:
            while used < len(found) * 3:
                name, code, summary = found[used % len(found)]
                used += 1
                asked = choose.choice(TEMPLATES).format(name=name, code=code, summary=summary)
                if evaluation.found_in(asked):
                    passed += 1
                elif len(tokenizer.encode(asked, add_special_tokens=False)) <= MAX_CODE_TOKENS:
                    user, is_open = asked, False
                    break
        ids = tokenizer.encode(user, add_special_tokens=False) if user else []
        temperature = choose.choice((0.0, 0.0, 0.0, 0.7))
        scripts.append(Script(number, tuple(ids), is_open, temperature))
    lines = "".join(json.dumps(asdict(script)) + "\n" for script in scripts)
    swap.write_file(args.output, lines.encode())
    print(
        f"{len(scripts)} scripts, {sum(not s.open for s in scripts)} of them ask for Python; "
        f"{len(found)} functions found, {passed} passed over for their overlap with evaluation"
    )


if __name__ == "__main__":
    command.run(main)
