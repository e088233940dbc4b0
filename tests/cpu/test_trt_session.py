"""The GPU session's own code on a stand-in for CUDA and TensorRT: whole generations, and refusals.

The stand-in computes steps with the ONNX form of the same graph, so tokens must equal the CPU
session's; what is tested is everything around the step.
"""

from __future__ import annotations

import dataclasses
import gc
import random
from typing import Any

import numpy as np
import pytest

from dflash_trt.decode.request import SamplingParams
from dflash_trt.errors import (
    CapacityError,
    EngineDirError,
    GpuError,
    GpuMemoryError,
    RequestError,
)
from dflash_trt.runtime.session import AdjustRows, SessionLimits, StepRows
from dflash_trt.runtime.trt import GpuNeed, TrtSession
from tiny import Recording, TinyEngine
from tiny.fake_gpu import FakeCuda, FakeEngine, OnnxStep, engine_tensors

SAMPLED = SamplingParams(max_tokens=24, temperature=0.9, top_k=20, seed=5)
ADJUSTED = SamplingParams(
    max_tokens=24, repetition_penalty=1.4, frequency_penalty=0.3, logit_bias={3: 2.0, 9: -4.0}
)


class Rig:
    """A session on the stand-in, and what it stands on."""

    def __init__(
        self, tiny: TinyEngine, *, cuda: FakeCuda | None = None, max_graphs: int = 8,
        most_adjusted: int = 128, engine: dict[str, Any] | None = None, **limits: Any,
    ) -> None:  # fmt: skip
        self.cuda = cuda or FakeCuda()
        self.limits = tiny.limits(**limits)
        tensors = engine_tensors(tiny.facts, self.limits, most_adjusted=most_adjusted)
        run = OnnxStep(tiny.directory.model, self.limits.block)
        self.engine = FakeEngine(self.cuda, tensors, run, **(engine or {}))
        self.session = TrtSession(self.engine, self.cuda, tiny.facts, self.limits, max_graphs)


def jobs(prompts: list[list[int]]) -> list[tuple[list[int], SamplingParams]]:
    """More requests than slots, of all kinds."""
    ways = [SamplingParams(max_tokens=24), SAMPLED, ADJUSTED, SamplingParams(max_tokens=3)]
    return [(prompts[i], ways[i % 4]) for i in (0, 24, 27, 3, 31, 1, 30, 2, 29, 25)]


def rows(prompt: list[int], length: int = 0, known: int | None = None) -> StepRows:
    """One slot's row, greedy."""
    one = np.ones(1, np.int32)
    count = len(prompt)
    tokens = np.array([prompt], np.int32)
    return StepRows.greedy(tokens, one * length, one * count, one * (known or count))


@pytest.mark.parametrize("max_graphs", [0, 1, 4, 64])
def test_generations_equal_those_of_the_cpu_session(
    max_graphs: int, trained_engine: TinyEngine, prompts: list[list[int]]
) -> None:
    rig = Rig(trained_engine, max_graphs=max_graphs)
    wanted = trained_engine.engine().generate_all(jobs(prompts))
    made = trained_engine.engine(rig.session).generate_all(jobs(prompts))
    assert [g.token_ids for g in made] == [g.token_ids for g in wanted]
    assert len(rig.cuda.graphs) == rig.session.num_graphs <= max_graphs
    assert bool(rig.cuda.num_launches) == bool(max_graphs) or max_graphs == 1  # which is crowded


@pytest.mark.parametrize("width", [1, 2, 5])
def test_every_width(width: int, trained_engine: TinyEngine, prompts: list[list[int]]) -> None:
    rig = Rig(trained_engine)
    watched = Recording(rig.session)
    params = SamplingParams(max_tokens=30)
    made = trained_engine.engine(watched).generate(prompts[1], params, width=width)
    assert made.token_ids == trained_engine.generate(prompts[1], 30).token_ids
    for step in watched.steps:
        assert step.result.next_tokens.shape == (1, 1 + step.num_drafts)


