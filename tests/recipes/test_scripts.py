"""What scripts.py makes of a seed."""

from __future__ import annotations

import random
from argparse import Namespace
from itertools import islice
from pathlib import Path

import pytest
import scripts


@pytest.fixture(autouse=True)
def _few_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    found = scripts.sources(["toolz"], library=False)
    monkeypatch.setattr(scripts, "sources", lambda: list(found))


def made(seed: int, count: int) -> list[scripts.Script]:
    args = Namespace(target="smollm2-135m", seed=seed, code=0.5)
    return list(islice(scripts.all_scripts(args), count))


def test_a_longer_file_starts_as_a_shorter_one() -> None:
    few, more = made(3, 30), made(3, 90)
    assert more[:30] == few
    assert {script.open for script in few} == {True, False}
    assert made(4, 30) != few


def test_every_function_is_asked_about_and_then_no_more() -> None:
    asked = list(scripts.requests(0))
    names = {name for name, *_ in scripts.functions(scripts.sources())}
    assert len(asked) % scripts.ROUNDS == 0
    assert all(any(name in text for text in asked) for name in names)
    late = made(0, 2 * len(asked) + 400)[-100:]
    assert all(script.open for script in late)


def test_the_same_sources_elsewhere_come_in_the_same_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    orders = []
    for places in (("a", "b"), ("b", "a")):
        for name, files in zip(places, (("p/x.py", "p/y.py"), ("abc.py", "q.py")), strict=True):
            for file in files:
                (tmp_path / places[0] / name / file).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / places[0] / name / file).touch()
        roots = {
            "purelib": tmp_path / places[0] / places[0],
            "stdlib": tmp_path / places[0] / places[1],
        }
        with monkeypatch.context() as patched:
            patched.setattr(scripts.sysconfig, "get_path", lambda kind, r=roots: str(r[kind]))
            found = scripts.sources(["p"])
        random.Random(0).shuffle(found)
        orders.append([file.name for file in found])
    assert orders[0] == orders[1]
    assert len(orders[0]) == 4
