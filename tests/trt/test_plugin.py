"""Engines whose KV injection is the plugin: what `build` takes, ships, tells and refuses.

No engine is built here: `tensorrt` is a stand-in. Its registry loads any file that says so.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dflash_trt import engine_dir, kv_plugin
from dflash_trt.build import trt_engine
from dflash_trt.build.network_hash import hash_network
from dflash_trt.build.pipeline import Plan, build, plan
from dflash_trt.build.tensorrt import BuiltEngine
from dflash_trt.checkpoint.weights import PairWeights
from dflash_trt.cli import main
from dflash_trt.engine_dir import EngineDir, open_engine
from dflash_trt.errors import ConfigError, DFlashError, EngineDirError, PluginError
from dflash_trt.flavor import DEVICE_TABLE
from dflash_trt.inspection import describe
from dflash_trt.kv_plugin import LIBRARY, VARIABLE, load_plugin
from tiny import PairMaker, TinyPair
from tiny.fake_plugin import CONTENT, Network, Registry, with_plugins
from tiny.gpu_builds import GPU_CHOICES, pretend_gpu

SM90 = {**GPU_CHOICES, "device": "sm90"}


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Registry:
    """TensorRT's plugin registry in a process that has loaded nothing yet, in no checkout."""
    made = Registry()
    pretend_gpu(monkeypatch, DEVICE_TABLE[SM90["device"]].capability)
    tensorrt = with_plugins(get_plugin_registry=lambda: made)
    monkeypatch.setitem(sys.modules, "tensorrt", tensorrt)
    monkeypatch.setattr(kv_plugin, "_loaded", set())
    monkeypatch.setattr("dflash_trt.__file__", str(tmp_path / "checkout" / "dflash_trt" / "x.py"))
    monkeypatch.delenv(VARIABLE, raising=False)
    return made


@pytest.fixture
def library(tmp_path: Path) -> Path:
    file = tmp_path / "mine.so"
    file.write_bytes(CONTENT)
    return file


@pytest.fixture
def make(gpu_pair: TinyPair, registry: Registry) -> Callable[..., Plan]:
    """Plans an engine for a data-center GPU."""

    def make(plugin: object = "auto", **choices: Any) -> Plan:
        sides = str(gpu_pair.target_dir), str(gpu_pair.drafter_dir)
        return plan(*sides, {**SM90, **choices}, plugin=str(plugin))

    return make


@pytest.fixture
def build_plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Plan], EngineDir]:
    """Builds all but TensorRT's own part."""

    def build_engine(
        trt: Any, device: Any, define: Callable[[Any], Sequence[Any]], profiles: Any, file: Path,
        report: Any,
    ) -> BuiltEngine:  # fmt: skip
        network = Network()
        digest = hash_network(trt, network, define(network), profiles)
        file.write_bytes(b"engine")
        nothing: dict[str, Any] = {"engines": 1, "tensors": [], "layers": []}
        return BuiltEngine(digest, len(network.layers), [], nothing, ())

    monkeypatch.setattr(trt_engine, "build_engine", build_engine)

    def run(made: Plan) -> EngineDir:
        return build(made, tmp_path / "engine", force=True, progress=lambda *_: None)

    return run


def test_a_library_that_is_named_serves_the_engine(
    make: Callable[..., Plan], build_plan: Callable[[Plan], EngineDir], library: Path
) -> None:
    made = make(library)
    assert (made.plugin, made.kv_injection) == (library, "plugin")
    built = build_plan(made)
    assert built.manifest["network"]["layers"] == built.config.pair.drafter.num_layers
    assert (built.path / LIBRARY).read_bytes() == CONTENT
    assert LIBRARY in built.manifest["files"]
    config = json.loads((built.path / "config.json").read_text())
    assert config["tensorrt"]["kv_injection"] == "plugin"
    assert open_engine(built.path).plugin == built.path / LIBRARY
    assert describe(built)["kv_injection"] == "plugin"


