"""Train a DFlash drafter on what responses.py wrote.

    python train.py data -o drafter --minutes 60

Every step takes texts, several anchors of each, and asks the drafter for the block after every
anchor at once; a mask lets a block see the context features before its anchor, and itself. The loss
is the cross-entropy to the target's own distribution, weighted so that early rows count most. It
stops by the clock or after --steps, with the learning rate at nought. Every report saves the
drafter; --init FOLDER starts from one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import drafter as drafters
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from batches import Batch, Batches
from command import TARGET, alone, fail, features, minutes, positive, run, start, texts_folder
from evaluation import Overlap
from options import add_shape, add_workers, most_workers
from origin import Origin
from shards import Text, read_shards
from target import DEVICE, DTYPE, load_target
from task import make_task
from torch import nn
from torch.nn.functional import embedding

from dflash_trt import swap
from dflash_trt.checkpoint import load_tokenizer
from dflash_trt.text import Tokenizer

OTHERS = 2048
"""Tokens besides the labels that a step's softmax holds, drawn anew; they stand for all others."""
GAMMA = {16: 7.0}
"""Decay of the rows' weights by block size (paper, training details); any other, block / 2."""
WARM_UP = 0.04
MOST_TRAINERS = 4
"""By default: with more, batches would be larger and steps fewer."""
HELD_OUT = 50
"""Every so many-th script is only measured on."""
CHECKS = 10
CURVE = "curve.json"
MEETING = "meeting"


class Head:
    """The target's embedding and output head, frozen."""

    def __init__(self, target: Any) -> None:
        """Keeps the two matrices alone."""
        self.embedding = target.get_input_embeddings().weight
        self.output = target.get_output_embeddings().weight


def row_weights(block: int) -> torch.Tensor:
    """exp(-(k - 1) / gamma) of the drafted rows k = 1 .. block - 1."""
    gamma = GAMMA.get(block, block / 2)
    return torch.exp(-torch.arange(block - 1) / gamma)


def draft(model: nn.Module, head: Head, batch: Batch) -> torch.Tensor:
    """Hidden states of the drafted rows [B, A, K - 1, H]."""
    shape = batch.label_ids.shape
    hidden = model(
        position_ids=batch.positions,
        attention_mask=batch.mask,
        noise_embedding=embedding(batch.blocks, head.embedding).float(),
        target_hidden=batch.features.to(head.output.dtype),
    )
    return hidden.view(shape[0], shape[1], shape[2] + 1, -1)[:, :, 1:]


def loss_of(hidden: torch.Tensor, head: Head, batch: Batch, weights: torch.Tensor) -> torch.Tensor:
    """Cross-entropy to the target's likeliest tokens, over them and a draw of all others.

    `weights` are those of a whole block's rows; a batch may have fewer.
    """
    real = batch.real
    labels = batch.label_ids[real]
    probs = batch.label_probs[real]
    probs = probs / probs.sum(-1, keepdim=True)
    size = head.output.shape[0]
    known, places = labels.unique(return_inverse=True)
    taken = torch.zeros(size, dtype=torch.bool, device=known.device)
    taken[known] = True
    others = torch.randint(size, (OTHERS,), device=known.device)
    others = others[~taken[others]].unique()
    rows = head.output[torch.cat([known, others])]
    logits = (hidden[real].to(rows.dtype) @ rows.T).float()
    if len(others):
        logits[:, len(known) :] += math.log((size - len(known)) / len(others))
    logprobs = logits.gather(1, places) - logits.logsumexp(-1, keepdim=True)
    losses = -(probs * logprobs).sum(-1)
    weight = weights[: real.shape[-1]].expand(real.shape)[real]
    return (losses * weight).sum() / weight.sum()


