"""Engine directories of TensorRT: what is in them, what `inspect` tells, what is refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_trt import contract as c
from dflash_trt.build.pipeline import build, plan
from dflash_trt.checkpoint.weights import PairWeights
from dflash_trt.engine_dir import EngineDir, open_engine
from dflash_trt.errors import ConfigError, EngineDirError, MissingPackage
from dflash_trt.inspection import describe
from tiny import TinyPair, sign
from tiny.gpu_builds import GPU_CHOICES, GpuBuild

pytestmark = pytest.mark.usefixtures("greedy_choice")
OUTPUTS = {c.COMMITTED, c.NEXT}
FIXED = {c.BLOCK_OFFSETS, c.DRAFT_OFFSETS}


@pytest.fixture(scope="module")
def engine(
    greedy_choice: None, gpu_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory
) -> EngineDir:
    planned = plan(str(gpu_pair.target_dir), str(gpu_pair.drafter_dir), GPU_CHOICES)
    folder = tmp_path_factory.mktemp("trt") / "engine"
    return build(planned, folder, force=False, progress=lambda *_: None)


@pytest.fixture
def spoiled(engine: EngineDir, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(engine.path, tmp_path / "spoiled"))


def edit(folder: Path, name: str, change: Callable[[Any], Any]) -> None:
    data = json.loads((folder / name).read_text())
    change(data)
    (folder / name).write_text(json.dumps(data))
    if name != "manifest.json":
        sign(folder, name)


def test_one_engine_one_enqueue_two_small_outputs(engine: EngineDir) -> None:
    step = describe(engine)["tensorrt"]["step"]
    assert step["engines"] == 1
    assert set(step["inputs"]) == set(c.INPUTS) - FIXED
    assert set(step["outputs"]) == OUTPUTS
    assert step["caches_in_place"] == len(c.all_caches(engine.config.pair))
    assert step["on_host"] == []
    assert [file.name for file in engine.path.glob("*.engine")] == ["rank0.engine"]


def test_attention_copies_no_cache_for_every_query_head(engine: EngineDir) -> None:
    """TensorRT-RTX 1.7 did, where query heads were more than key heads: see `_attention`."""
    kernels = [
        layer["name"] for layer in json.loads((engine.path / "layers.json").read_text())["layers"]
    ]
    assert sum("gemm_mha" in name for name in kernels) == 2 * 4  # profiles, layers
    assert not [name for name in kernels if re.search(r"ReshRepl\w*Move", name)]


def test_the_manifest_is_the_contract(engine: EngineDir) -> None:
    network = engine.manifest["network"]
    tensors = {tensor["name"]: tensor for tensor in network["tensors"]}
    config = engine.config
    rows = c.cache_rows(config.choices.max_seq_len, config.choices.block)
    for spec in c.all_caches(config.pair):
        shape = [c.SLOTS, spec.num_heads, rows, spec.head_dim]
        assert (tensors[spec.name]["dtype"], tensors[spec.name]["dims"]) == ("bf16", shape)
        assert tensors[spec.output]["mode"] == "output"
    assert tensors[c.TOKENS]["dims"] == [c.SLOTS, c.STEP_TOKENS]
    assert tensors[c.ADJUST_IDS]["dims"] == [c.SPECIAL, c.VERIFY_ROWS, c.ADJUSTED]
    assert tensors[c.NEXT]["dims"][1] == config.choices.block
    block, chunk, slots = (
        getattr(config.choices, name) for name in ("block", "prefill_chunk", "max_slots")
    )
    dims = {profile["name"]: profile["dims"] for profile in network["profiles"]}
    assert {name: (d[c.SLOTS], d[c.STEP_TOKENS]) for name, d in dims.items()} == {
        "decode": ([1, slots, slots], [1, block, block]),
        "prefill": ([1, 1, 1], [1, chunk, chunk]),
    }  # fmt: skip
    assert set(engine.manifest["versions"]) == {"dflash_trt", "tensorrt_rtx"}


def test_inspect_tells_precisions_and_tensorrts_check(engine: EngineDir) -> None:
    told = describe(engine)["tensorrt"]
    assert told["compute_capability"] == "12.0"
    assert told["kernels"]["count"] > 50
    assert told["kernels"]["weights"]["BFloat16"] > 10
    # The check is TensorRT's: on a machine with a GPU it says more.
    assert "header is one of this version" in told["check"] or "on this machine" in told["check"]


@pytest.mark.parametrize(("precision", "kind"), [("fp8", "FP8"), ("nvfp4", "FP4")])
def test_a_quantized_engine_holds_quantized_weights(
    precision: str, kind: str, build_gpu: GpuBuild
) -> None:
    weights = describe(build_gpu(precision=precision))["tensorrt"]["kernels"]["weights"]
    assert sum(count for name, count in weights.items() if kind in name.upper()) >= 2 * 4


def test_logits_are_an_output_only_on_request(build_gpu: GpuBuild) -> None:
    built = build_gpu(logits=True)
    assert set(describe(built)["tensorrt"]["step"]["outputs"]) == {*OUTPUTS, c.LOGITS}


def test_a_second_build_is_the_same_network(engine: EngineDir, build_gpu: GpuBuild) -> None:
    """And the same kernels. A few bytes of the engine file differ: TensorRT's own doing."""
    again = build_gpu("again")
    assert again.manifest["network"] == engine.manifest["network"]
    assert again.manifest["files"]["layers.json"] == engine.manifest["files"]["layers.json"]
    assert again.model.stat().st_size == engine.model.stat().st_size


