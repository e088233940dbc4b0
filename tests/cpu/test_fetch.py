"""A pair from the Hub: the small files of both come first, and weights only of a pair that fits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from dflash_trt.build.pipeline import plan
from dflash_trt.errors import CheckpointError, ConfigError, DFlashError, PairMismatch
from tiny import TinyPair

WEIGHTS = "model.safetensors"


class Hub:
    """A Hub of two repositories, `org/target` and `org/drafter`, and what was fetched of them."""

    def __init__(self, pair: TinyPair, folder: Path) -> None:
        self._sources = {"org/target": pair.target_dir, "org/drafter": pair.drafter_dir}
        self._folder = folder
        self.configs: dict[str, dict[str, Any]] = {}  # repository -> changes of its config.json
        self.fetched: list[str] = []

    def snapshot_download(self, repository: str, **options: Any) -> str:
        local = self._folder / repository
        local.mkdir(parents=True, exist_ok=True)
        names = [file.name for file in self._sources[repository].iterdir()]
        wanted = huggingface_hub.utils.filter_repo_objects(
            names,
            allow_patterns=options["allow_patterns"],
            ignore_patterns=options["ignore_patterns"],
        )
        for name in wanted:
            if not (local / name).exists():
                shutil.copyfile(self._sources[repository] / name, local / name)
                self.fetched.append(f"{repository}/{name}")
        config = local / "config.json"
        changed = json.loads(config.read_text()) | self.configs.get(repository, {})
        config.write_text(json.dumps(changed))
        return str(local)


@pytest.fixture
def hub(pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    made = Hub(pair, tmp_path / "hub")
    monkeypatch.setattr("huggingface_hub.snapshot_download", made.snapshot_download)
    return made


def weights_of(hub: Hub) -> list[str]:
    return [name for name in hub.fetched if name.endswith(WEIGHTS)]


def test_the_small_files_come_first(hub: Hub, pair: TinyPair) -> None:
    made = plan("hf:org/target", "org/drafter", {})
    assert weights_of(hub) == [f"org/{side}/{WEIGHTS}" for side in ("target", "drafter")]
    assert hub.fetched[-2:] == weights_of(hub)
    assert made.pair.config == plan(str(pair.target_dir), str(pair.drafter_dir), {}).pair.config


@pytest.mark.parametrize(
    ("repository", "changes", "choices", "kind", "message"),
    [
        ("org/target", {"vocab_size": 99}, {}, PairMismatch, "vocab_size 160 differs"),
        ("org/target", {"hidden_size": 64}, {}, PairMismatch, "target_hidden_size 48 differs"),
        ("org/target", {"architectures": ["Mamba"]}, {}, CheckpointError, "architectures"),
        ("org/drafter", {"architectures": ["DSparkDraftModel"]}, {}, CheckpointError, "DSpark"),
        ("org/drafter", {"block_size": None}, {}, CheckpointError, "block_size"),
        ("org/drafter", {"head_dim": 15}, {}, CheckpointError, "head_dim 15 is odd"),
        ("org/drafter", {}, {"block": 5}, PairMismatch, "trained with block 4"),
        ("org/drafter", {}, {"max_seq_len": 10_000}, ConfigError, "max_seq_len 10000"),
    ],
)  # fmt: skip
def test_no_weights_are_fetched_of_a_pair_that_does_not_fit(
    repository: str, changes: Any, choices: Any, kind: type[DFlashError], message: str, hub: Hub
) -> None:
    hub.configs[repository] = changes
    with pytest.raises(kind, match=message):
        plan("org/target", "org/drafter", choices)
    assert hub.fetched
    assert not weights_of(hub)


def test_a_side_that_is_here_is_checked_before_the_other_is_fetched(
    hub: Hub, pair: TinyPair
) -> None:
    hub.configs["org/target"] = {"vocab_size": 99}
    with pytest.raises(PairMismatch, match="vocab_size 160 differs"):
        plan("org/target", str(pair.drafter_dir), {})
    assert not weights_of(hub)
    plan(str(pair.target_dir), "org/drafter", {})
    assert weights_of(hub) == [f"org/drafter/{WEIGHTS}"]