@torch.no_grad()
def accepted(model: nn.Module, head: Head, batches: Iterable[Batch]) -> dict[str, Any]:
    """Acceptance on texts that are not trained on, from anchors anywhere, mostly in answers."""
    hits: list[torch.Tensor] = []
    for batch in batches:
        on = batch.to(DEVICE)
        hidden = draft(model, head, on).to(head.output.dtype)
        # Text by text: the logits of a whole batch are gigabytes on a GPU's larger ones.
        best = torch.stack([(rows @ head.output.T).argmax(-1) for rows in hidden])
        hits.append((best == on.label_ids[..., 0])[on.real.all(-1)].cpu())
    hit = torch.cat(hits).float()
    if not len(hit):
        return {}  # texts shorter than a block
    reached = hit.cumprod(-1)
    before = torch.cat([torch.ones(len(hit), 1), reached[:, :-1]], 1)
    return {
        "acceptance_length": 1 + float(reached.sum(-1).mean()),
        "at_width_4": 1 + float(reached[:, :3].sum(-1).mean()),
        "conditional": [round(float(x), 3) for x in (reached.sum(0) / before.sum(0).clamp_min(1))],
    }


def average_gradients(parameters: list[nn.Parameter], weight: torch.Tensor) -> None:
    """The workers' mean, each with its own weight: a mean over fewer rows counts as such."""
    flat = torch.cat([*(p.grad.flatten() for p in parameters), weight.new_ones(1)]) * weight
    dist.all_reduce(flat)
    parts = (flat[:-1] / flat[-1]).split([p.numel() for p in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad.copy_(part.view_as(parameter))


def _autocast() -> torch.autocast:
    return torch.autocast(DEVICE, torch.bfloat16, enabled=DTYPE is torch.bfloat16)


class Trainer:
    """One of `workers` equal trainers, each with its share of the texts; gradients are averaged."""

    def __init__(self, rank: int, args: argparse.Namespace) -> None:
        """Loads texts, target and the drafter to start from."""
        self.rank, self.args = rank, args
        task = make_task(Origin.read(args.data), args)
        target = load_target(task.target)
        fair = _fair(read_shards(args.data), load_tokenizer(task.target))
        self.held_out = [text for text in fair if text.script % HELD_OUT == 0]
        texts = [text for text in fair if text.script % HELD_OUT]
        if not self.held_out or len(texts) < args.workers:
            fail(f"{args.data} has too few texts, {len(fair)}: run responses.py again for more")
        self.texts = texts[rank :: args.workers]
        self.batches = Batches(
            args.data, task.shape.block, args.anchors, task.mask_token_id, task.columns
        )
        torch.manual_seed(args.seed)
        if args.init == TARGET:
            config = drafters.make_config(target.config, task.shape, task.mask_token_id)
            some = torch.cat([text.features[:64, task.columns] for text in fair[:16]])
            model = drafters.from_target(config, target, some)
        else:
            model = drafters.load(Path(args.init), task.shape, target.config.num_hidden_layers)
        self.model = model.to(DEVICE).train()
        self.head = Head(target)
        self.weights = row_weights(task.shape.block).to(DEVICE)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), betas=(0.9, 0.95), weight_decay=args.weight_decay, fused=True
        )
        self.curve: list[dict[str, Any]] = []
        self.losses: list[float] = []
        self.steps, self.anchors = 0, 0
        torch.manual_seed(args.seed + rank)  # unlike draws of `OTHERS` from here on

    def run(self) -> None:
        """Epochs until time or steps are over."""
        choose = random.Random(self.args.seed * 1000 + self.rank)
        self.started = time.monotonic()
        done = 0.0
        while done < 1:
            epoch = self.batches.epoch(self.texts, self.args.texts, choose, self.args.widths or ())
            for batch in epoch:
                done = self._done()
                if done >= 1:
                    break
                self._step(batch.to(DEVICE), done)
                if self.rank == 0 and self.steps % self.args.every == 0:
                    self._report()
        if self.rank == 0 and self.losses:
            self._report()

    def _done(self) -> float:
        """Which part of the run is over, by steps or by the first worker's clock."""
        if self.args.steps:
            return self.steps / self.args.steps
        part = torch.tensor([(time.monotonic() - self.started) / (60 * self.args.minutes)])
        if self.args.workers > 1:
            dist.broadcast(part, 0)
        return float(part)

    def _step(self, batch: Batch, done: float) -> None:
        rate = (
            self.args.lr * min(1, (done + 1e-3) / WARM_UP) * (0.5 + 0.5 * math.cos(math.pi * done))
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with _autocast():
            hidden = draft(self.model, self.head, batch)
        loss = loss_of(hidden, self.head, batch, self.weights)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        parameters = list(self.model.parameters())
        if self.args.workers > 1:
            weights = self.weights[: batch.real.shape[-1]]
            average_gradients(parameters, (batch.real * weights).sum())
        nn.utils.clip_grad_norm_(parameters, 1.0)
        self.optimizer.step()
        self.steps += 1
        self.anchors += batch.real[..., 0].numel() * self.args.workers
        self.losses.append(float(loss.detach()))

    def _report(self) -> None:
        """Measure, print a line, save the drafter and the curve."""
        drafters.save(self.model, self.args.output)
        epoch = self.batches.epoch(self.held_out, self.args.texts, random.Random(0))
        with _autocast():
            measured = accepted(self.model, self.head, itertools.islice(epoch, CHECKS))
        row = {
            "step": self.steps,
            "minutes": round((time.monotonic() - self.started) / 60, 2),
            "anchors": self.anchors,
            "loss": round(sum(self.losses) / len(self.losses), 4),
            **measured,
        }
        self.curve.append(row)
        self.losses = []
        print(json.dumps(row), flush=True)
        swap.write_file(self.args.output / CURVE, (json.dumps(self.curve) + "\n").encode())


def _fair(texts: Iterable[Text], tokenizer: Tokenizer) -> list[Text]:
    """Texts whose user message is none that a drafter is judged on."""
    evaluation = Overlap.with_evaluation()
    return [
        text
        for text in texts
        if not evaluation.found_in(tokenizer.decode(text.tokens[: text.answer_start].tolist()))
    ]


def work(rank: int, args: argparse.Namespace) -> None:
    """What a worker's process runs."""
    torch.set_num_threads(max(1, args.threads // args.workers))
    if args.workers > 1:
        meeting = (args.output / MEETING).resolve()
        dist.init_process_group(
            "gloo", rank=rank, world_size=args.workers, init_method=f"file://{meeting}"
        )
    Trainer(rank, args).run()
    if args.workers > 1:
        dist.destroy_process_group()


def main() -> None:
    """Start the workers."""
    args = arguments()
    make_task(Origin.read(args.data), args)  # says here, not in a worker, what is wrong
    args.output.mkdir(parents=True, exist_ok=True)
    with alone(args.output):
        _train(args)


def _train(args: argparse.Namespace) -> None:
    (args.output / MEETING).unlink(missing_ok=True)
    try:
        mp.spawn(work, (args,), nprocs=args.workers)
    except mp.ProcessException as error:
        fail(f"a worker ended early: {str(error).strip().splitlines()[-1]}")
    finally:
        (args.output / MEETING).unlink(missing_ok=True)


def arguments() -> argparse.Namespace:
    """The command line."""
    on_gpu = DEVICE == "cuda"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("data", type=texts_folder, help="folder that responses.py wrote")
    add("-o", "--output", type=Path, required=True, help="folder of the drafter")
    add("--features", type=features, help="of the texts' features only so many, or these (1,14,27)")
    add("--mask-token", help="token or id; default: the last special one that no chat has")
    add(
        "--init",
        type=start,
        default="target",
        help="what to start from: target, or a drafter's folder",
    )
    add("--minutes", type=minutes, default=60)
    add("--steps", type=positive, help="stop after so many, not by the clock: repeatable")
    add_shape(parser)
    add("--anchors", type=positive, default=64 if on_gpu else 24, help="of a text in a step")
    add("--texts", type=positive, default=32 if on_gpu else 8, help="of a worker in a step")
    add("--weight-decay", type=float, default=0.05)
    add("--every", type=positive, default=100, help="steps between reports")
    add("--seed", type=int, default=0)
    add_workers(parser, most_workers(MOST_TRAINERS))
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
