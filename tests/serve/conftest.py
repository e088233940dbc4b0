"""Servers of tiny engines, each started once and shared by the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from running import Server, serving

from dflash_trt.decode.engine import Engine
from tiny import TinyPair, build_engine, greedy_rows, save_pair, train_drafter

TEMPLATE = (
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.fixture(scope="session")
def engine_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny engine with a chat template and a drafter that drafts right and wrong tokens."""
    folder = tmp_path_factory.mktemp("served")
    longest = {"max_position_embeddings": 4096}
    pair = save_pair(folder, seed=60, block=4, target=longest, **longest)
    (pair.target_dir / "chat_template.jinja").write_text(TEMPLATE)
    _train(pair)
    built = build_engine(pair, folder / "engine", max_seq_len=4096, max_slots=4, prefill_chunk=32)
    return built.directory.path


def _train(pair: TinyPair) -> None:
    generator = torch.Generator().manual_seed(8)
    prompts = torch.randint(0, 95, (16, 12), generator=generator)
    outputs = torch.tensor(greedy_rows(pair.target, prompts.tolist(), 40))
    train_drafter(pair, torch.cat([prompts, outputs], dim=1), prompt=12, steps=120)


@pytest.fixture(scope="session")
def engine(engine_path: Path) -> Engine:
    """The same engine in this process."""
    return Engine.load(engine_path, num_threads=1)


@pytest.fixture(scope="module")
def server(engine_path: Path) -> Iterator[Server]:
    """Triton and OpenAI's API in front of the engine."""
    with serving(engine_path, "--queue", "200") as made:
        yield made