def test_off_and_nothing_found_are_native_layers(
    make: Callable[..., Plan], build_plan: Callable[[Plan], EngineDir], library: Path,
    registry: Registry, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    assert make().plugin is None
    monkeypatch.setenv(VARIABLE, str(library))
    made = make("off")
    assert (made.plugin, made.kv_injection, registry.loaded) == (None, "native layers", [])
    built = build_plan(made)
    assert built.manifest["network"]["layers"] == 0
    assert not (built.path / LIBRARY).exists()
    assert built.plugin is None
    assert describe(built)["kv_injection"] == "native layers"


def test_the_library_changes_the_networks_hash_and_another_build_does_not(
    make: Callable[..., Plan], build_plan: Callable[[Plan], EngineDir], library: Path
) -> None:
    hashes = [
        build_plan(made).manifest["network"]["sha256"]
        for made in (make(library), make(library), make("off"))
    ]
    assert hashes[0] == hashes[1] != hashes[2]


def test_auto_finds_the_variable_before_the_checkout(
    make: Callable[..., Plan], library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = tmp_path / "checkout" / "build" / "plugins" / "cuda" / LIBRARY
    compiled.parent.mkdir(parents=True)
    compiled.write_bytes(CONTENT)
    assert make().plugin == compiled
    monkeypatch.setenv(VARIABLE, str(library))
    assert make().plugin == library
    monkeypatch.setenv(VARIABLE, str(tmp_path / "gone.so"))
    with pytest.raises(PluginError, match=r"gone\.so cannot be read"):
        make()


def test_auto_is_native_where_the_plugin_cannot_serve(
    make: Callable[..., Plan], make_pair: PairMaker, library: Path, registry: Registry,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv(VARIABLE, str(library))
    assert make(device="sm120").plugin is None
    odd = make_pair()  # its heads have 16 elements
    sides = str(odd.target_dir), str(odd.drafter_dir)
    assert plan(*sides, SM90).plugin is None
    with pytest.raises(ConfigError, match="head_dim 64, 128, 256, the drafter has 16"):
        plan(*sides, SM90, plugin=str(library))
    assert registry.loaded == []


@pytest.mark.parametrize(
    ("device", "content", "error", "words"),
    [
        ("sm90", None, PluginError, r"mine\.so cannot be read: No such file"),
        ("sm90", b"something else", PluginError, r"mine\.so is not a library with the TensorRT"),
        ("sm120", CONTENT, ConfigError, "sm120 run on tensorrt_rtx, which has no plugin layers"),
        ("cpu", CONTENT, ConfigError, "cpu run on onnxruntime, which has no plugin layers"),
    ],
)
def test_a_required_plugin_that_cannot_be_is_refused_before_weights_are_read(
    device: str, content: bytes | None, error: type[DFlashError], words: str,
    make: Callable[..., Plan], library: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def read(*_: Any) -> None:
        raise AssertionError("a weight was read")

    for name in ("read", "read_rows", "raw"):
        monkeypatch.setattr(PairWeights, name, read)
    library.unlink()
    if content is not None:
        library.write_bytes(content)
    with pytest.raises(error, match=words) as caught:
        make(library, device=device)
    assert "\n" not in caught.value.message
    assert caught.value.hint


def test_a_library_that_changed_since_the_plan_ends_the_build(
    make: Callable[..., Plan], build_plan: Callable[[Plan], EngineDir], library: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    made = make(library)
    library.write_bytes(CONTENT + b"!")
    with pytest.raises(PluginError, match="of another library"):
        build_plan(made)
    assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda file: file.unlink(), "is missing"),
        (lambda file: file.write_bytes(CONTENT[::-1]), "is not the file that was built"),
    ],
)
def test_an_engine_without_its_library_does_not_open(
    spoil: Callable[[Path], Any], words: str, make: Callable[..., Plan],
    build_plan: Callable[[Plan], EngineDir], library: Path,
) -> None:  # fmt: skip
    built = build_plan(make(library))
    spoil(built.path / LIBRARY)
    with pytest.raises(EngineDirError, match=words):
        open_engine(built.path)


def test_a_manifest_that_leaves_the_library_out(
    make: Callable[..., Plan], build_plan: Callable[[Plan], EngineDir], library: Path
) -> None:
    built = build_plan(make(library))
    manifest = json.loads((built.path / engine_dir.MANIFEST).read_text())
    del manifest["files"][LIBRARY]
    (built.path / engine_dir.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(EngineDirError, match=f"does not list {LIBRARY}"):
        open_engine(built.path)


def test_a_library_is_loaded_once_in_a_process(registry: Registry, library: Path) -> None:
    trt = sys.modules["tensorrt"]
    same, other = (library.with_name(name) for name in ("same.so", "other.so"))
    same.write_bytes(CONTENT)
    other.write_bytes(CONTENT + b"2")
    assert load_plugin(trt, library) is load_plugin(trt, same)
    assert registry.loaded == [str(library)]
    with pytest.raises(PluginError, match="of another library"):
        load_plugin(trt, other)


def test_the_command_line_says_which_was_used(
    build_plan: object, gpu_pair: TinyPair, registry: Registry, library: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def run(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["dflash-trt", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        assert not end.value.code
        return capsys.readouterr().out

    folder = tmp_path / "engine"
    sides = ("--target", gpu_pair.target_dir, "--drafter", gpu_pair.drafter_dir)
    command = ("build", *sides, "--device", "sm90", "--max-seq-len", 96, "-o", folder, "--force")
    told = json.loads(run(*command, "--plugin", library, "--json"))
    assert (told["kv_injection"], told["plugin"]) == ("plugin", str(library))
    shown = run("inspect", folder)
    assert [line.split() for line in shown.splitlines() if line.startswith("kv injection")] == [
        ["kv", "injection", "plugin"]
    ]
    assert json.loads(run("inspect", folder, "--json"))["kv_injection"] == "plugin"
    table = run(*command)
    assert ["kv", "injection", "native", "layers"] in [line.split() for line in table.splitlines()]
