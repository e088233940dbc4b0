"""Folders and files that appear whole or not at all, and replace others without a loss at a kill.

Beside a folder NAME stand, while it is made, `.NAME.building-*`, and while it takes the place of an
older one, `.NAME.replaced-*/NAME`. Their owner holds a lock on them; one that nobody holds is what
a killed process left.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

STALE_SECONDS = 60


def real_path(path: Path) -> Path:
    """Absolute, and where a symbolic link points to: what is replaced is the folder, not the link.

    The working directory may be what is replaced, so nothing is relative after this.
    """
    return Path(os.path.realpath(path)) if path.is_symlink() else path.absolute()


def may_replace(path: Path, is_ours: Callable[[Path], bool]) -> bool:
    """Whether what stands at `path` may be replaced at all: an empty folder, or one of ours."""
    return is_ours(path) or (path.is_dir() and not any(path.iterdir()))


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """While this process, or what has its lock, uses a folder: see `is_held`."""
    lock = _lock(folder)
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def is_held(folder: Path) -> bool:
    """Whether a living process uses a folder."""
    lock = _lock(folder)
    if lock is not None:
        os.close(lock)
    return lock is None


def try_to_write(file: Path) -> None:
    """Raise the `OSError` that `write_file` would, as far as the place alone can tell."""
    with tempfile.NamedTemporaryFile(prefix=f".{file.name}.", dir=file.parent):
        pass


def write_file(file: Path, content: bytes, mode: int = 0o644) -> None:
    """Write a file in place of what is there, in one step. Raises `OSError`, and leaves nothing."""
    descriptor, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
        temporary.chmod(mode)  # mkstemp makes it private
        temporary.rename(file)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def building(path: Path) -> Iterator[Path]:
    """A locked temporary folder beside `path`; on leaving it is removed, if it is still there."""
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.building-", dir=path.parent))
    lock = _lock(temporary)
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if lock is not None:
            os.close(lock)


@contextlib.contextmanager
def set_aside(path: Path) -> Iterator[None]:
    """Move what stands at `path` out of the way; bring it back if the block raises."""
    if not path.exists():
        yield
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{path.name}.replaced-", dir=path.parent))
    lock = _lock(aside)
    try:
        path.rename(aside / path.name)
        try:
            yield
        except BaseException:
            (aside / path.name).rename(path)
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def clean_up(
    path: Path,
    is_whole: Callable[[Path], bool],
    is_unfinished: Callable[[Path], bool] = lambda path: False,
) -> None:
    """Undo what killed processes left beside `path`.

    What they set aside comes back, unless what stands at `path` is whole, or is not of ours: only
    what is unfinished makes room for it.
    """
    for folder in _beside(path, "building"):
        with contextlib.suppress(OSError):
            if _is_stale(folder):
                _if_free(folder, lambda _: None)
    for aside in _beside(path, "replaced"):
        with contextlib.suppress(OSError):
            if (aside / path.name).exists() or _is_stale(aside):
                _if_free(aside, lambda aside: _bring_back(aside, path, is_whole, is_unfinished))


def left_aside(path: Path) -> Path | None:
    """What a killed process set aside, for an error's hint: `clean_up` would bring it back."""
    found = (aside / path.name for aside in _beside(path, "replaced"))
    return next((folder for folder in found if folder.exists()), None)


def _bring_back(
    aside: Path,
    path: Path,
    is_whole: Callable[[Path], bool],
    is_unfinished: Callable[[Path], bool],
) -> None:
    if is_whole(path) or not (aside / path.name).exists():
        return
    if is_unfinished(path):
        shutil.rmtree(path)
    # Raises where something else stands, unless it is an empty folder; both stay as they are then.
    (aside / path.name).rename(path)


def _is_stale(folder: Path) -> bool:
    """Whether it is too old to be of a process that has made it but not locked it yet."""
    return time.time() - folder.stat().st_mtime >= STALE_SECONDS


def _beside(path: Path, state: str) -> list[Path]:
    return sorted(path.parent.glob(f"{glob.escape(f'.{path.name}.{state}-')}*"))


def _if_free(folder: Path, settle: Callable[[Path], None]) -> None:
    """Settle and remove a folder, unless a living process holds it."""
    lock = _lock(folder)
    if lock is None:
        return
    try:
        settle(folder)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def _lock(folder: Path) -> int | None:
    """A descriptor that holds the folder's lock until it is closed; None if another has it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
