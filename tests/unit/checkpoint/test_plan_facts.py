"""What a plan makes of two checkpoints' facts: how long a text may be, what is never fetched."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import huggingface_hub.utils
import pytest
from checkpoint_files import GGUF_TOKENIZER, llama_weights, save_drafter, save_gguf

from dflash_trt.build.pipeline import build, plan
from dflash_trt.errors import ConfigError, UnsupportedArchitecture
from tiny import PairMaker, TinyPair

# As in Qwen3's documentation, where 40960 stays beside factor 4 and 32768; all by 128.
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0,
        "original_max_position_embeddings": 256}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 256}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0}


@pytest.mark.parametrize(
    ("target", "drafter", "limits"),
    [
        (YARN, None, (1024, 320)),
        (YARN, YARN, (1024, 1024)),
        (YARN | {"factor": 1.0}, YARN, (320, 1024)),
        (None, YARN, (320, 1024)),
        # A llama3 rule's files state the stretched number; a linear one's are taken at their word.
        (LLAMA3, YARN, (320, 1024)),
        (LINEAR, LLAMA3, (320, 320)),
    ],
)
def test_yarn_counts_in_how_long_a_text_may_be(
    make_pair: PairMaker, target: Any, drafter: Any, limits: tuple[int, int]
) -> None:
    def options(rule: Any) -> dict[str, Any]:
        return {"max_position_embeddings": 320, **({"rope_parameters": rule} if rule else {})}

    pair = make_pair(target=options(target), **options(drafter))
    folders = str(pair.target_dir), str(pair.drafter_dir)
    longest = min(limits)
    assert plan(*folders, {}).choices.max_seq_len == longest
    assert plan(*folders, {"max_seq_len": longest}).choices.max_seq_len == longest
    with pytest.raises(ConfigError, match=rf"target {limits[0]}, drafter {limits[1]}") as caught:
        plan(*folders, {"max_seq_len": longest + 1})
    assert caught.value.hint == f"choose at most {longest}"


class Reached(Exception):
    """The build has read a weight."""


@pytest.mark.parametrize("name", ["m.gguf", "m.GGUF", "sha256-0123abcd"])
def test_a_gguf_target_is_built_whatever_its_name(tmp_path: Path, name: str) -> None:
    sizes = {"embedding_length": 64, "feed_forward_length": 128, "rope.dimension_count": 8}
    weights = llama_weights(hidden=64, inner=128)
    target = save_gguf(tmp_path / name, weights, keys={**GGUF_TOKENIZER, **sizes})
    drafter = save_drafter(
        tmp_path / "drafter", num_target_layers=2, dflash_config={"target_layer_ids": [0, 1]}
    )
    made = plan(str(target), str(drafter), {})

    def progress(stage: str, done: int, total: int) -> None:
        raise Reached(stage)

    with pytest.raises(Reached, match="weights"):
        build(made, tmp_path / "engine", force=False, progress=progress)


def test_a_drafter_with_a_mask_embedding_beside_it_is_refused_before_weights_come(
    pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub, fetched = tmp_path / "hub", []
    shutil.copytree(pair.drafter_dir, hub)
    (hub / "mask_embedding.pt").write_bytes(b"never opened")

    def snapshot_download(repository: str, **options: Any) -> str:
        local = tmp_path / "cache"
        local.mkdir(exist_ok=True)
        for name in huggingface_hub.utils.filter_repo_objects(
            [file.name for file in hub.iterdir()],
            allow_patterns=options["allow_patterns"],
            ignore_patterns=options["ignore_patterns"],
        ):
            shutil.copyfile(hub / name, local / name)
            fetched.append(name)
        return str(local)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(UnsupportedArchitecture, match=r"mask_embedding\.pt: .* side file"):
        plan(str(pair.target_dir), "hf:org/drafter", {})
    assert "model.safetensors" not in fetched
    (hub / "mask_embedding.pt").unlink()
    (tmp_path / "cache" / "mask_embedding.pt").unlink()
    assert plan(str(pair.target_dir), "hf:org/drafter", {}).drafter == tmp_path / "cache"
    assert "model.safetensors" in fetched
