"""Finds tritonserver, and a Python environment that its Python backend can run us in.

The backend embeds a libpython of its own choice. Its standard library must be of that very version,
while our packages come from the environment that this process runs in: `write_environment` joins
the two in a small virtual environment.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dflash_trt.errors import ConfigError

CONTAINER = Path("/opt/tritonserver/bin/tritonserver")
STUB = "triton_python_backend_stub"
_MINOR = f"{sys.version_info.major}.{sys.version_info.minor}"


@dataclass(frozen=True)
class TritonServer:
    """A tritonserver and what it needs to find its parts."""

    binary: Path
    libraries: tuple[Path, ...] = ()
    backends: Path | None = None  # None: it knows where
    stub: Path | None = None  # of this Python; None: beside the backend
    flags: dict[str, str] = field(default_factory=dict)

    def environ(self) -> dict[str, str]:
        """The variables to start it with."""
        paths = [*map(str, self.libraries), os.environ.get("LD_LIBRARY_PATH", "")]
        return {**os.environ, "LD_LIBRARY_PATH": ":".join(path for path in paths if path)}


def find_tritonserver() -> TritonServer:
    """The tritonserver on PATH, in NVIDIA's container, or in the wheel nvidia-pytriton.

    Raises `ConfigError` when there is none, or when the wheel's would not work here.
    """
    on_path = shutil.which("tritonserver")
    if on_path is not None:
        return TritonServer(Path(on_path))
    if CONTAINER.is_file():
        return TritonServer(CONTAINER)
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            "there is no tritonserver: not on PATH, not in /opt/tritonserver/bin, no wheel",
            hint="pip install 'dflash-trt[triton]' into an environment of its own, run in NVIDIA's "
            "Triton container, or serve with --no-triton",
        )
    root = Path(next(iter(spec.submodule_search_locations)))
    return _from_wheel(root)


def _from_wheel(root: Path) -> TritonServer:
    if int(np.__version__.split(".")[0]) >= 2:
        raise ConfigError(
            f"the Triton in nvidia-pytriton needs NumPy 1, this environment has {np.__version__}",
            hint="pip install 'numpy<2', or 'dflash-trt[triton]' into a new environment",
        )
    stub = root / "tritonserver" / "python_backend_stubs" / _MINOR / STUB
    if not stub.is_file():
        raise ConfigError(f"the Triton in nvidia-pytriton cannot run Python {_MINOR}")
    own = Path(sysconfig.get_config_var("LIBDIR") or "")
    has_own = (own / f"libpython{_MINOR}.so.1.0").is_file()
    return TritonServer(
        binary=root / "tritonserver" / "bin" / "tritonserver",
        libraries=(root.parent / "nvidia_pytriton.libs", *([own] if has_own else [])),
        backends=root / "tritonserver" / "backends",
        stub=stub,
    )


def write_backends(server: TritonServer, folder: Path) -> Path:
    """A backend directory with the stub of this Python; the wheel's own has none."""
    assert server.backends is not None
    assert server.stub is not None
    python = folder / "python"
    python.mkdir(parents=True)
    for file in (server.backends / "python").iterdir():
        if file.is_file():
            (python / file.name).symlink_to(file)
    (python / STUB).symlink_to(server.stub)
    return folder


def write_environment(server: TritonServer, folder: Path) -> Path:
    """A virtual environment of the stub's Python with this process's packages.

    Raises `ConfigError` when no Python of the stub's version can be found.
    """
    home = _home_of(*_libpython(server))
    packages = folder / "lib" / f"python{_MINOR}" / "site-packages"
    packages.mkdir(parents=True)
    places = [p for p in sys.path if p.endswith(("site-packages", "dist-packages"))]
    lines = [f"import site; site.addsitedir({place!r})" for place in places]
    (packages / "dflash_trt.pth").write_text("\n".join([*lines, ""]))
    (folder / "pyvenv.cfg").write_text(
        f"home = {home.parent}\ninclude-system-site-packages = false\n"
    )
    (folder / "bin").mkdir()
    (folder / "bin" / "python3").symlink_to(home)
    (folder / "bin" / "activate").write_text(
        f'export VIRTUAL_ENV="{folder}"\nexport PATH="{folder}/bin:$PATH"\n'
    )
    return folder


def _libpython(server: TritonServer) -> tuple[Path, str]:
    """The libpython that the stub loads, and its version as `sys.version` has it."""
    assert server.stub is not None
    listed = subprocess.run(
        ["ldd", str(server.stub)], env=server.environ(), capture_output=True, text=True, check=False
    )
    for line in listed.stdout.splitlines():
        name, _, rest = line.strip().partition(" => ")
        if name.startswith("libpython") and rest.startswith("/"):
            path = Path(rest.split(" (")[0])
            get_version = ctypes.CDLL(str(path)).Py_GetVersion
            get_version.restype = ctypes.c_char_p
            return path, get_version().decode()
    raise ConfigError(
        f"Triton's Python backend needs libpython{_MINOR}.so.1.0, which is not installed",
        hint=f"apt-get install libpython{_MINOR}, or serve with --no-triton",
    )


def _home_of(library: Path, version: str) -> Path:
    """An interpreter whose standard library belongs to `library`."""
    name = f"python{_MINOR}"
    candidates = [
        getattr(sys, "_base_executable", sys.executable),
        *(str(Path(folder) / name) for folder in os.get_exec_path()),
        *(str(Path(folder) / name) for folder in ("/usr/bin", "/usr/local/bin")),
    ]
    for candidate in dict.fromkeys(candidates):
        if os.access(candidate, os.X_OK) and _version_of(candidate) == version:
            return Path(candidate)
    raise ConfigError(
        f"Triton's Python backend loads {library} of Python {version.split()[0]}, and no {name} "
        "of that version is installed",
        hint=f"make the environment with that Python, or install its {name}",
    )


def _version_of(interpreter: str) -> str:
    done = subprocess.run(
        [interpreter, "-I", "-S", "-c", "import sys; print(sys.version, end='')"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.stdout