def test_a_prompt_of_many_chunks_runs_in_the_prefill_profile(
    trained_engine: TinyEngine, prompts: list[list[int]]
) -> None:
    rig = Rig(trained_engine)
    prompt = [token for p in prompts[:5] for token in p]  # 60 tokens: chunks of 8, the last of 4
    made = trained_engine.engine(rig.session).generate(prompt, SamplingParams(max_tokens=6))
    assert made.token_ids == trained_engine.generate(prompt, 6).token_ids


def test_results_are_the_callers_to_keep(trained_engine: TinyEngine) -> None:
    session = Rig(trained_engine).session
    first = session.step(0, rows([5, 6, 7]), 3, want_logits=True)
    kept = [first.committed.copy(), first.next_tokens.copy(), first.logits.copy()]  # type: ignore[union-attr]
    session.step(0, rows([9], 3), 3, want_logits=True)
    for was, array in zip(kept, (first.committed, first.next_tokens, first.logits), strict=True):
        np.testing.assert_array_equal(was, array)


def test_logits_equal_those_of_the_cpu_session(trained_engine: TinyEngine) -> None:
    rig, cpu = Rig(trained_engine), trained_engine.session()
    for _ in range(3):  # plain, captured, launched
        mine = rig.session.step(1, rows([5, 6, 7, 8]), 2, want_logits=True)
        theirs = cpu.step(1, rows([5, 6, 7, 8]), 2, want_logits=True)
        np.testing.assert_array_equal(mine.logits, theirs.logits)
        assert mine.next_tokens.tolist() == theirs.next_tokens.tolist()


def test_an_engine_without_logits_says_so(trained_engine: TinyEngine) -> None:
    session = Rig(trained_engine, has_logits=False).session
    with pytest.raises(CapacityError, match="does not return logits"):
        session.step(0, rows([5]), 0, want_logits=True)
    loaded = trained_engine.engine(session)
    with pytest.raises(RequestError, match="does not return logits"):
        loaded.generate([5], SamplingParams(max_tokens=2, logprobs=0))
    assert len(loaded.generate([5], SamplingParams(max_tokens=2)).token_ids) == 2


def test_a_released_slot_holds_nothing(trained_engine: TinyEngine) -> None:
    """Its neighbours keep every byte."""
    rig = Rig(trained_engine)
    for slot in range(3):
        rig.session.step(slot, rows([5, 6, 7 + slot]), 3)
    caches = [
        block for block in rig.cuda.blocks.values()
        if block.num_bytes == rig.session._shapes.caches[0].slot_bytes * 3
    ]  # fmt: skip
    assert caches
    before = [_bytes(block) for block in caches]
    rig.session.release(1)
    rig.cuda.synchronize()
    for was, block in zip(before, caches, strict=True):
        now = _bytes(block)
        assert was[1].any()
        assert not now[1].any()
        np.testing.assert_array_equal(now[[0, 2]], was[[0, 2]])


def _bytes(block: Any) -> Any:
    offset = block.start - block.whole.ctypes.data
    return block.whole[offset : offset + block.num_bytes].reshape(3, -1).copy()


def test_graphs_are_kept_for_steps_that_come_again(trained_engine: TinyEngine) -> None:
    rig = Rig(trained_engine, max_graphs=2)
    run = lambda width, slot=0: rig.session.step(slot, rows([5] * width, known=1), 5)  # noqa: E731
    run(4)
    assert (rig.session.num_graphs, rig.cuda.num_launches) == (1, 0)  # the first run settles it
    run(4)
    assert rig.cuda.num_launches == 1
    run(4, slot=1)  # other addresses
    assert (rig.session.num_graphs, rig.cuda.num_launches) == (2, 1)
    for _ in range(15):
        run(3)  # no room: it has to prove itself
    assert rig.cuda.num_launches == 1
    run(4)
    run(3)  # takes the place of the one that was not used for longest
    run(3)
    run(4)
    assert (rig.session.num_graphs, rig.cuda.num_launches) == (2, 4)


