"""`DFLASH_TRT_NO_SKIPS`: a skip for what should be there is a failure, and only then."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from skips import ALLOWED, VARIABLE

ROOT = Path(__file__).parents[2]
MISSING = "import pytest\ndef test_it(): pytest.skip('no compiler')\n"
CASES = {
    "a tool is missing": (MISSING, True),
    "a module is missing": ("import pytest\npytest.importorskip('no_such')\n", True),
    "skipif": (
        "import pytest\n@pytest.mark.skipif(True, reason='no x')\ndef test_it(): ...\n",
        True,
    ),
    "allowed": (f"import pytest\ndef test_it(): pytest.skip({ALLOWED[0] + ': set X'!r})\n", False),
    "gpu": (f"import pytest\npytestmark = pytest.mark.gpu\n{MISSING}", False),
    "expected": ("import pytest\n@pytest.mark.xfail\ndef test_it(): assert 0\n", False),
}


def run(folder: Path, text: str, *, is_set: bool) -> tuple[int, str]:
    (folder / "test_case.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu: x\n")
    environ = {k: v for k, v in os.environ.items() if k != VARIABLE}
    environ |= {"PYTHONPATH": str(ROOT / "tests")} | ({VARIABLE: "1"} if is_set else {})
    command = [sys.executable, "-m", "pytest", "-q", "-p", "skips", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, str(folder)], cwd=folder, env=environ, capture_output=True, text=True
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(("text", "fails"), CASES.values(), ids=CASES)
def test_a_skip_fails_where_everything_has_to_be_there(
    text: str, fails: bool, tmp_path: Path
) -> None:
    code, out = run(tmp_path, text, is_set=True)
    assert (code in (1, 2), VARIABLE in out) == (fails, fails), out


def test_without_the_variable_it_is_a_skip(tmp_path: Path) -> None:
    code, out = run(tmp_path, MISSING, is_set=False)
    assert code == 0
    assert "1 skipped" in out


def test_ci_sets_it() -> None:
    assert f"export {VARIABLE}=1\n" in (ROOT / ".ci" / "run").read_text()
