"""A build that is killed at any moment leaves nothing that opens and blocks no later build."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dflash_trt import engine_dir, swap
from dflash_trt.build.pipeline import build, plan
from dflash_trt.engine_dir import open_engine
from dflash_trt.errors import BuildError, EngineDirError
from tiny import TinyEngine, TinyPair

pytestmark = pytest.mark.slow

# Imports and plans first, so a kill a few milliseconds later falls somewhere into the build.
SCRIPT = """
import sys, time
from pathlib import Path
from dflash_trt.build.pipeline import build, plan
target, drafter, output = sys.argv[1:]
planned = plan(target, drafter, {"max_seq_len": 500})
print("ready", flush=True)
sys.stdin.readline()
build(planned, Path(output), force=True, progress=lambda *state: None)
print("built", flush=True)
time.sleep(60)
"""


def quiet(stage: str, done: int, total: int) -> None:
    """No progress."""


def check_rest(parent: Path, output: Path) -> bool:
    """Whether the build had finished; else nothing there opens."""
    for path in parent.iterdir():
        try:
            open_engine(path)
        except EngineDirError:
            continue
        assert path == output
        return True
    return False


@pytest.mark.parametrize("moments", [(0, 4, 8, 15, 25, 40)])
def test_kill_9_at_any_moment_of_a_build(
    moments: tuple[int, ...], pair: TinyPair, tmp_path: Path
) -> None:
    finished = []
    for milliseconds in moments:
        parent = tmp_path / str(milliseconds)
        parent.mkdir()
        output = parent / "engine"
        arguments = [sys.executable, "-c", SCRIPT, pair.target_dir, pair.drafter_dir, output]
        child = subprocess.Popen(
            [str(a) for a in arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert child.stdin is not None
        assert child.stdout is not None
        with child, child.stdin, child.stdout:
            assert child.stdout.readline() == "ready\n"
            child.stdin.write("\n")
            child.stdin.flush()
            time.sleep(milliseconds / 1000)
            child.send_signal(signal.SIGKILL)
        finished.append(check_rest(parent, output))
        planned = plan(str(pair.target_dir), str(pair.drafter_dir), {"max_seq_len": 32})
        build(planned, output, force=finished[-1], progress=quiet)
        assert open_engine(output).config.choices.max_seq_len == 32
    assert not all(finished), "every build was faster than its kill: shorten the moments"


@pytest.mark.parametrize("had_engine", [False, True])
def test_a_kill_between_any_two_changes_of_the_disk(
    had_engine: bool, pair: TinyPair, engine: TinyEngine, tmp_path: Path
) -> None:
    """In a forked child, dies right before its n-th rename, folder or sync, for every n."""
    planned = plan(str(pair.target_dir), str(pair.drafter_dir), {"max_seq_len": 32})
    died = 0
    for step in range(1, 40):
        parent = tmp_path / str(step)
        parent.mkdir()
        output = parent / "engine"
        if had_engine:
            shutil.copytree(engine.directory.path, output)
        child = os.fork()
        if child == 0:  # no cleanup runs: the child ends by os._exit
            code = 1
            try:
                _die_before(step)
                build(planned, output, force=had_engine, progress=quiet)
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status) == 0:
            break
        died += 1
        assert os.waitstatus_to_exitcode(status) == 9, "the build itself failed"
        for path in parent.iterdir():
            if path != output:
                with pytest.raises(EngineDirError):
                    open_engine(path)
        is_whole = (output / engine_dir.CONFIG).exists()
        if had_engine and not is_whole:
            with pytest.raises(EngineDirError, match="being replaced") as caught:
                open_engine(output)
            assert open_engine(Path(caught.value.hint.split(" in ")[-1]))
            with pytest.raises(BuildError, match="exists"):
                build(planned, output, force=False, progress=quiet)
            assert open_engine(output).config == engine.directory.config
        elif is_whole:
            open_engine(output)  # the old engine, or the new one
        build(planned, output, force=had_engine or is_whole, progress=quiet)
        assert open_engine(output).config.choices.max_seq_len == 32
        assert not list(parent.glob(".engine.replaced-*/engine"))
    assert died > 8


def _die_before(step: int) -> None:
    left = step

    def wrap(module: object, name: str) -> None:
        original = getattr(module, name)

        def counted(*args: object, **kwargs: object) -> object:
            nonlocal left
            left -= 1
            if left == 0:
                os._exit(9)
            return original(*args, **kwargs)

        setattr(module, name, counted)

    for module, name in ((os, "fsync"), (os, "mkdir"), (Path, "rename"), (Path, "write_bytes")):
        wrap(module, name)


def test_the_next_build_removes_what_killed_ones_left_but_not_what_a_living_one_has(
    pair: TinyPair, tmp_path: Path
) -> None:
    old = time.time() - 2 * swap.STALE_SECONDS
    dead, alive, other = (
        tmp_path / name for name in (".e.building-dead", ".e.building-alive", ".x.building-dead")
    )
    for folder in (dead, alive, other):
        folder.mkdir()
        (folder / "weights.bin").write_bytes(b"half")
        os.utime(folder, (old, old))
    lock = os.open(alive, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    planned = plan(str(pair.target_dir), str(pair.drafter_dir), {"max_seq_len": 32})
    build(planned, tmp_path / "e", force=False, progress=quiet)
    os.close(lock)
    assert sorted(path.name for path in tmp_path.iterdir()) == [alive.name, other.name, "e"]
