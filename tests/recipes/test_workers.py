"""Several workers' step is that of one worker with all their rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import train
from torch import nn

SIZES = (5, 2)
"""Rows of each worker."""


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return model(rows).square().mean()


def start() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Linear(4, 3), torch.randn(sum(SIZES), 4)


def work(rank: int, meeting: str, found: str) -> None:
    """One worker."""
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{meeting}")
    model, rows = start()
    mine = rows.split(SIZES)[rank]
    loss_of(model, mine).backward()
    train.average_gradients(list(model.parameters()), torch.tensor(float(len(mine))))
    torch.save([p.grad for p in model.parameters()], f"{found}-{rank}")
    dist.destroy_process_group()


@pytest.mark.slow
def test_unlike_batches_are_averaged_by_their_rows(tmp_path: Path) -> None:
    mp.spawn(work, (str(tmp_path / "meeting"), str(tmp_path / "found")), nprocs=2)
    model, rows = start()
    loss_of(model, rows).backward()
    for rank in range(2):
        found = torch.load(tmp_path / f"found-{rank}", weights_only=True)
        for gradient, parameter in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad)