def test_greedy_steps_have_no_special_slots(trained_engine: TinyEngine) -> None:
    """Lists of special slots come in powers of two up to all; what adjusts nothing needs none."""
    rig = Rig(trained_engine)
    seen: list[tuple[int, int, int]] = []
    run = rig.engine.run

    def watch(feeds: Any) -> Any:
        ids = feeds["adjust_ids"]
        seen.append((len(feeds["special_slots"]), len(feeds["temperature"]), ids.shape[2]))
        return run(feeds)

    rig.engine.run = watch
    three = np.ones(3, np.int32)
    greedy = StepRows.greedy(np.full((3, 2), 5, np.int32), three * 0, three * 2, three * 2)
    nothing, off = np.zeros((3, 2, 7), np.float32), np.ones(3, np.float32)
    neutral = AdjustRows(off, off, off, nothing.astype(np.int32), nothing, nothing, nothing)
    biased = dataclasses.replace(neutral, bias=nothing - np.float32([[[0]], [[0]], [[3]]]))
    cases: list[tuple[list[float], AdjustRows | None, tuple[int, int, int]]] = [
        ([0, 0, 0], None, (0, 0, 1)), ([0, 0, 0], neutral, (0, 0, 1)), ([0, 1, 0], None, (1, 1, 1)),
        ([1, 0, 1], neutral, (2, 2, 7 + 1)), ([1, 1, 1], None, (3, 3, 1)),
        ([0, 0, 0], biased, (1, 1, 8)), ([0, 1, 0], biased, (2, 2, 8)),
    ]  # fmt: skip
    for heat, adjust, wanted in cases:
        step = dataclasses.replace(greedy, temperature=np.float32(heat), adjust=adjust)
        rig.session.step(0, step, 3)
        assert seen[-1] == wanted


def test_a_prompt_chunk_gets_a_graph_when_it_comes_again(trained_engine: TinyEngine) -> None:
    rig = Rig(trained_engine)
    for count in (0, 1, 1):
        rig.session.step(0, rows([5] * 8), 5)
        assert rig.session.num_graphs == count


@pytest.mark.parametrize(
    "how",
    [
        {"refuses_capture": True},
        {"is_capturable": False},
        {"max_contexts": 2},
        {"fixed_fails": True},
    ],
)
def test_without_graphs_steps_run_all_the_same(
    how: dict[str, Any], trained_engine: TinyEngine, prompts: list[list[int]]
) -> None:
    cuda = FakeCuda(refuses_capture=how.pop("refuses_capture", False))
    rig = Rig(trained_engine, cuda=cuda, engine=how)
    if "max_contexts" in how:  # both plain ones are there, then there is no memory for a third
        rig.session.step(0, rows([5] * 8), 5)
        nothing = np.zeros(0, np.int32)
        rig.session._runner._run_plain(rig.session._shapes.key(0, rows([5]), nothing))
    made = trained_engine.engine(rig.session).generate(prompts[0], SamplingParams(max_tokens=20))
    assert made.token_ids == trained_engine.generate(prompts[0], 20).token_ids
    assert (rig.session.num_graphs, rig.cuda.num_launches) == (0, 0)


def test_what_was_compiled_is_kept_when_something_new_was_made(trained_engine: TinyEngine) -> None:
    rig = Rig(trained_engine)
    for saved in (1, 1, 1):
        rig.session.step(0, rows([5]), 0)
        assert rig.engine.num_saved == saved


