"""What the target says to each script: tokens, context features and its likeliest next tokens.

    python responses.py scripts.jsonl -o data

A script (scripts.py) forces some tokens and leaves others to the target. Worker w of n takes
scripts w, w + n, ..; shards appear whole, so a run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from command import alone, existing_file, fail, features, minutes, positive, run
from options import add_slots, add_workers, most_workers
from origin import FEATURES, Origin, choose_layers
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from ring import ATTENTION, Ring
from safetensors.torch import load_file
from scripts import Script, read_scripts
from shards import (
    FEATURES_DTYPE,
    PREFIX,
    TOP,
    Text,
    finished_ids,
    read_shards,
    shard_files,
    write_file,
    write_shard,
)
from target import DEVICE, DTYPE, ChatFormat, find_target, load_target, read_facts
from transformers import DynamicCache

from dflash_trt.checkpoint import load_tokenizer
from dflash_trt.config import TargetConfig

CHOICES = 16
"""A sampled token is one of so many likeliest."""
GROUP = 128
TEXTS_PER_SHARD = 256
LEAST_ANSWER = 16
"""Tokens of an answer that the clock cuts; with fewer the script is left to the next run."""
RING_BYTES = 2 << 30
"""Of a worker on a CPU."""


@dataclass
class Slot:
    """A text in the making. `forced` are tokens still to be fed, `tokens` those fed."""

    script: Script
    forced: list[int]
    in_answer: bool = False
    answer_start: int = 0
    tokens: list[int] = field(default_factory=list)


def likeliest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The CHOICES likeliest tokens of each row [N, V], best first, and their probabilities.

    They lie in the CHOICES groups of columns with the largest maxima, so only those are sorted.
    """
    rows, size = logits.shape
    width = math.gcd(size, GROUP)
    while size // width < CHOICES:
        width //= 2
    grouped = logits.view(rows, size // width, width)
    best = grouped.amax(-1).topk(CHOICES).indices
    candidates = grouped.gather(1, best[..., None].expand(-1, -1, width)).flatten(1)
    values, at = candidates.float().topk(CHOICES)
    ids = best.gather(1, at // width) * width + at % width
    wide = logits.float()
    total = (wide - values[:, :1]).exp_().sum(-1, keepdim=True)
    return ids, (values - values[:, :1]).exp_() / total


class Writer:
    """A worker's target and slots."""

    def __init__(
        self,
        model: Any,
        chat: ChatFormat,
        layer_ids: tuple[int, ...],
        args: argparse.Namespace,
        seed: int,
    ) -> None:
        """Computes the prefix that every text starts with."""
        self.model, self.chat, self.layer_ids, self.args = model, chat, layer_ids, args
        self.random = torch.Generator().manual_seed(seed)
        ids = torch.tensor([chat.before[:-1]], device=DEVICE)
        cache = DynamicCache(config=model.config)
        model.set_attn_implementation("sdpa")
        out = model(ids, cache=cache, output_hidden_states=True, logits_to_keep=1)
        self.prefix = [(layer.keys[0], layer.values[0]) for layer in cache.layers]
        self.prefix_features = self._features(out)[0]
        self.num_prefix = ids.shape[1]
        model.set_attn_implementation(ATTENTION)
        slots, columns = args.slots, args.max_tokens
        self.ring = Ring(model.config, slots, columns, out.logits)
        self.slots: list[Slot | None] = [None] * slots
        self.features = torch.zeros(
            slots, columns, self.prefix_features.shape[-1], dtype=FEATURES_DTYPE
        )
        self.top_ids = torch.zeros(slots, columns, TOP, dtype=torch.int32)
        self.top_probs = torch.zeros(slots, columns, TOP, dtype=torch.float16)

    def _features(self, out: Any) -> torch.Tensor:
        states = [out.hidden_states[layer + 1] for layer in self.layer_ids]
        return torch.cat(states, -1).to("cpu", FEATURES_DTYPE)

    def fill(self, waiting: list[Script]) -> None:
        """Give free slots the next scripts."""
        for index, slot in enumerate(self.slots):
            if slot is None and waiting:
                script = waiting.pop(0)
                forced = [self.chat.before[-1], *script.user_ids]
                self.slots[index] = Slot(
                    script, forced if script.open else [*forced, *self.chat.after]
                )
                self.ring.lay(index, self.prefix)

    def step(self) -> list[Text]:
        """Feed one token to every slot; texts that ended."""
        rows = [i for i, slot in enumerate(self.slots) if slot is not None]
        inputs = torch.zeros(len(self.slots), 1, dtype=torch.long)
        ages = torch.zeros(len(self.slots), dtype=torch.long)
        for i in rows:
            slot = self.slots[i]
            slot.tokens.append(slot.forced.pop(0))
            inputs[i, 0] = slot.tokens[-1]
            ages[i] = self.num_prefix + len(slot.tokens) - 1
        ages = ages.to(DEVICE)
        out = self.model(
            inputs.to(DEVICE),
            position_ids=ages[:, None],
            attention_mask=self.ring.mask(ages),
            cache=self.ring,
            output_hidden_states=True,
        )
        self.ring.advance()
        ids, probs = (x.cpu() for x in likeliest(out.logits[:, 0]))
        at = (ages.cpu() - self.num_prefix).clamp_min(0)
        everyone = torch.arange(len(self.slots))
        self.features[everyone, at] = self._features(out)[:, 0]
        self.top_ids[everyone, at] = ids[:, :TOP].int()
        self.top_probs[everyone, at] = probs[:, :TOP].half()
        noise = -torch.empty(probs.shape).exponential_(generator=self.random).log_()
        ended = []
        for i in rows:
            slot = self.slots[i]
            if not slot.forced and self._choose(slot, ids[i], probs[i], noise[i]):
                ended.append(self._text(i))
                self.slots[i] = None
        return ended

    def cut(self) -> list[Text]:
        """What there is of texts whose answers have begun: as good to train on, but shorter."""
        begun = [
            i
            for i, slot in enumerate(self.slots)
            if slot and slot.in_answer and len(slot.tokens) >= slot.answer_start + LEAST_ANSWER
        ]
        return [self._text(i) for i in begun]

    def _choose(
        self, slot: Slot, ids: torch.Tensor, probs: torch.Tensor, noise: torch.Tensor
    ) -> bool:
        """Put a slot's next token, or the end of the user's message, in `forced`; is it over?"""
        script, length = slot.script, len(slot.tokens)
        temperature = script.temperature if slot.in_answer or not script.open else 1.0
        if not slot.in_answer and not script.open:
            slot.in_answer, slot.answer_start = True, length
        pick = 0 if temperature == 0 else int((probs.log() / temperature + noise).argmax())
        token = int(ids[pick])
        if slot.in_answer:
            slot.forced.append(token)
            full = self.num_prefix + length + 1 > self.args.max_tokens
            return token in self.chat.ends or full or length - slot.answer_start >= self.args.answer
        if token in self.chat.ends or length >= self.args.user:
            slot.forced.extend(self.chat.after)
            slot.in_answer, slot.answer_start = True, length + len(self.chat.after)
        else:
            slot.forced.append(token)
        return False

    def _text(self, index: int) -> Text:
        slot = self.slots[index]
        assert slot is not None
        count = len(slot.tokens)
        return Text(
            slot.script.id,
            slot.answer_start,
            torch.tensor(slot.tokens, dtype=torch.int32),
            *(x[index, :count].clone() for x in (self.features, self.top_ids, self.top_probs)),
        )


def find_chat(target: Path, folder: Path) -> ChatFormat:
    """The target's chat format, starting as a folder's texts do: a template may write the date."""
    chat = ChatFormat.of(load_tokenizer(target))
    if not (folder / PREFIX).exists():
        return chat
    start = load_file(folder / PREFIX)["tokens"].tolist()
    return dataclasses.replace(chat, before=(*start, chat.before[-1]))


def slots_that_fit(facts: TargetConfig, columns: int) -> int:
    """So many that their keys and values take at most half of a GPU, or `RING_BYTES`."""
    each = facts.attention.num_kv_heads * facts.attention.head_dim * columns * DTYPE.itemsize
    on_gpu = DEVICE == "cuda"
    room = torch.cuda.mem_get_info()[0] // 2 if on_gpu else RING_BYTES
    return max(1, min(512 if on_gpu else 128, room // (2 * facts.num_layers * each)))


def work(worker: int, parent: int, args: argparse.Namespace, tokens: Any, texts: Any) -> None:
    """Write this worker's share of the scripts, while the process `parent` lives."""
    torch.set_num_threads(max(1, args.threads // args.workers))
    source, scripts = read_scripts(args.scripts)
    target = find_target(source.target)
    chat = find_chat(target, args.output)
    layer_ids = Origin.read(args.output).target_layer_ids
    done = finished_ids(args.output)
    waiting = [s for s in scripts[worker :: args.workers] if s.id not in done]
    with torch.inference_mode():
        seed = source.seed * args.workers + worker
        writer = Writer(load_target(target), chat, layer_ids, args, seed)
        if worker == 0:
            write_file(
                args.output / PREFIX,
                {"tokens": torch.tensor(chat.before[:-1]), "features": writer.prefix_features},
            )
        made: list[Text] = []
        until = time.monotonic() + 60 * (args.minutes or math.inf)
        while waiting or any(writer.slots):
            # A worker whose parent was killed ends too.
            if time.monotonic() > until or os.getppid() != parent:
                made += writer.cut()
                if made:
                    _write(args.output, worker, made)
                break
            writer.fill(waiting)
            ended = writer.step()
            made += ended
            with texts.get_lock():
                texts.value += len(ended)
                tokens.value += sum(len(text.tokens) for text in ended)
            if len(made) >= TEXTS_PER_SHARD or not (waiting or any(writer.slots)):
                _write(args.output, worker, made)
                made = []


def _write(folder: Path, worker: int, texts: list[Text]) -> None:
    """A script is in one shard alone, so first and last script are a name of its own."""
    name = f"shard-{worker:02}-{texts[0].script:06}-{texts[-1].script:06}.safetensors"
    write_shard(folder / name, texts)


def main() -> None:
    """Run the workers and show how far they are."""
    args = arguments()
    source, scripts = read_scripts(args.scripts)
    target = find_target(source.target)
    facts, chat = read_facts(target), find_chat(target, args.output)
    if not scripts:
        fail(f"{args.scripts} has no scripts")
    longest = max(max(len(s.user_ids), args.user * s.open) for s in scripts)
    least = len(chat.before) + longest + len(chat.after) + 1
    if args.max_tokens < least:
        fail(f"--max-tokens {args.max_tokens}: the longest message of {longest} needs {least}")
    args.slots = args.slots or slots_that_fit(facts, args.max_tokens)
    origin = Origin(source.target, choose_layers(args.features, facts.num_layers), source.seed)
    origin.check(args.output)
    args.output.mkdir(parents=True, exist_ok=True)
    with alone(args.output):
        origin.keep(args.output)
        _check_scripts(args.output, scripts)
        _respond(args, len(scripts))
    if not shard_files(args.output):
        fail(f"no answer began in {args.minutes:g} minutes: give it more time, or fewer --slots")


def _respond(args: argparse.Namespace, total: int) -> None:
    context = mp.get_context("spawn")
    tokens, texts = context.Value("q", 0), context.Value("q", len(finished_ids(args.output)))
    workers = [
        context.Process(target=work, args=(w, os.getpid(), args, tokens, texts))
        for w in range(args.workers)
    ]
    for process in workers:
        process.start()
    started = time.monotonic()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as progress:
        task = progress.add_task("responses", total=total)
        while any(process.is_alive() for process in workers):
            time.sleep(2)
            rate = tokens.value / (time.monotonic() - started)
            progress.update(task, completed=texts.value, description=f"{rate:,.0f} tokens/s")
    if any(process.exitcode for process in workers):
        fail("a worker failed, as said above; what it had written stays for the next run")


def _check_scripts(folder: Path, scripts: list[Script]) -> None:
    """Refuse a folder whose texts do not start as the scripts of the same numbers say."""
    asked = {script.id: list(script.user_ids) for script in scripts}
    for text in read_shards(folder):
        user_ids = asked.get(text.script, [])
        if text.tokens[1 : 1 + len(user_ids)].tolist() != user_ids:
            fail(f"{folder} has texts of other scripts: take another folder")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("scripts", type=existing_file)
    add("-o", "--output", type=Path, required=True, help="folder of the shards")
    add(
        "--features",
        type=features,
        default=FEATURES,
        help="context features: how many, or of which layers (1,14,27)",
    )
    add_workers(parser, most_workers())
    add_slots(parser)
    add("--max-tokens", type=positive, default=320, help="of a whole text")
    add("--user", type=positive, default=96, help="longest message that the target makes up")
    add("--answer", type=positive, default=192, help="longest answer")
    add("--minutes", type=minutes, help="stop after so long; run again to go on")
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
