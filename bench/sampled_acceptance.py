"""Acceptance under sampling, beside what rejection sampling would reach on the same pair.

Ours: target and drafter draw with shared noise, and a draft is accepted if the two agree. Rejection
sampling (arXiv 2211.17192) accepts a draft from q with probability min(1, p / q): the sum of
min(p, q) over all tokens, which no way of drafting one token from q can pass. Here p and q are the
distributions that the choice is made from, filters included. They are read at the very prefixes
that our decoding goes through: exact for the first draft of a block; later drafts are reached
along accepted ones, whose mix is slightly another under rejection sampling.

    python bench/sampled_acceptance.py --engine DIR -o results.json
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import script
from machine import machine

from dflash_trt.decode.engine import Engine
from dflash_trt.decode.request import SamplingParams
from dflash_trt.engine_dir import open_engine
from dflash_trt.lossless.prompts import bundled_prompts
from dflash_trt.runtime.ort import OrtSession
from dflash_trt.runtime.session import StepResult, StepRows

F64 = npt.NDArray[np.float64]
SETTINGS = (
    {"temperature": 1.0}, {"temperature": 0.6}, {"temperature": 0.8, "top_p": 0.95, "top_k": 50},
)  # fmt: skip


@dataclass(frozen=True)
class Verified:
    """One block: drafts, how many were accepted, logits [drafts, V] of target and drafter."""

    drafts: list[int]
    num_accepted: int
    target: npt.NDArray[np.float32]
    drafter: npt.NDArray[np.float32]


class Tapped(OrtSession):
    """A session that keeps what its blocks of one slot were drafted and verified from."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.blocks: list[Verified] = []
        self._drafter: npt.NDArray[np.float32] | None = None
        self._bound: ort.IOBinding | None = None

    def _binding(self, first_slot: int, num_slots: int) -> ort.IOBinding:
        self._bound = super()._binding(first_slot, num_slots)
        self._bound.bind_output(_draft_output(self._session), "cpu")
        return self._bound

    def step(
        self, first_slot: int, rows: StepRows, num_drafts: int, *, want_logits: bool = False
    ) -> StepResult:
        """See `Session.step`."""
        # With logits, a binding is used once: its outputs are the caches, the drafter's logits, ..
        result = super().step(first_slot, rows, num_drafts, want_logits=True)
        assert self._bound is not None
        drafted = self._bound.get_outputs()[len(self._specs)].numpy() if num_drafts else None
        drafts = rows.tokens[0, 1 : rows.count[0]].tolist()
        if rows.known[0] == 1 and drafts and self._drafter is not None:
            assert result.logits is not None
            count, accepted = len(drafts), int(result.committed[0]) - 1
            self.blocks.append(
                Verified(drafts, accepted, result.logits[0, :count], self._drafter[0, :count])
            )
        self._drafter = drafted
        return result


def tapped_engine(path: Path) -> Engine:
    """An engine directory on a `Tapped` session."""
    opened = open_engine(path)
    if opened.config.pair.drafter.dflash2 is not None:
        script.fail(
            f"{path}: its drafter is of DFlash 2, whose drafts are not drawn from its logits"
        )
    loaded = Engine.from_dir(opened)
    model = onnx.load(opened.model, load_external_data=False)
    head = [node for node in model.graph.node if node.name.startswith("/drafter.lm_head")]
    model.graph.output.append(
        onnx.helper.make_tensor_value_info(head[-1].output[0], onnx.TensorProto.FLOAT, None)
    )
    # External data is looked up beside the model file.
    with tempfile.NamedTemporaryFile(dir=path, suffix=".onnx") as file:
        file.write(model.SerializeToString())
        file.flush()
        limits = loaded.session.limits
        session = Tapped(Path(file.name), opened.config.pair, limits)
    return Engine(session, loaded.tokenizer, loaded.eos_ids)


def _draft_output(session: Any) -> str:
    names = [output.name for output in session.get_outputs()]
    return next(name for name in names if name.startswith("/drafter.lm_head"))