@pytest.mark.parametrize("changed", [{"precision": "fp16"}, {"max_slots": 4}, {"block": 3}])
def test_other_choices_are_another_network(
    changed: dict[str, Any], engine: EngineDir, build_gpu: GpuBuild
) -> None:
    other = build_gpu(**changed).manifest["network"]["sha256"]
    assert other != engine.manifest["network"]["sha256"]


def test_a_truncated_or_altered_engine_is_refused_before_it_is_loaded(spoiled: Path) -> None:
    file = spoiled / "rank0.engine"
    content = bytearray(file.read_bytes())
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(EngineDirError, match=r"rank0\.engine has \d+ bytes, the manifest says"):
        open_engine(spoiled)
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(EngineDirError, match=r"rank0\.engine is not the file that was built"):
        open_engine(spoiled)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(backend="onnxruntime"), "do not belong together"),
        (lambda d: d.update(backend="tensorrt"), "do not belong together"),
        (lambda d: d.update(backend="tensorrt_rt"), "is for backend 'tensorrt_rt'"),
        (lambda d: d.update(backend=["x"]), "is for backend"),
        (lambda d: d["choices"].update(device="sm90"), "do not belong together"),
        (lambda d: d["choices"].update(device="sm86", precision="nvfp4"), "needs compute cap"),
        (lambda d: d["choices"].update(logits=1), "logits must be true or false"),
        (lambda d: d.pop("tensorrt"), "cannot be read: 'tensorrt'"),
        (lambda d: d.update(tensorrt={"version": 1}), "tensorrt version is 1"),
        (lambda d: d.update(tensorrt=3), "cannot be read"),
        (lambda d: d["tensorrt"].update(kv_injection="plugin"), "of tensorrt_rtx is 'plugin'"),
        (lambda d: d["tensorrt"].update(kv_injection=["plugin"]), "kv_injection of"),
    ],
)  # fmt: skip
def test_a_config_that_contradicts_itself(
    change: Callable[[Any], Any], words: str, spoiled: Path
) -> None:
    edit(spoiled, "config.json", change)
    with pytest.raises(EngineDirError, match=words) as caught:
        open_engine(spoiled)
    assert "\n" not in caught.value.message


def test_an_engine_without_its_parts(spoiled: Path) -> None:
    edit(spoiled, "manifest.json", lambda d: d["files"].pop("layers.json"))
    with pytest.raises(EngineDirError, match="does not list layers"):
        open_engine(spoiled)