def test_a_step_that_fails_leaves_the_session_usable(trained_engine: TinyEngine) -> None:
    rig, cpu = Rig(trained_engine), trained_engine.session()
    wanted = cpu.step(0, rows([5, 6]), 3).next_tokens.tolist()
    rig.session.step(0, rows([5, 6]), 3)
    rig.cuda.fails_next = "launch failure"
    with pytest.raises(GpuError, match="launch failure"):
        rig.session.step(0, rows([5, 6]), 3)
    assert rig.session.step(0, rows([5, 6]), 3).next_tokens.tolist() == wanted


def test_steps_that_would_write_outside_of_the_caches(trained_engine: TinyEngine) -> None:
    rig = Rig(trained_engine)
    capacity = rig.session._shapes.capacity
    last = capacity - rig.limits.block - 1
    rig.session.step(2, rows([5], last), 0)
    with pytest.raises(CapacityError, match=f"would write {capacity + 1} rows"):
        rig.session.step(2, rows([5], last + 1), 0)
    with pytest.raises(CapacityError, match="no slots 3 to 3"):
        rig.session.step(3, rows([5]), 0)


def test_more_adjusted_ids_than_the_engine_takes(
    trained_engine: TinyEngine, prompts: list[list[int]]
) -> None:
    rig = Rig(trained_engine, most_adjusted=5, max_adjusted=5)
    loaded = trained_engine.engine(rig.session)
    for params in (
        dataclasses.replace(ADJUSTED, logit_bias={}),
        SamplingParams(max_tokens=4, logit_bias=dict.fromkeys(range(6), 1.0)),
    ):
        with pytest.raises(RequestError, match="this engine takes 5"):
            loaded.generate(prompts[27], params)
    few = SamplingParams(max_tokens=9, logit_bias=dict.fromkeys((3, 9, 11, 12, 13), 2.0))
    made = loaded.generate(prompts[27], few)
    assert made.token_ids == trained_engine.engine().generate(prompts[27], few).token_ids
    ids = np.zeros((1, 1, 6), np.int32)
    one, same = np.ones(1, np.float32), np.zeros((1, 1, 6), np.float32)
    adjust = AdjustRows(one, one, one, ids, same + 1, same, same)
    with pytest.raises(CapacityError, match="touch 6 token ids"):
        rig.session.step(0, dataclasses.replace(rows([5]), adjust=adjust), 0)


def test_a_gpu_that_is_too_small(trained_engine: TinyEngine) -> None:
    roomy = Rig(trained_engine)
    held = sum(block.num_bytes for block in roomy.cuda.blocks.values())
    slot = roomy.session._shapes.cache_bytes
    with pytest.raises(GpuMemoryError, match=r"caches of 3 slots .*GB are free") as refusal:
        Rig(trained_engine, cuda=FakeCuda(held - 2 * slot))
    assert "--max-slots 1" in refusal.value.hint
    with pytest.raises(GpuMemoryError) as refusal:
        Rig(trained_engine, cuda=FakeCuda(slot))
    assert "--max-slots" not in refusal.value.hint


def test_what_an_engine_needs_is_said_in_bytes() -> None:
    need = GpuNeed(weights=5_540_000_000, caches_per_slot=610_000_000, max_slots=8, scratch=0)
    need.check((10_420_000_000, 16_000_000_000))
    with pytest.raises(GpuMemoryError) as refusal:
        need.check((10_000_000_000, 16_000_000_000))
    assert refusal.value.message == (
        "the engine needs 10.42 GB of the GPU's memory (weights 5.54, caches of 8 slots 4.88), "
        "10.00 of 16.00 GB are free"
    )
    assert refusal.value.hint == "build with --max-slots 7, or with a smaller --max-seq-len"