def distribution(logits: npt.NDArray[np.float32], params: SamplingParams) -> F64:
    """What a token is drawn from, [.., V]: temperature, then top-k, top-p and min-p."""
    scaled = logits.astype(np.float64) / params.temperature
    weight = np.exp(scaled - scaled.max(-1, keepdims=True))
    if not params.top_k and params.top_p == 1.0:
        weight = np.where(weight >= params.min_p, weight, 0.0)
        return np.asarray(weight / weight.sum(-1, keepdims=True))
    ordered = -np.sort(-weight, axis=-1)
    if params.top_k:
        limit = ordered[..., min(params.top_k, weight.shape[-1]) - 1, None]
        weight, ordered = (np.where(x >= limit, x, 0.0) for x in (weight, ordered))
    before = np.cumsum(ordered, -1) - ordered
    kept = (before < params.top_p * ordered.sum(-1, keepdims=True)) & (ordered > 0)
    last = np.take_along_axis(ordered, kept.sum(-1, keepdims=True) - 1, -1)
    weight = np.where(weight >= np.maximum(last, params.min_p), weight, 0.0)
    total: F64 = weight / weight.sum(-1, keepdims=True)
    return total


@dataclass
class Tally:
    """Per draft position: how often it was reached, accepted, and the sum of min(p, q) there."""

    reached: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    overlap: list[float] = field(default_factory=list)

    def add(self, block: Verified, params: SamplingParams) -> None:
        """Count one block, up to its first rejected draft."""
        seen = min(block.num_accepted + 1, len(block.drafts))
        p, q = (distribution(x[:seen], params) for x in (block.target, block.drafter))
        for position, shared in enumerate(np.minimum(p, q).sum(-1).tolist()):
            if position == len(self.reached):
                self.reached.append(0)
                self.accepted.append(0)
                self.overlap.append(0.0)
            self.reached[position] += 1
            self.accepted[position] += position < block.num_accepted
            self.overlap[position] += shared

    def to_json(self) -> dict[str, Any]:
        """Rates by position, and the mean acceptance length that they amount to."""
        ours = [a / n for a, n in zip(self.accepted, self.reached, strict=True)]
        rejection = [s / n for s, n in zip(self.overlap, self.reached, strict=True)]
        return {
            "blocks": self.reached[0],
            "ours": {"by_position": ours, "acceptance_length": 1 + sum(_products(ours))},
            "rejection_sampling": {
                "by_position": rejection,
                "acceptance_length": 1 + sum(_products(rejection)),
            },
        }


def _products(rates: Sequence[float]) -> Iterator[float]:
    product = 1.0
    for rate in rates:
        product *= rate
        yield product


def measure(
    engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], width: int
) -> Tally:
    """Decode each prompt alone with each of `params` on a `Tapped` session."""
    session, tally = engine.session, Tally()
    assert isinstance(session, Tapped)
    for prompt in prompts:
        for one in params:
            session.blocks.clear()
            engine.generate(prompt, one, width=width)
            for block in session.blocks:
                tally.add(block, one)
    return tally


def main() -> None:
    """Measure every class at every setting and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", type=script.engine_folder, required=True)
    parser.add_argument("--prompts", type=script.count, default=6, help="prompts of each class")
    parser.add_argument("--tokens", type=script.count, default=64)
    parser.add_argument("--width", type=script.count, default=4)
    parser.add_argument("-o", "--output", type=script.output_file, required=True)
    args = parser.parse_args()
    engine = tapped_engine(args.engine)
    report: dict[str, Any] = {"machine": machine(), "width": args.width, "classes": {}}
    for kind, texts in bundled_prompts().items():
        chats = [[{"role": "user", "content": text}] for text in texts[: args.prompts]]
        ids = [engine.tokenizer.encode_chat(chat) for chat in chats]
        for setting in SETTINGS:
            params = SamplingParams(max_tokens=args.tokens, seed=1, **setting)
            made = measure(engine, ids, [params], args.width).to_json()
            name = ", ".join(f"{key} {value}" for key, value in setting.items())
            report["classes"].setdefault(kind, {})[name] = made
            args.output.write_text(json.dumps(report, indent=1) + "\n")
            lengths = [made[w]["acceptance_length"] for w in ("ours", "rejection_sampling")]
            print(f"{kind}: {name}: ours {lengths[0]:.3f}, rejection sampling {lengths[1]:.3f}",
                  f"first draft {made['ours']['by_position'][0]:.3f}",
                  f"{made['rejection_sampling']['by_position'][0]:.3f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    script.run(main)