@pytest.mark.parametrize(
    ("version", "capability", "words"),
    [
        ("1.6.0.1", (12, 0), r"built by tensorrt_rtx 1\.7\.1\.116, this machine has 1\.6\.0\.1"),
        ("1.7.1.116", (9, 0), r"compute capability 12\.0, this GPU has 9\.0"),
        ("1.7.1.116", (12, 1), r"compute capability 12\.0, this GPU has 12\.1"),
    ],
)
def test_another_tensorrt_or_gpu(
    version: str, capability: tuple[int, int], words: str, engine: EngineDir
) -> None:
    engine.check_runs_on("1.7.1.116", (12, 0))
    with pytest.raises(EngineDirError, match=words) as caught:
        engine.check_runs_on(version, capability)
    assert "\n" not in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{", b"[" * 100_000, b'{"layers": 3, "tensors": [], "engines": 1}',
     b'{"layers": [], "tensors": [{"mode": "x", "name": "y"}], "engines": 1}'],
)  # fmt: skip
def test_a_list_of_kernels_that_is_none(content: bytes, spoiled: Path) -> None:
    (spoiled / "layers.json").write_bytes(content)
    sign(spoiled, "layers.json")
    with pytest.raises(EngineDirError, match="cannot be read"):
        describe(open_engine(spoiled))


@pytest.mark.parametrize(
    "network",
    [
        None, 3, {}, {"layers": 1, "sha256": "x", "profiles": [1]},
        {"layers": float("inf"), "sha256": "x", "profiles": []},
    ],
)  # fmt: skip
def test_a_manifest_without_a_network(network: Any, spoiled: Path) -> None:
    edit(spoiled, "manifest.json", lambda d: d.update(network=network))
    with pytest.raises(EngineDirError, match="cannot be read"):
        describe(open_engine(spoiled))


@pytest.mark.parametrize(
    ("choices", "error", "words"),
    [
        ({"device": "sm86", "precision": "fp8"}, ConfigError, "needs compute capability 8.9"),
        ({"device": "sm89", "precision": "nvfp4"}, ConfigError, "needs compute capability 10.0"),
        ({"precision": "int4"}, ConfigError, "int4 is not for device sm120"),
        ({"device": "sm12"}, ConfigError, "'sm12' is not one of"),
        ({"device": ["sm120"]}, ConfigError, "is not one of"),
        ({"device": "sm90"}, MissingPackage, "tensorrt cannot be used"),
        ({"max_slots": 257}, ConfigError, "max_slots"),
        ({"max_seq_len": 4096}, ConfigError, "beyond the positions"),
        ({"prefill_chunk": 0}, ConfigError, "prefill_chunk"),
    ],
)
def test_what_cannot_be_built_is_refused_before_weights_are_read(
    choices: dict[str, Any], error: type[Exception], words: str, gpu_pair: TinyPair,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def read(*_: Any) -> None:
        raise AssertionError("a weight was read")

    for name in ("read", "read_rows", "raw"):
        monkeypatch.setattr(PairWeights, name, read)
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(error, match=words) as caught:
        plan(str(gpu_pair.target_dir), str(gpu_pair.drafter_dir), {**GPU_CHOICES, **choices})
    assert "\n" not in str(caught.value)


def test_without_tensorrt_nothing_is_read(
    gpu_pair: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    with pytest.raises(MissingPackage, match="tensorrt_rtx") as caught:
        plan("/not/there", str(gpu_pair.drafter_dir), GPU_CHOICES)
    assert caught.value.hint == "pip install 'dflash-trt[tensorrt-rtx]'"


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_leaves_nothing(build_gpu: GpuBuild, tmp_path: Path) -> None:
    told: list[str] = []

    def progress(stage: str, done: int, total: int) -> None:
        if not told and stage.startswith("TensorRT: timing"):
            told.append(stage)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        build_gpu(progress=progress)
    assert told
    assert not list(tmp_path.iterdir())