def test_nothing_stays_on_the_gpu(trained_engine: TinyEngine) -> None:
    rig = Rig(trained_engine)
    rig.session.step(0, rows([5, 6]), 3)
    rig.session.step(0, rows([5, 6]), 3)
    cuda = rig.cuda
    gc.disable()  # the last reference is enough
    try:
        del rig
    finally:
        gc.enable()
    assert (cuda.blocks, cuda.pinned_blocks, cuda.graphs) == ({}, {}, [])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: [x for x in t if x.name != "min_p"], "inputs .* min_p"),
        (lambda t: [x for x in t if x.name != "updated_draft_k_0"], "outputs .* updated_draft_k_0"),
        (lambda t: [*t, dataclasses.replace(t[0], name="tokens2")], "inputs .* tokens2"),
        (lambda t: _with(t, "target_v_1", most=((3, 2, 32, 16),)), "target_v_1 has shape"),
        (lambda t: _with(t, "target_v_1", most=((3, 2, 113, 1),)), "target_v_1 has shape"),
        (lambda t: _with(t, "tokens", most=((1, 4), (3, 4))), "no profile .* 3 slots and 6 tok"),
        (lambda t: _with(t, "tokens", most=((1, 4), (3, 6))), "no profile .* 1 slots and 8 tok"),
    ],
)  # fmt: skip
def test_an_engine_that_is_not_the_step_graph(
    change: Any, words: str, trained_engine: TinyEngine
) -> None:
    limits = trained_engine.limits()
    cuda = FakeCuda()
    tensors = change(engine_tensors(trained_engine.facts, limits))
    engine = FakeEngine(cuda, tensors, lambda feeds: {})
    with pytest.raises(EngineDirError, match=words):
        TrtSession(engine, cuda, trained_engine.facts, limits)
    assert not cuda.blocks


def _with(tensors: list[Any], name: str, **changes: Any) -> list[Any]:
    return [dataclasses.replace(t, **changes) if t.name == name else t for t in tensors]


def test_slots_that_tensorrt_could_not_be_given(trained_engine: TinyEngine) -> None:
    limits = trained_engine.limits()
    tensors = engine_tensors(trained_engine.facts, limits)
    odd = [
        dataclasses.replace(t, most=((3, 2, 113, 16),) * 2) if t.shape[1:] == (2, 112, 16) else t
        for t in tensors
    ]
    cuda = FakeCuda()
    with pytest.raises(EngineDirError, match="no multiple of 256"):
        TrtSession(FakeEngine(cuda, odd, lambda feeds: {}), cuda, trained_engine.facts, limits)


def test_random_steps_of_any_shape(trained_engine: TinyEngine) -> None:
    """Slots, widths, idle rows and drafts at random, the caches carried on by both sessions."""
    rng = random.Random(11)
    rig, cpu = Rig(trained_engine, max_graphs=4), trained_engine.session()
    lengths = [0, 0, 0]
    for _ in range(60):
        first = rng.randrange(3)
        slots = rng.randint(1, 3 - first)
        width = rng.randint(1, 8 if slots == 1 else rig.limits.block)
        step = _random_rows(rng, rig.limits, lengths[first : first + slots], width)
        drafts = rng.randrange(rig.limits.block)
        mine, theirs = (s.step(first, step, drafts) for s in (rig.session, cpu))
        live = step.count > 0
        assert mine.committed[live].tolist() == theirs.committed[live].tolist()
        assert mine.next_tokens[live].tolist() == theirs.next_tokens[live].tolist()
        for i in range(slots):
            lengths[first + i] += int(theirs.committed[i]) if live[i] else 0
            if lengths[first + i] > 70:
                lengths[first + i] = 0
                rig.session.release(first + i)
                cpu.release(first + i)


def _random_rows(
    rng: random.Random, limits: SessionLimits, lengths: list[int], width: int
) -> StepRows:
    count = [rng.choice([0, width, rng.randint(1, width)]) for _ in lengths]
    known = [min(n, rng.choice([1, n])) for n in count]
    tokens = [[rng.randrange(limits.vocab_size) for _ in range(width)] for _ in lengths]
    return StepRows.greedy(*(np.array(x, np.int32) for x in (tokens, lengths, count, known)))
